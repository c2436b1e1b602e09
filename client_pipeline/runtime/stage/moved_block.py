"""A TEB away from a device: on the move, as a copy or in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from client_pipeline.weights.base_weights import FrozenBase

BlockArrays = list[dict[str, NDArray[Any]]]
"""A TEB away from a device, as NumPy arrays."""


class MovedBlock(NamedTuple):
    """A TEB away from a device: on its way to another, or at rest."""

    weights: dict[str, Tensor] = {}
    """Trained tensors; empty: fresh."""
    optimizer: dict[str, Tensor] = {}
    """Empty: no step was taken."""
    frozen: Mapping[str, Tensor] = {}
    """Frozen tensors that adapters are added to; no checkpoint has them. Empty without adapters."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, without those that each machine reads from its own files."""
        parts = self[:2] if isinstance(self.frozen, FrozenBase) else self
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def as_arrays(self) -> BlockArrays:
        """Return NumPy arrays of all but the frozen weights: Ray copies arrays once, and tensors several times."""
        return [{name: tensor.numpy() for name, tensor in part.items()} for part in self[:2]]

    @classmethod
    def from_arrays(cls, arrays: BlockArrays) -> MovedBlock:
        """Copy the arrays of :meth:`as_arrays` into tensors: arrays that Ray hands out cannot be written to."""
        return cls(*({name: torch.tensor(array) for name, array in part.items()} for part in arrays))
