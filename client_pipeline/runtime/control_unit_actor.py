"""The control unit in a process of its own, or as a member of a shared one.

Who starts and asks it imports nothing that computes: torch costs seconds and hundreds of megabytes in every process,
and Flower's workers only pass weights on. So the control unit is imported in its own process, and weights come and go
as arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from client_pipeline.quick_imports import quick_import
from client_pipeline.runtime.round_order import ClusterSetup, RoundOrder, RoundResult
from client_pipeline.runtime.unused_actors import LIVENESS

if TYPE_CHECKING:
    from torch import Tensor

    from client_pipeline.partition.base_weights import FrozenBase
    from client_pipeline.runtime.control_unit import ControlUnit

CONTROL_UNIT = "client_pipeline.runtime.control_unit"
"""Module of the control unit, which imports torch."""


class ControlUnitActor:
    """A :class:`~client_pipeline.runtime.control_unit.ControlUnit` to those who have no torch.

    Parameters
    ----------
    setup : what the control unit is told once; its frozen weights may be arrays
    """

    def __init__(self, setup: ClusterSetup) -> None:
        self._setup = setup
        self._unit: ControlUnit | None = None

    def prepare(self) -> dict[str, Any]:
        """Make the control unit: not in the constructor, which would hide an error. Else see ControlUnit.

        Raises
        ------
        ValueError
            If the files of the frozen weights are not here and cannot be pulled, or are not the server's. Else as
            ControlUnit does.
        """
        return self._made().prepare()

    def _made(self) -> ControlUnit:
        if self._unit is None:
            setup = self._setup
            frozen = _base_of(setup) if setup.base else _tensors(setup.frozen)
            self._unit = quick_import(CONTROL_UNIT).ControlUnit(replace(setup, frozen=frozen))
        return self._unit

    def train_round(self, order: RoundOrder) -> RoundResult:
        """Train a round, on weights that are tensors or arrays; the result's are arrays. Raises as ControlUnit does."""
        result = self._made().train_round(replace(order, weights=_tensors(order.weights)))
        return replace(result, weights={name: weight.numpy() for name, weight in result.weights.items()})

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def alive(self) -> tuple[int, str]:
        """See ControlUnit."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def in_use(self) -> bool:
        """See ControlUnit."""
        return self._unit is None or self._unit.in_use()

    def close(self) -> None:
        """See ControlUnit."""
        if self._unit is not None:
            self._unit.close()


def _base_of(setup: ClusterSetup) -> FrozenBase:
    """Frozen weights that this machine gets by itself: drawn, or in files that are compared, and pulled if missing."""
    from client_pipeline.link.weight_pull import weights_here
    from client_pipeline.partition.base_weights import BaseWeights
    from client_pipeline.partition.fresh_base import frozen_base

    base = frozen_base(setup.base, setup.spec, setup.base_source)
    if not isinstance(base, BaseWeights):
        return base
    return weights_here(base, setup.weight_cache, setup.pull_from, setup.certificates)


def _tensors(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of weights by global name; what Ray gives out to be read alone is copied."""
    import torch

    tensors = {}
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight = torch.from_numpy(weight if weight.flags.writeable else weight.copy())
        tensors[name] = weight
    return tensors
