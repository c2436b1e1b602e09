"""Sequence classification: a text in, one label out; accuracy and macro-F1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION
from flower_app.tasks.corpus import INPUTS, LABELS, DataConfig
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.generated_labels import KINDS, classified
from flower_app.tasks.labelled import Examples, LabelledData, load_table
from flower_app.tasks.labelled_task import LabelledTask
from flower_app.tasks.texts import Texts
from flower_app.tasks.tokenizer import TextTokenizer


class ClassificationTask(LabelledTask[str]):
    """Texts from tables (columns ``text`` and ``label``) or the hub."""

    name = "sequence-classification"
    head = SEQUENCE_CLASSIFICATION
    scores = ("loss", "accuracy", "macro_f1")

    def read(self, data: DataConfig, split: str, cluster: int | None) -> Examples[str]:
        """Read the two columns; an empty text or label is an error."""
        table = load_table(data, split, cluster, "text", "label")
        inputs = Texts(table.texts(INPUTS))
        for row, text in enumerate(inputs):
            if not text:
                raise ValueError(f"{INPUTS}: {table.place(row)}: the text is empty; remove the line")
        labels = [table.class_name(LABELS, value, table.place(row)) for row, value in enumerate(table.columns[LABELS])]
        declared = tuple(table.class_names.get(LABELS, ()))
        return Examples(inputs, labels, labels, lambda row, _: table.place(row), declared)

    def generate(self, number: int, split: str, seed: int) -> Examples[str]:
        """Generate sentences, each with the kind of its first noun."""
        drawn = classified(number, split, seed)
        labels = [label for _, label in drawn]
        return Examples([text for text, _ in drawn], labels, labels, lambda row, _: f"generated sentence {row}", KINDS)

    def kinds(self, names: Iterable[str]) -> set[str]:
        """Return the labels themselves."""
        return set(names)

    def label_names(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Return the labels; there is nothing to learn of fewer than two."""
        if len(kinds) < 2:
            raise ValueError(f"data.labels: expected at least 2 labels, found {', '.join(kinds)}")
        return tuple(kinds)

    def parts_of(self, value: str) -> list[str]:
        """Return a text, or its label, as one."""
        return [value]

    def join(self, inputs: str, names: list[str]) -> str:
        """Return the label."""
        return names[0]

    def encode(
        self, inputs: Sequence[str], classes: Sequence[Sequence[int]], tokenizer: TextTokenizer, max_length: int
    ) -> LabelledData:
        """Encode texts as ``[CLS] text [SEP]``; a text that is longer is cut."""
        encoded_inputs = tokenizer.encode_each(inputs)
        sequences = EncodedText.closed(encoded_inputs, [tokenizer.bos_id], [tokenizer.eos_id], max_length)
        return LabelledData(sequences, EncodedText.of(classes), tokenizer.pad_id, False)

    def metrics(self, references: list[str], predictions: list[str]) -> tuple[dict[str, float], str]:
        """Accuracy, and the mean F1 of the labels that occur in either list."""
        return {
            "accuracy": sum(r == p for r, p in zip(references, predictions, strict=True)) / len(references),
            "macro_f1": macro_f1(references, predictions),
        }, "accuracy and macro-F1 over the labels that occur"

    def from_text(self, text: str, tokenizer: TextTokenizer) -> str:
        """Return the text."""
        return text.strip()

    def to_text(self, inputs: str, label: str) -> str:
        """Return the label."""
        return label


def macro_f1(references: Sequence[str], predictions: Sequence[str]) -> float:
    """Mean over the labels of F1 = 2 TP / (2 TP + FP + FN); labels that occur in neither list do not count.

    >>> macro_f1(["a", "a", "b", "b"], ["a", "b", "b", "c"])
    0.38888888888888884
    """
    predicted, expected = Counter(predictions), Counter(references)
    hits = Counter(r for r, p in zip(references, predictions, strict=True) if r == p)
    scores = [2 * hits[label] / (predicted[label] + expected[label]) for label in sorted(predicted | expected)]
    return sum(scores) / len(scores)
