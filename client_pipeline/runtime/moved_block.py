"""A TEB away from a device: what a move, a copy or a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from client_pipeline.partition.base_weights import FrozenBase

BlockArrays = list[dict[str, NDArray[Any]]]
"""A TEB away from a device, as NumPy arrays."""


class MovedBlock(NamedTuple):
    """A TEB away from a device: on its way to another, or at rest."""

    weights: dict[str, Tensor] = {}
    """What is trained; empty: fresh."""
    optimizer: dict[str, Tensor] = {}
    """Empty: no step was taken."""
    frozen: Mapping[str, Tensor] = {}
    """What adapters are added to; it is not of a checkpoint. Empty without adapters."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, but those that each machine has by itself."""
        parts = self[:2] if isinstance(self.frozen, FrozenBase) else self
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def as_arrays(self) -> BlockArrays:
        """The same as NumPy arrays, which have no frozen weights: Ray copies these once, and tensors several times."""
        return [{name: tensor.numpy() for name, tensor in part.items()} for part in self[:2]]

    @classmethod
    def from_arrays(cls, arrays: BlockArrays) -> MovedBlock:
        """What :meth:`as_arrays` gave, in memory of its own: what Ray hands out cannot be written to."""
        return cls(*({name: torch.tensor(array) for name, array in part.items()} for part in arrays))
