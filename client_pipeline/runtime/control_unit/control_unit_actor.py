"""The control unit in a process of its own, or as a member of a shared one.

The processes that start and ask it do not import torch, which costs seconds and hundreds of megabytes. So the control
unit is imported in its own process, and weights come and go as arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder, RoundResult
from client_pipeline.runtime.ray.unused_actors import LIVENESS

if TYPE_CHECKING:
    from torch import Tensor

    from client_pipeline.runtime.control_unit.control_unit import ControlUnit
    from client_pipeline.weights.base_weights import FrozenBase


class ControlUnitActor:
    """A :class:`~client_pipeline.runtime.control_unit.control_unit.ControlUnit` for callers without torch.

    Parameters
    ----------
    setup : the order before round 1; its frozen weights may be arrays
    """

    def __init__(self, setup: ClusterSetup) -> None:
        self._setup = setup
        self._unit: ControlUnit | None = None
        self._results: dict[int, list[Any]] = {}
        """Reference to the result of a round that is collected later, by its number."""

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
            # It imports torch, which the processes that start and ask this actor do without.
            from client_pipeline.runtime.control_unit.control_unit import ControlUnit

            self._unit = ControlUnit(replace(setup, frozen=frozen))
        return self._unit

    def train_round(self, order: RoundOrder) -> RoundResult:
        """Train a round, on weights that are tensors or arrays; the result's are arrays. Raises as ControlUnit does."""
        result = self._made().train_round(replace(order, weights=_tensors(order.weights)))
        return replace(result, weights={name: weight.numpy() for name, weight in result.weights.items()})

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def alive(self) -> tuple[int, str]:
        """Answer at once, also while a round is trained: process id and Ray node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def in_use(self) -> bool:
        """See ControlUnit."""
        return self._unit is None or self._unit.in_use()

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def keep(self, round_: int, result: list[Any]) -> None:
        """Keep the reference to a round's result, in a list, until another is kept."""
        self._results = {round_: result}

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def kept(self, round_: int) -> list[Any]:
        """Return the reference that was kept for a round; an empty list if there is none."""
        return self._results.get(round_, [])

    def close(self) -> None:
        """See ControlUnit."""
        if self._unit is not None:
            self._unit.close()


def _base_of(setup: ClusterSetup) -> FrozenBase:
    """Return the frozen weights that this machine gets by itself: drawn, or in files, which are pulled if missing."""
    from client_pipeline.families.fresh_base import frozen_base
    from client_pipeline.link.weight_pull import weights_here
    from client_pipeline.weights.base_weights import BaseWeights

    base = frozen_base(setup.base, setup.spec, setup.base_source)
    if not isinstance(base, BaseWeights):
        return base
    return weights_here(base, setup.weight_cache, setup.pull_from, setup.certificates)


def _tensors(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights as tensors; arrays from Ray that cannot be written to are copied."""
    import torch

    tensors = {}
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight = torch.from_numpy(weight if weight.flags.writeable else weight.copy())
        tensors[name] = weight
    return tensors
