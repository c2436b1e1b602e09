"""Baselines that tune adapters: SplitLoRA, SplitFrozen, FedLoRA, FlexLoRA, and clusters that tune alone.

In their papers a client is one device. Here it is the fastest of its cluster, with the whole mini-batch at once; that
its part exceeds its memory (C7) or its energy (C9) is waived, and marked so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from client_pipeline.partition.spec import LoraConfig
from strategies.aggregation.adapter_products import Factors, sum_of_products
from strategies.aggregation.product_mean import ProductMean
from strategies.baselines.pipeline import EveryCluster
from strategies.collapipe import CollaPipe
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Instance
from strategies.planning.policy import RoundPolicy
from strategies.planning.ranked import RankedSelection, random_rank
from strategies.planning.segment_rules import choice_of, plan_on_fastest
from strategies.separate_models import SeparateModels

WAIVED = ("C7", "C9")


def on_one_device(instance: Instance, cluster: int) -> SegmentChoice:
    """Return all TEBs on a cluster's fastest device, whatever its memory holds."""
    return choice_of(instance, cluster, plan_on_fastest(instance, cluster, [instance.L], 1))


class AdapterTuning(CollaPipe):
    """What the baselines with one global model have in common."""

    traits = replace(CollaPipe.traits, waives=WAIVED)
    policy_name: ClassVar[str]

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy: clients drawn if channels are too few, channels by upload time, all allowed power."""
        return RankedSelection(cls.policy_name, random_rank(seed), on_one_device)

    @classmethod
    def check_model(cls, lora: LoraConfig | None, num_blocks: int) -> None:
        """Refuse a model without adapters, and settings of adapters that are another method's."""
        cls.check_adapters(adapters_of(cls.policy_name, lora), num_blocks)

    @classmethod
    def check_adapters(cls, lora: LoraConfig, num_blocks: int) -> None:
        """Refuse settings of adapters that are another method's: all but one average the factors."""
        del num_blocks
        check_average(cls.policy_name, lora, "factors")


class SplitLoRA(AdapterTuning):
    """Clients hold the first blocks, the server the others, each with adapters (arXiv:2407.00952, Section III).

    Every local step is its split fine-tuning stage: clients run forward at the same time (a1), send activations (a2),
    the server learns once from all clients' (a3) and sends gradients (a4), clients run backward (a5). Every round ends
    with its aggregation stage: the clients' adapters go up (b1), their mean by data (b2) comes down (b3). So its I is
    ``local-steps``, and its split point ``model.decoder-layers``; ``lora.head = "adapters"`` for the server's blocks.
    """

    policy_name = "splitlora"


class SplitFrozen(SplitLoRA):
    """SplitLoRA whose clients train nothing: they run forward, the server learns (arXiv:2503.18986, Section III).

    No gradient is needed below the server, and no adapter goes up or comes down.
    """

    policy_name = "splitfrozen"

    @classmethod
    def check_adapters(cls, lora: LoraConfig, num_blocks: int) -> None:
        """Refuse adapters in the clients."""
        super().check_adapters(lora, num_blocks)
        if lora.first_block < num_blocks:
            raise ValueError(
                f"lora.first-block: strategy = splitfrozen trains none of the {num_blocks} TEBs of a cluster, found "
                f"{lora.first_block}; set it to {num_blocks}, or to more where the server's first blocks stay, too"
            )


class FedLoRA(AdapterTuning):
    """Every client tunes adapters of the whole model; A and B are averaged by data, each by itself (arXiv:2305.05644).

    With ``lora.head = "adapters"`` nothing but adapters travels; nothing is split.
    """

    traits = replace(AdapterTuning.traits, decoder_on_server=False)
    policy_name = "fedlora"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(decoder=None, **arguments)


class SingularMean(ProductMean):
    """The mean of products by its singular value decomposition U S V^T, as printed: B = U S and A = V^T.

    A client of rank r begins with the first r columns of B and rows of A.
    """

    def cut(self, factors: Factors, rank: int) -> Factors:
        """Return the leading columns of B and rows of A."""
        return Factors(factors.b[:, :rank], factors.a[:rank])

    def mean(self, start: Factors, trained: Sequence[tuple[float, Factors]]) -> tuple[Factors, float]:
        """Decompose the sum of w B A, whatever a client has not seen."""
        total, rank = sum_of_products(trained), start.rank
        rows = total.right[:, :rank].T
        if (missing := rank - len(rows)) > 0:
            # No client of the global rank has trained: further singular values are 0, their vectors orthogonal.
            rest = start.a - start.a @ rows.T @ rows
            rows = np.concatenate([rows, np.linalg.svd(rest, full_matrices=False)[2][:missing]])
        b = np.pad(total.left[:, :rank] * total.values[:rank], ((0, 0), (0, max(missing, 0))))
        return Factors(b, rows), total.truncated(rank)


class FlexLoRA(FedLoRA):
    """FedLoRA with ranks of the clients' own (``lora.cluster-ranks``): arXiv:2402.11505, Section 3.

    The server averages the products B A by data, and each client goes on with the best factors of its rank, by singular
    value decomposition. Unlike ``collapipe`` with ``lora.average = "products"`` it forgets what clients of lower ranks
    have not seen, and turns the factors, though optimizers have states for them.
    """

    policy_name = "flexlora"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        assert isinstance(self.aggregator, ProductMean), "lora.average is products"
        self.aggregator = SingularMean(self.aggregator.lora)

    @classmethod
    def check_adapters(cls, lora: LoraConfig, num_blocks: int) -> None:
        """Refuse another mean than that of the products."""
        check_average(cls.policy_name, lora, "products")


class Local(SeparateModels):
    """Every cluster tunes adapters of the whole model on its own data; nothing is exchanged."""

    traits = replace(SeparateModels.traits, waives=WAIVED)

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy by which every cluster trains."""
        del seed
        return EveryCluster("local", on_one_device)

    @classmethod
    def check_model(cls, lora: LoraConfig | None, num_blocks: int) -> None:
        """Refuse a model without adapters."""
        adapters_of("local", lora)


def adapters_of(strategy: str, lora: LoraConfig | None) -> LoraConfig:
    """Return the adapters of a model; raises ``ValueError`` if it has none."""
    if lora is None:
        raise ValueError(
            f"model.trainable: strategy = {strategy} tunes adapters, found a model that is trained whole; set "
            'model.trainable = "lora"'
        )
    return lora


def check_average(strategy: str, lora: LoraConfig, expected: str) -> None:
    """Refuse another mean of adapters than a strategy's."""
    if lora.average != expected:
        raise ValueError(
            f'lora.average: strategy = {strategy} averages the {expected}, found {lora.average}; set it to "{expected}"'
        )
