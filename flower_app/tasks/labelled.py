"""Examples with labels: read, checked, encoded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from client_pipeline.partition.parts import IGNORED_LABEL, Batch
from flower_app.tasks.data.corpus import INPUTS, LABELS, SECOND_TEXTS, Classes, DataConfig, file_of, hub_table
from flower_app.tasks.data.tables import TABLES, Table, read_table
from flower_app.tasks.data.texts import Indices, check_format, ending
from flower_app.tasks.encoded import EncodedText, SequenceData

X = TypeVar("X")
"""An input, and its label: a text and its name; or words and their tags."""
_FEW_CLASSES = 10
"""So many may have an example each."""


@dataclass(frozen=True)
class Examples(Generic[X]):
    """One split."""

    inputs: Sequence[X]
    labels: Sequence[X]
    groups: list[str]
    """Class of each example for ``data.partition``."""
    place: Callable[[int, int], str]
    """Return the place of an example and one of its words, for messages."""
    declared: tuple[str, ...] = ()
    """Names that the dataset itself gives to its classes."""

    def __len__(self) -> int:
        return len(self.inputs)

    def classes(self) -> Classes:
        """Return each example's class."""
        return self.groups

    def subset(self, indices: Indices) -> Examples[X]:
        """Return some of the examples."""
        return Examples(
            [self.inputs[i] for i in indices],
            [self.labels[i] for i in indices],
            [self.groups[i] for i in indices],
            lambda example, word: self.place(indices[example], word),
            self.declared,
        )


@dataclass
class LabelledData(SequenceData):
    """Encoded examples with labels."""

    labels: EncodedText
    """One class for each example; or a class for each token, with :data:`IGNORED_LABEL` where there is none."""
    pad_id: int
    per_token: bool
    second_starts: Sequence[int] | None = None
    """For pairs of texts: index of the id at which token type 1 begins."""

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these examples; see :data:`client_pipeline.partition.parts.Batch`."""
        del seed
        labels = self.labels.padded(indices, IGNORED_LABEL)
        batch = self.sequences.inputs(indices, self.pad_id) | {"labels": labels if self.per_token else labels[:, 0]}
        if self.second_starts is not None:
            starts = torch.tensor([self.second_starts[i] for i in indices])[:, None]
            is_second = torch.arange(batch["input_ids"].shape[1]) >= starts
            batch["token_type_ids"] = (is_second & batch["attention_mask"]).long()
        return batch


def load_table(data: DataConfig, split: str, cluster: int | None, inputs: str, labels: str) -> Table:
    """Read the input and label columns of a split; ``inputs`` and ``labels`` are their names by default."""
    columns = {INPUTS: data.source_column or inputs, LABELS: data.label_column or labels}
    columns |= {SECOND_TEXTS: data.pair_column} if data.pair_column else {}
    if data.source == "hub":
        return hub_table(data, split, columns)
    path, target, key = file_of(data, split, cluster)
    if target is not None:
        raise ValueError(
            f"{key.replace('-source', '-target')}: a task with labels reads them from a column of {key}, not from a "
            f"second file; leave it empty, found {target}"
        )
    check_format(path, key)
    if ending(path) not in TABLES:
        raise ValueError(f"{key}: expected a table ({', '.join(TABLES)}), found {path}")
    return read_table(path, columns, key)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names, those that are numbers by their value."""
    return tuple(sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)))


def is_score(names: Iterable[str]) -> bool:
    """Return whether most names are numbers, such as 4.5, 4,5, 4.5/5 or 4.5%, and some have a fraction."""
    numbers = [number_of(name) for name in names]
    scores = [number for number in numbers if math.isfinite(number)]
    return 2 * len(scores) > len(numbers) and any(not number.is_integer() for number in scores)


def number_of(name: str) -> float:
    """Return the number that a name writes; NaN: none."""
    try:
        return float(re.sub(r"\s*(%|/\s*\d+)$", "", name).replace(",", "."))
    except ValueError:
        return math.nan


def check_classes(labels: Sequence[str], key: str) -> None:
    """Refuse labels that are no classes: numbers to predict, ids and free text.

    Parameters
    ----------
    labels : of the training examples
    key : the configuration key or option that names their column
    """
    names = in_order(set(labels))
    found = f"{len(names)} different labels in {len(labels)} examples ({', '.join(names[:3])}, ...)"
    if is_score(names):
        raise ValueError(
            f"{key}: found numbers with fractions, {found}: a score to predict (regression) is no task here; expected "
            "classes: write such as low and high in their place, or list the numbers in data.labels if they are names"
        )
    if len(names) > max(_FEW_CLASSES, len(labels) / 2):
        raise ValueError(
            f"{key}: found {found}: an id, a number or a free text is no class; expected several examples of each: "
            "name another column, or list the classes in data.labels"
        )


def balanced_weights(counts: Mapping[str, int], labels: Sequence[str]) -> list[float]:
    """Factors of the classes' losses, N / (C n_c) for n_c of N labels and C classes that occur; their mean is 1.

    A class that does not occur in training has the factor 0: nothing is known of it.

    >>> balanced_weights({"a": 3, "b": 1}, ["a", "b", "c"])
    [0.6666666666666666, 2.0, 0.0]
    """
    total, occurring = sum(counts.values()), sum(counts[name] > 0 for name in labels if name in counts)
    return [total / (occurring * counts[name]) if counts.get(name) else 0.0 for name in labels]
