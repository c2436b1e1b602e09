"""Sequence classification: a text in, one label out; accuracy and macro-F1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION
from flower_app.tasks.data.corpus import INPUTS, LABELS, SECOND_TEXTS, DataConfig, listed
from flower_app.tasks.data.texts import Texts
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.generated.generated_labels import KINDS, classified
from flower_app.tasks.labelled import Examples, LabelledData, check_classes, load_table
from flower_app.tasks.labelled_task import LabelledTask
from flower_app.tasks.pairs import encode_pairs
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.trained_labels import labels_of

Text = str | tuple[str, str]
"""An input: a text or a pair of texts; or a label."""


class ClassificationTask(LabelledTask[Text]):
    """Texts from tables (columns ``text`` and ``label``) or the hub; or pairs of them, with ``data.pair-column``."""

    name = "sequence-classification"
    head = SEQUENCE_CLASSIFICATION
    scores = ("loss", "accuracy", "macro_f1")

    def read(self, data: DataConfig, split: str, cluster: int | None) -> Examples[Text]:
        """Read the columns; an empty text or label is an error."""
        table = load_table(data, split, cluster, "text", "label")
        columns = {key: Texts(table.texts(key)) for key in (INPUTS, SECOND_TEXTS) if key in table.columns}
        for key, texts in columns.items():
            for row, (text, value) in enumerate(zip(texts, table.columns[key], strict=True)):
                if not text:
                    raise ValueError(f"{key}: {table.place(row)}: the text is empty; remove the line")
                if key == SECOND_TEXTS and not isinstance(value, str):
                    raise ValueError(
                        f"{key}: {table.place(row)}: expected a text, found the number {value}; name a column of texts"
                    )
        inputs: Sequence[Text] = columns[INPUTS]
        if SECOND_TEXTS in columns:
            inputs = list(zip(columns[INPUTS], columns[SECOND_TEXTS], strict=True))
        labels = table.labels(LABELS, listed(data))
        declared = tuple(table.class_names.get(LABELS, ()))
        if split == "train" and not (declared or data.labels):
            check_classes(labels, LABELS)
        return Examples(inputs, labels, labels, lambda row, _: table.place(row), declared)

    def generate(self, number: int, split: str, seed: int) -> Examples[Text]:
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

    def parts_of(self, value: Text) -> list[str]:
        """Return a text, or its label, as one; of a pair both texts."""
        return [value] if isinstance(value, str) else list(value)

    def join(self, inputs: Text, names: list[str]) -> Text:
        """Return the label."""
        return names[0]

    def encode(
        self, inputs: Sequence[Text], classes: Sequence[Sequence[int]], tokenizer: TextTokenizer, max_length: int
    ) -> LabelledData:
        """Encode texts as ``[CLS] text [SEP]``, pairs by the tokenizer's own rule; one that is longer is cut.

        A decoder-only model's text has the marks that its tokenizer itself puts there.
        """
        labels = EncodedText.of(classes)
        pairs = (value for value in inputs if not isinstance(value, str))
        if not isinstance(inputs[0], str):
            starts: list[int] = []
            num_cut = 0

            def each_ids() -> Iterator[list[int]]:
                nonlocal num_cut
                for ids, start, is_cut in encode_pairs(tokenizer, pairs, max_length):
                    starts.append(start)
                    num_cut += is_cut
                    yield ids

            encoded_pairs = EncodedText.of(each_ids())
            return LabelledData(replace(encoded_pairs, truncated=num_cut), labels, tokenizer.pad_id, False, starts)
        encoded_inputs = tokenizer.encode_each(value for value in inputs if isinstance(value, str))
        sequences = EncodedText.closed(encoded_inputs, *tokenizer.label_marks, max_length)
        return LabelledData(sequences, labels, tokenizer.pad_id, False)

    def metrics(self, references: list[Text], predictions: list[Text]) -> tuple[dict[str, float], str]:
        """Accuracy, and the mean F1 of the labels that occur in either list."""
        return {
            "accuracy": sum(r == p for r, p in zip(references, predictions, strict=True)) / len(references),
            "macro_f1": macro_f1(list(map(str, references)), list(map(str, predictions))),
        }, "accuracy and macro-F1 over the labels that occur"

    def probabilities(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[Text]) -> list[dict[str, float]]:
        """Return the softmax of each text's logits, by label in the order of the model's classes."""
        labels = labels_of(parts.spec)
        return [
            dict(zip(labels, logits_UC[0].double().softmax(dim=-1).tolist(), strict=True))
            for _, logits_UC in self.logits(parts, tokenizer_json, inputs)
        ]

    def from_text(self, text: Text, tokenizer: TextTokenizer) -> Text:
        """Return the text, or the pair."""
        if isinstance(text, str):
            return text.strip()
        pair = tuple(part.strip() for part in text)
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"expected a text or a pair of texts, found {text!r}")
        return pair

    def to_text(self, inputs: Text, label: Text) -> str:
        """Return the label."""
        return str(label)


def macro_f1(references: Sequence[str], predictions: Sequence[str]) -> float:
    """Mean over the labels of F1 = 2 TP / (2 TP + FP + FN); labels that occur in neither list do not count.

    >>> macro_f1(["a", "a", "b", "b"], ["a", "b", "b", "c"])
    0.38888888888888884
    """
    predicted, expected = Counter(predictions), Counter(references)
    hits = Counter(r for r, p in zip(references, predictions, strict=True) if r == p)
    scores = [2 * hits[label] / (predicted[label] + expected[label]) for label in sorted(predicted | expected)]
    return sum(scores) / len(scores)
