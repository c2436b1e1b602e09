"""Sequences of ids as plain arrays, and a model switched to evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from client_pipeline.partition.parts import ModelParts
from flower_app.tasks.texts import stored_integers
from flower_app.tasks.tokenizer import TextTokenizer


@dataclass
class EncodedText:
    """Sequences of ids, one after the other in one array on disk that is mapped into memory."""

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """Start of each sequence in ``ids``, and the end of the last."""
    truncated: int
    """Sequences that were cut."""

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], truncated: int = 0) -> EncodedText:
        """Lay sequences out in one array, one by one."""
        return cls(*stored_integers(sequences), truncated)

    @classmethod
    def encode(cls, texts: Iterable[str], tokenizer: TextTokenizer, max_length: int) -> EncodedText:
        """Encode texts, each within the tokenizer's marks; the longest has ``max_length`` ids with them."""
        return cls.closed(tokenizer.encode_each(texts), *tokenizer.marks, max_length)

    @classmethod
    def closed(
        cls, sequences: Iterable[Sequence[int]], begin: list[int], end: list[int], max_length: int
    ) -> EncodedText:
        """Cut sequences so that they have at most ``max_length`` ids with their marks of beginning and end."""
        room, cut = max_length - len(begin) - len(end), 0

        def truncated_sequences() -> Iterator[list[int]]:
            nonlocal cut
            for ids in sequences:
                cut += len(ids) > room
                yield [*begin, *ids[:room], *end]

        ids, starts = stored_integers(truncated_sequences())
        return cls(ids, starts, truncated=cut)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of ids of each sequence."""
        return np.diff(self.starts)

    def padded(self, indices: Sequence[int], pad: int) -> Tensor:
        """Return the sequences as one matrix [B, longest] int64."""
        rows = [self.ids[self.starts[i] : self.starts[i + 1]] for i in indices]
        out = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
        for row, values in zip(out, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(out)

    def inputs(self, indices: Sequence[int], pad: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` of a batch."""
        input_ids = self.padded(indices, pad)
        lengths = torch.from_numpy(self.lengths()[np.asarray(indices)])
        return {"input_ids": input_ids, "attention_mask": torch.arange(input_ids.shape[1]) < lengths[:, None]}


def batches_by_length(lengths: npt.NDArray[np.int64], size: int) -> list[list[int]]:
    """Return the examples in batches of ``size``, the longest first: neighbours of like length waste little on padding.

    >>> batches_by_length(np.array([3, 9, 5]), 2)
    [[1, 2], [0]]
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


@contextmanager
def evaluating(parts: ModelParts) -> Iterator[torch.device]:
    """Switch dropout off and gradients off; yield the model's device."""
    modules = (parts.embedding, parts.blocks, parts.head)
    modes = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield next(parts.head.parameters()).device
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
