"""A model as plain data: enough to build any of its parts on any device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SEQUENCE_CLASSIFICATION = "sequence-classification"
TOKEN_CLASSIFICATION = "token-classification"
MASKED_LM = "masked-lm"
CAUSAL_LM = "causal-lm"
SEQ2SEQ = "seq2seq"
HEADS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, MASKED_LM, CAUSAL_LM, SEQ2SEQ)
"""What a server can train; a family says which of them it has."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of the model that is trained, without its weights.

    It crosses the network as JSON, so every value in it is a JSON value.
    """

    family: str
    """Name of the adapter: one of :func:`client_pipeline.partition.families`."""

    head: str
    """What the server trains: one of :data:`HEADS`."""

    config: dict[str, Any] = field(default_factory=dict)
    """The family's own configuration."""

    def to_json(self) -> str:
        """Return the specification as JSON with sorted keys (equal specifications give equal text)."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is not a specification.
        """
        try:
            raw = json.loads(text)
            return cls(family=str(raw["family"]), head=str(raw["head"]), config=dict(raw["config"]))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"model specification: expected JSON with the keys family, head and config, found {text[:80]!r}"
            ) from error
