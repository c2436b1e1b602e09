"""Parts of a saved model for those who answer with it: nobody builds the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from client_pipeline.families.merged_weights import MergedWeights
from client_pipeline.partition.parts import ModelParts, block_weights
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.weights.base_weights import FrozenBase


class BlockWeights(Mapping[int, Mapping[str, Tensor]]):
    """What each TEB is loaded with, read when it is asked for.

    Parameters
    ----------
    num_blocks : L
    read : gives those of one TEB
    """

    def __init__(self, num_blocks: int, read: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._num_blocks, self._read = num_blocks, read

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        """Read those of one TEB, under its own names."""
        return self._read(index)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices."""
        return iter(range(self._num_blocks))

    def __len__(self) -> int:
        """Return L."""
        return self._num_blocks


@dataclass(frozen=True)
class AnsweringParts:
    """A model whose TEBs are elsewhere."""

    parts: ModelParts
    """Embedding and head, with adapters merged; of the TEBs the shapes alone."""
    spec: ModelSpec
    """The model that the devices have."""
    weights: BlockWeights
    frozen: Mapping[str, Tensor]
    """What adapters of the devices are added to; empty: they are merged, too."""


def answering_parts(spec: ModelSpec, weights: Mapping[str, Tensor], base: FrozenBase | None) -> AnsweringParts:
    """Build embedding and head of a saved model, in evaluation. TEBs in few bits stay so, beside their adapters.

    Parameters
    ----------
    spec : of the model
    weights : saved ones, by global name
    base : frozen weights that are not among them; None: all are

    Raises
    ------
    ValueError
        If weights are missing, or of another shape or file.
    """
    if base is not None:
        base = base.check()
    merged = MergedWeights(spec, weights, base)
    parts = merged.build(blocks=False)
    num_blocks = len(parts.blocks)
    if spec.low_bits and base is not None:
        return AnsweringParts(parts, spec, BlockWeights(num_blocks, lambda i: block_weights(weights, i)), base)
    return AnsweringParts(parts, merged.plain, BlockWeights(num_blocks, lambda i: merged.of_part(f"blocks.{i}")), {})
