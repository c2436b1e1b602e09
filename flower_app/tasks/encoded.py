"""Sequences of ids as plain arrays, and a model switched to evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from client_pipeline.partition.parts import ModelParts
from flower_app.tasks.tokenizer import TextTokenizer


@dataclass
class EncodedText:
    """Sequences of ids, one after the other in one array: small in memory and cheap to send."""

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    """Start of each sequence in ``ids``, and the end of the last."""
    truncated: int
    """Sequences that were cut."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], truncated: int) -> EncodedText:
        """Lay sequences out in one array."""
        starts = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
        flat = np.fromiter((i for ids in sequences for i in ids), dtype=np.int32, count=int(starts[-1]))
        return cls(flat, starts, truncated)

    @classmethod
    def encode(cls, texts: Sequence[str], tokenizer: TextTokenizer, max_length: int) -> EncodedText:
        """Encode texts, each closed by the end of sentence; the longest has ``max_length`` ids with it."""
        found = tokenizer.encode(texts)
        kept = [[*ids[: max_length - 1], tokenizer.eos_id] for ids in found]
        return cls.of(kept, sum(len(ids) >= max_length for ids in found))

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
