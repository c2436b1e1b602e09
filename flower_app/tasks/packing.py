"""Several short examples in one sequence, so that batches have little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from client_pipeline.partition.packed_mask import PACKED
from client_pipeline.partition.parts import IGNORED_LABEL, Batch
from flower_app.tasks.labelled import LabelledData


@dataclass
class PackedData:
    """Encoded examples with a label for each token, several in a sequence."""

    examples: LabelledData
    rows: list[list[int]]
    """Examples of each sequence."""

    @property
    def truncated(self) -> int:
        """Examples that were cut at ``data.max-length``."""
        return self.examples.truncated

    def __len__(self) -> int:
        return len(self.rows)

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these sequences; ``attention_mask`` is a packed one."""
        del seed
        paddings = {"input_ids": self.examples.pad_id, "attention_mask": 0, "labels": IGNORED_LABEL}
        rows = [self._row(self.rows[i]) for i in indices]
        return {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=padding)
            for name, padding in paddings.items()
        }

    def _row(self, examples: Sequence[int]) -> Batch:
        each = [self.examples.collate([i]) for i in examples]
        lengths = torch.tensor([one["input_ids"].shape[1] for one in each])
        return {
            "input_ids": torch.cat([one["input_ids"][0] for one in each]),
            "attention_mask": torch.arange(1, len(each) + 1, dtype=PACKED).repeat_interleave(lengths),
            "labels": torch.cat([one["labels"][0] for one in each]),
        }


def packed_rows(lengths: Iterable[int], longest: int) -> list[list[int]]:
    """Return the examples of each sequence: the longest example first, each where it leaves the least room.

    Parameters
    ----------
    lengths : tokens of each example, at most ``longest``
    longest : tokens of a sequence

    >>> packed_rows([3, 6, 5, 2], 8)
    [[1, 3], [2, 0]]
    """
    by_example = np.asarray(list(lengths))
    rooms: list[tuple[int, int]] = []
    """Free tokens of each sequence, and its place; the smallest first."""
    rows: list[list[int]] = []
    for example in np.argsort(-by_example, kind="stable").tolist():
        length = int(by_example[example])
        place = bisect_left(rooms, (length, 0))
        if place == len(rooms):
            rows.append([])
            rooms.append((longest, len(rows) - 1))
        room, row = rooms.pop(place)
        rows[row].append(example)
        insort(rooms, (room - length, row))
    return rows
