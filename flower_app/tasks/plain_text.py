"""Text without labels, for language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flower_app.tasks.data import tables
from flower_app.tasks.data.corpus import (
    GENERATED_EVALUATION_SEED,
    INPUTS,
    LABELS,
    Classes,
    DataConfig,
    file_of,
    hub_table,
    length_classes,
    read_labels,
)
from flower_app.tasks.data.texts import Indices, Texts, check_format, ending, lines, subset
from flower_app.tasks.generated import generator
from flower_app.tasks.tagging import CONLL, read_conll


@dataclass(frozen=True)
class PlainText:
    """Texts, each apart from the others."""

    texts: Sequence[str]
    labels: Sequence[str] | None = None
    """The label column, where one is configured: the class that ``data.partition`` goes by (a domain, say)."""
    skipped: int = 0
    """Empty lines of a text file, or empty rows of a table, that were left out."""

    def __len__(self) -> int:
        return len(self.texts)

    def classes(self) -> Classes:
        """Return each text's class: the label column, or the length in classes of like size."""
        return length_classes(self.texts) if self.labels is None else self.labels

    def subset(self, indices: Indices) -> PlainText:
        """Return some of the texts."""
        return PlainText(subset(self.texts, indices), None if self.labels is None else subset(self.labels, indices))


def load_text(data: DataConfig, split: str, seed: int, cluster: int | None = None) -> PlainText:
    """Load one split; texts that are empty are left out, and counted.

    Parameters
    ----------
    data : where the text is: a text file with one text a line, the words of a ``.conll`` or ``.bio`` file, a table or
        hub dataset (column ``text``), or generated English sentences
    split : ``train``, ``validation`` or ``test``; of the last two, one stands for the other where that is missing
    seed : of the run; generated training text depends on it
    cluster : with ``partition = files``, whose training file

    Raises
    ------
    ValueError
        For a missing, damaged or empty file or a missing column, with the key, the file and the line.
    """
    if data.source == "generated":
        number = data.num_examples if split == "train" else data.evaluation_examples
        drawn = generator.generate(number, split, seed if split == "train" else GENERATED_EVALUATION_SEED)
        return PlainText([text for text, _ in drawn])
    columns = {INPUTS: data.source_column or "text"}
    if data.label_column and split == "train":
        columns[LABELS] = data.label_column
    if data.source == "hub":
        table, location = hub_table(data, split, columns), data.hub_id
    else:
        path, target, key = file_of(data, split, cluster)
        if target is not None:
            target_key = key.replace("-source", "-target")
            raise ValueError(f"{target_key}: a language model has no target text; leave it empty, found {target}")
        check_format(path, key)
        if ending(path) not in tables.TABLES:
            if LABELS in columns:
                raise ValueError(
                    f"data.label-column: the text file {path} has no columns; use a table, or leave it empty"
                )
            if ending(path) in CONLL and ending(path) != ".txt":
                return PlainText([" ".join(words) for words in read_conll(path, data, key, with_tags=False).inputs])
            return _read_lines(path, key)
        table, location = tables.read_table(path, columns, key), str(path)
    # Blanks at the beginning are part of a program's text, and so is its last line feed.
    inputs = Texts(table.texts(INPUTS, stripped=False))
    nonempty_rows = [i for i, text in enumerate(inputs) if text.strip()]
    if not nonempty_rows:
        raise ValueError(f"{INPUTS}: {location} has no text in column {columns[INPUTS]!r}")
    return replace(
        PlainText(inputs, read_labels(data, table)).subset(nonempty_rows), skipped=len(inputs) - len(nonempty_rows)
    )


def _read_lines(path: Path, key: str) -> PlainText:
    skipped = 0

    def nonempty_lines() -> Iterator[str]:
        nonlocal skipped
        for line in lines(path, key):
            if line.strip():
                yield line
            else:
                skipped += 1

    # Never empty: a file without text is refused.
    texts = Texts(nonempty_lines())
    return PlainText(texts, skipped=skipped)
