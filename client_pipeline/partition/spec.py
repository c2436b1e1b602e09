"""A model as plain data: enough to build any of its parts on any device."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from client_pipeline.documents import json_value

SEQUENCE_CLASSIFICATION = "sequence-classification"
TOKEN_CLASSIFICATION = "token-classification"
MASKED_LM = "masked-lm"
CAUSAL_LM = "causal-lm"
SEQ2SEQ = "seq2seq"
HEADS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, MASKED_LM, CAUSAL_LM, SEQ2SEQ)
"""Parts that a server can train; each family has some of them."""
CLASSIFIERS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)
"""Those with labels of their own."""


ALL_LINEAR = "all-linear"
BASE_DTYPES = ("float32", "bfloat16", "int8", "nf4")
"""Types of frozen matrices; see :mod:`client_pipeline.weights.low_bits`."""
LORA_AVERAGES = ("factors", "products")
LORA_HEADS = ("whole", "adapters")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Table ``[lora]``: low-rank adapters (arXiv:2106.09685) in the TEBs, where ``model.trainable = "lora"``."""

    rank: int = 8
    """r: a matrix [out, in] learns B A with B [out, r] and A [r, in]."""
    alpha: float = 16.0
    """B A counts times alpha / r."""
    dropout: float = 0.0
    """Dropout probability of what goes into A."""
    targets: str = ""
    """Names of the TEB's linear layers that get adapters, separated by commas, or ``all-linear``; empty: the query and
    value projections, as in the paper."""
    average: str = "factors"
    """Mean of the clusters' adapters: of ``factors``, A and B each; or of ``products``, B A, as the best factors
    of rank r. They are the same as long as the clusters' factors are close."""
    cluster_ranks: str = ""
    """Rank of each cluster, at most ``rank``, separated by commas, for ``average`` = ``products``; B A counts times
    alpha / r with the r of ``rank`` everywhere. Empty: all have that."""
    head: str = "whole"
    """Server's training of a decoder-only model: ``whole``, its blocks, norm and output layer; or ``adapters`` in its
    blocks, the rest frozen: gradient and optimizer state of an output layer are many times its TEBs'."""
    first_block: int = 0
    """First block with adapters, from 0, the server's counted on after the TEBs; those below stay as they are."""

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if self.rank < 1:
            raise ValueError(f"lora.rank: expected at least 1, found {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lora.alpha: expected a number above 0, found {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout: expected a number in [0, 1), found {self.dropout}")
        if self.targets and not all(self.target_names):
            raise ValueError(f"lora.targets: expected names separated by commas, found {self.targets!r}")
        if self.average not in LORA_AVERAGES:
            raise ValueError(f"lora.average: expected one of {', '.join(LORA_AVERAGES)}, found {self.average!r}")
        if self.head not in LORA_HEADS:
            raise ValueError(f"lora.head: expected one of {', '.join(LORA_HEADS)}, found {self.head!r}")
        if self.first_block < 0:
            raise ValueError(f"lora.first-block: expected 0 or more, found {self.first_block}")
        if self.cluster_ranks:
            self._check_cluster_ranks()

    def _check_cluster_ranks(self) -> None:
        texts = [text.strip() for text in self.cluster_ranks.split(",")]
        if not all(text.isdecimal() and 1 <= int(text) <= self.rank for text in texts):
            raise ValueError(
                f"lora.cluster-ranks: expected whole numbers from 1 to lora.rank = {self.rank}, separated by commas, "
                f"found {self.cluster_ranks!r}"
            )
        if self.average != "products":
            raise ValueError(
                f"lora.cluster-ranks: {self.cluster_ranks}: factors of different ranks have no mean, found "
                f'lora.average = {self.average!r}; set lora.average = "products"'
            )

    @property
    def ranks(self) -> list[int]:
        """``cluster_ranks``, one by one; empty where all clusters have ``rank``."""
        return [int(text) for text in self.cluster_ranks.split(",")] if self.cluster_ranks else []

    @property
    def freezes_head(self) -> bool:
        """True if the server's part has adapters, too, and is frozen beside them."""
        return self.head == "adapters"

    def of_cluster(self, cluster: int) -> LoraConfig:
        """Return the adapters of one cluster: B A counts as much as everywhere."""
        if not self.ranks:
            return self
        rank = self.ranks[cluster]
        return replace(self, rank=rank, alpha=self.alpha * rank / self.rank, cluster_ranks="")

    @property
    def target_names(self) -> list[str]:
        """``targets``, one by one."""
        return [name.strip() for name in self.targets.split(",")] if self.targets else []


OUR_OWN = ("transformer",)
"""Families of this package that the transformers library does not know."""


def is_outside(family: str) -> bool:
    """Return whether a family is a class that a configuration names."""
    return ":" in family


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of the model that is trained, without its weights.

    It crosses the network as JSON, so every value in it is a JSON value.
    """

    family: str
    """One of :func:`client_pipeline.families.families.families`, or ``module:Class``."""

    head: str
    """Part that the server trains: one of :data:`HEADS`."""

    config: dict[str, Any] = field(default_factory=dict)
    """The family's own configuration."""

    lora: LoraConfig | None = None
    """Adapters in the TEBs: embedding and TEBs are frozen, and the adapters and the head are trained. None: everything
    is trained."""

    base_dtype: str = "float32"
    """Type of the frozen matrices of TEBs: one of :data:`BASE_DTYPES`."""

    @property
    def low_bits(self) -> bool:
        """True if TEBs have layers in few bits."""
        return self.lora is not None and self.base_dtype != "float32"

    def of_cluster(self, cluster: int) -> ModelSpec:
        """Return the model as one cluster has it: with adapters of its own rank."""
        return self if self.lora is None else replace(self, lora=self.lora.of_cluster(cluster))

    def to_json(self) -> str:
        """Return the specification as JSON with sorted keys (equal specifications give equal text)."""
        values = asdict(self)
        # A specification without them reads as one of an earlier release.
        if self.base_dtype == "float32":
            del values["base_dtype"]
        if self.lora is not None and self.lora.average == "factors":
            del values["lora"]["average"], values["lora"]["cluster_ranks"]
        if self.lora is not None and not self.lora.freezes_head:
            del values["lora"]["head"]
        if self.lora is not None and not self.lora.first_block:
            del values["lora"]["first_block"]
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is not a specification.
        """
        try:
            raw = json_value(text)
            lora = LoraConfig(**raw["lora"]) if raw.get("lora") else None
            base_dtype = str(raw.get("base_dtype", "float32"))
            return cls(
                family=str(raw["family"]),
                head=str(raw["head"]),
                config=dict(raw["config"]),
                lora=lora,
                base_dtype=base_dtype,
            )
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"model specification: expected JSON with the keys family, head and config, found {text[:80]!r}"
            ) from error
