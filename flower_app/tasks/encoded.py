"""Sequences of ids as plain arrays, and a model switched to evaluation."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from client_pipeline.partition.parts import Batch, ModelParts
from client_pipeline.runtime.control_unit.round_order import TrainingData
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.data.texts import stored_integers
from flower_app.tasks.tokenizer import TextTokenizer

logger = logging.getLogger("flwr.collapipe.text")

_CHECKED_TEXTS = 1000
_TOLD_UNKNOWN, _MOST_UNKNOWN = 0.01, 0.25
"""Shares of unknown tokens above which a text is warned about, and refused."""


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
    def encode(
        cls, texts: Iterable[str], tokenizer: TextTokenizer, max_length: int, ends_cut: bool = True
    ) -> EncodedText:
        """Encode texts, each within the tokenizer's marks; the longest has ``max_length`` ids with them."""
        return cls.closed(tokenizer.encode_each(texts), *tokenizer.marks, max_length, ends_cut)

    @classmethod
    def closed(
        cls,
        sequences: Iterable[Sequence[int]],
        begin: list[int],
        end: list[int],
        max_length: int,
        ends_cut: bool = True,
    ) -> EncodedText:
        """Cut sequences so that they have at most ``max_length`` ids with their marks of beginning and end.

        With ``ends_cut`` False one that is cut has no mark of the end: it is learned from, and does not end there.
        """
        room, cut = max_length - len(begin) - len(end), 0

        def truncated_sequences() -> Iterator[list[int]]:
            nonlocal cut
            for ids in sequences:
                is_cut = len(ids) > room
                cut += is_cut
                if is_cut and not ends_cut:
                    yield [*begin, *ids[: room + len(end)]]
                else:
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


@dataclass
class SequenceData(ABC):
    """Encoded examples. Plain data: it travels into the control unit's actor."""

    sequences: EncodedText

    @property
    def truncated(self) -> int:
        """Sequences that were cut at ``data.max-length``."""
        return self.sequences.truncated

    def __len__(self) -> int:
        return len(self.sequences)

    @abstractmethod
    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these examples; ``seed`` decides what is random in it."""


def batches_by_length(lengths: npt.NDArray[np.int64], size: int) -> list[list[int]]:
    """Return the examples in batches of ``size``, the longest first: neighbours of like length waste little on padding.

    >>> batches_by_length(np.array([3, 9, 5]), 2)
    [[1, 2], [0]]
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def num_scored(config: TaskConfig, split: str, number: int) -> int:
    """Return how many of a split's examples are scored: of validation the first ``evaluate-examples``, of test all."""
    return min(number, config.evaluate_examples or number) if split == "validation" else number


def scored_batches(
    data: TrainingData, lengths: npt.NDArray[np.int64], size: int, device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """Yield the batches of :func:`batches_by_length` on a device, each with the places of its examples."""
    for indices in batches_by_length(lengths, size):
        yield indices, {name: tensor.to(device) for name, tensor in data.collate(indices).items()}


def check_known(tokenizer: TextTokenizer, texts: Iterable[str], is_ready: bool) -> None:
    """Warn of unknown tokens in the first texts."""
    checked_texts = list(islice(texts, _CHECKED_TEXTS))
    share, example = tokenizer.unknown(checked_texts)
    if share < _TOLD_UNKNOWN:
        return
    key, remedy = "data.vocab-size", "raise it, so that each character has a token"
    if is_ready:
        key, remedy = "data.tokenizer", "choose a model or a tokenizer of this script, or train one: leave both empty"
    message = f"{key}: {share:.1%} of the tokens of {len(checked_texts)} texts are unknown, as in {example!r}"
    if share > _MOST_UNKNOWN:
        raise ValueError(f"{message}; expected at most {_MOST_UNKNOWN:.0%}: {remedy}")
    logger.warning("%s; %s", message, remedy)


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
