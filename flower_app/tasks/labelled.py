"""Examples with labels: read, checked, encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from client_pipeline.partition.parts import IGNORED_LABEL, Batch
from flower_app.tasks.corpus import INPUTS, LABELS, Classes, DataConfig, file_of, hub_table
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.tables import TABLES, Table, read_table
from flower_app.tasks.texts import Indices

X = TypeVar("X")
"""An input, and its label: a text and its name; or words and their tags."""


@dataclass(frozen=True)
class Examples(Generic[X]):
    """One split."""

    inputs: Sequence[X]
    labels: Sequence[X]
    groups: list[str]
    """Class of each example for ``data.partition``."""
    place: Callable[[int, int], str]
    """Where an example and one of its words stand, for messages."""
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
class LabelledData:
    """Encoded examples. Plain data: it travels into the control unit's actor."""

    sequences: EncodedText
    labels: EncodedText
    """Of each example one class; or a class for each token, with :data:`IGNORED_LABEL` where there is none."""
    pad_id: int
    per_token: bool

    @property
    def truncated(self) -> int:
        """Sequences that were cut at ``data.max-length``."""
        return self.sequences.truncated

    def __len__(self) -> int:
        return len(self.sequences)

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these examples; see :data:`client_pipeline.partition.parts.Batch`."""
        del seed
        labels = self.labels.padded(indices, IGNORED_LABEL)
        return self.sequences.inputs(indices, self.pad_id) | {"labels": labels if self.per_token else labels[:, 0]}


def load_table(data: DataConfig, split: str, cluster: int | None, inputs: str, labels: str) -> Table:
    """Read the input and label columns of a split; ``inputs`` and ``labels`` are their names where none is configured.

    Raises
    ------
    ValueError
        As :func:`flower_app.tasks.tables.read_table` does.
    """
    columns = {INPUTS: data.source_column or inputs, LABELS: data.label_column or labels}
    if data.source == "hub":
        return hub_table(data, split, columns)
    path, target, key = file_of(data, split, cluster)
    if target is not None:
        raise ValueError(
            f"{key.replace('-source', '-target')}: a task with labels reads them from a column of {key}, not from a "
            f"second file; leave it empty, found {target}"
        )
    if path.suffix not in TABLES:
        raise ValueError(f"{key}: expected a table ({', '.join(TABLES)}), found {path}")
    return read_table(path, columns, key)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names, those that are numbers by their value."""
    return tuple(sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)))


def balanced_weights(counts: Mapping[str, int], labels: Sequence[str]) -> list[float]:
    """Factors of the classes' losses, N / (C n_c) for n_c of N labels and C classes that occur; their mean is 1.

    A class that does not occur in training has the factor 0: nothing is known of it.

    >>> balanced_weights({"a": 3, "b": 1}, ["a", "b", "c"])
    [0.6666666666666666, 2.0, 0.0]
    """
    total, occurring = sum(counts.values()), sum(counts[name] > 0 for name in labels if name in counts)
    return [total / (occurring * counts[name]) if counts.get(name) else 0.0 for name in labels]
