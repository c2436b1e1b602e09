"""What the tasks with labels have in common: an encoder with a head over the labels, trained and scored."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic

import torch.nn.functional as F

from client_pipeline.partition.families import max_length
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import ModelSpec
from flower_app.tasks.base import ModelOptions, Prepared, Score, TaskConfig
from flower_app.tasks.corpus import GENERATED_EVALUATION_SEED, OWN_FILES, DataConfig, listed
from flower_app.tasks.encoded import batches_by_length, evaluating
from flower_app.tasks.labelled import Examples, LabelledData, X, balanced_weights, in_order
from flower_app.tasks.partition import training_share, training_shares
from flower_app.tasks.start import check_model, load_start, ready_tokenizer
from flower_app.tasks.tokenizer import TextTokenizer, train_wordpiece

logger = logging.getLogger("flwr.collapipe.text")


@dataclass(frozen=True)
class _Loaded(Generic[X]):
    shares: list[Examples[X]]
    """Training examples: one share for each file."""
    cluster_sizes: tuple[int, ...]
    labels: tuple[str, ...]
    held_out: dict[str, Examples[X]]
    tokenizer: TextTokenizer | None
    """None: one is to be trained."""


class LabelledTask(ABC, Generic[X]):
    """An encoder that learns labels; a task of this kind fills in what is abstract.

    An input and its label are of one type X, and the words of one (:meth:`parts_of`) go with the names of the other:
    a text with its label, or words with their tags.
    """

    name: ClassVar[str]
    head: ClassVar[str]
    """Of the model: one of :data:`client_pipeline.partition.spec.HEADS`."""
    scores: ClassVar[tuple[str, ...]]
    """``loss``, and what :meth:`metrics` returns."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def read(self, data: DataConfig, split: str, cluster: int | None) -> Examples[X]:
        """Read a split from files or from the hub.

        Mistakes raise ``ValueError`` with file and line: what is broken, missing or empty.
        """

    @abstractmethod
    def generate(self, number: int, split: str, seed: int) -> Examples[X]:
        """Generate a split."""

    @abstractmethod
    def kinds(self, names: Iterable[str]) -> set[str]:
        """Return what ``data.labels`` has to list for these names of labels."""

    @abstractmethod
    def label_names(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the model's classes, from what ``data.labels`` lists."""

    @abstractmethod
    def parts_of(self, value: X) -> list[str]:
        """Return the words of an input, or their labels' names."""

    @abstractmethod
    def join(self, inputs: X, names: list[str]) -> X:
        """Make a label of the names that the model found; words that were cut off have none."""

    @abstractmethod
    def encode(
        self, inputs: Sequence[X], classes: Sequence[Sequence[int]], tokenizer: TextTokenizer, max_length: int
    ) -> LabelledData:
        """Encode inputs with the classes of their words."""

    @abstractmethod
    def metrics(self, references: list[X], predictions: list[X]) -> tuple[dict[str, float], str]:
        """Compare labels; returns the metrics, and how they were computed."""

    @abstractmethod
    def from_text(self, text: str, tokenizer: TextTokenizer) -> X:
        """Make an input of a user's text."""

    @abstractmethod
    def to_text(self, inputs: X, label: X) -> str:
        """Write a prediction for the user."""

    # The task's protocol, flower_app.tasks.base.Task.

    def check(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and train no tokenizer."""
        self._load_all(data, model, seed, num_clusters)

    def prepare(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> Prepared:
        """Load the data, train or load the tokenizer, and size or load the model.

        Raises
        ------
        ValueError
            For all that cannot be loaded, a label that training lacks, or a cluster without an example.
        """
        labelled_data = self._load_all(data, model, seed, num_clusters)
        tokenizer = labelled_data.tokenizer
        if tokenizer is None:
            texts = (" ".join(self.parts_of(x)) for share in labelled_data.shares for x in share.inputs)
            tokenizer = train_wordpiece(texts, data.vocab_size, data.pretokenized, data.lowercase)
        factors = None
        if self.config.class_weights == "balanced":
            if not labelled_data.shares:
                raise ValueError(
                    "task.class-weights: balanced needs the labels of all clusters, which data.partition = nodes "
                    'keeps from the server; set it to "none"'
                )
            counts = Counter(
                name for share in labelled_data.shares for label in share.labels for name in self.parts_of(label)
            )
            factors = balanced_weights(counts, labelled_data.labels)
        spec, weights = load_start(self.head, model, tokenizer, seed, labelled_data.labels, factors)
        return Prepared(
            spec=spec,
            tokenizer_json=tokenizer.to_json(),
            evaluator=LabelledEvaluator(self, data, tokenizer, labelled_data.held_out),
            cluster_sizes=labelled_data.cluster_sizes,
            weights=weights,
        )

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> LabelledData:
        """Load and encode one cluster's share of the training examples."""
        cluster_examples, known = training_share(
            data, partial(self._load, data, "train", seed), cluster, num_clusters, seed
        )
        labels = self._labels(data, [known])
        return self.encode_examples(
            cluster_examples, labels, TextTokenizer.from_json(tokenizer_json), data.max_length, "train"
        )

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> LabelledEvaluator[X]:
        """Load the held-out examples for a model that is already there."""
        return LabelledEvaluator(self, data, TextTokenizer.from_json(tokenizer_json), self._held_out(data))

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[str]) -> list[str]:
        """Label texts; one longer than the model is cut, as in training, with a warning; an empty one is an error."""
        tokenizer = TextTokenizer.from_json(tokenizer_json)
        labels, longest = labels_of(parts.spec), max_length(parts.spec) or sys.maxsize
        examples = [self.from_text(text, tokenizer) for text in inputs]
        for text, value in zip(inputs, examples, strict=True):
            if not value:
                raise ValueError(f"expected a text, found {text!r}")
        if not examples:
            return []
        data = self.encode(examples, [[0] * len(self.parts_of(x)) for x in examples], tokenizer, longest)
        if data.truncated:
            logger.warning("%d of %d texts are over %d tokens and were cut", data.truncated, len(inputs), longest)
        best: list[list[int]] = [[] for _ in examples]
        with evaluating(parts) as device:
            for indices in batches_by_length(data.sequences.lengths(), self.config.evaluate_batch_size):
                batch = {name: tensor.to(device) for name, tensor in data.collate(indices).items()}
                for i, ids in zip(indices, predict_batch(parts, batch)[0], strict=True):
                    best[i] = ids
        return [
            self.to_text(value, self.join(value, [labels[i] for i in ids]))
            for value, ids in zip(examples, best, strict=True)
        ]

    def saved(self, data: DataConfig) -> dict[str, Any]:
        """Name of the task; the labels stand in the model's specification."""
        return {"name": self.config.name, "pretokenized": data.pretokenized}

    def encode_examples(
        self, examples: Examples[X], labels: Sequence[str], tokenizer: TextTokenizer, max_length: int, split: str
    ) -> LabelledData:
        """Encode examples and their labels; a label that is not among ``labels`` is an error with its place."""
        self._check_labels(examples, labels, split)
        number = {name: i for i, name in enumerate(labels)}
        classes = [[number[name] for name in self.parts_of(label)] for label in examples.labels]
        return self.encode(examples.inputs, classes, tokenizer, max_length)

    def _load(self, data: DataConfig, split: str, seed: int, cluster: int | None = None) -> Examples[X]:
        if data.source != "generated":
            return self.read(data, split, cluster)
        if split == "train":
            return self.generate(data.num_examples, split, seed)
        return self.generate(data.evaluation_examples, split, GENERATED_EVALUATION_SEED)

    def _held_out(self, data: DataConfig) -> dict[str, Examples[X]]:
        return {split: self._load(data, split, seed=0) for split in ("validation", "test")}

    def _labels(self, data: DataConfig, shares: Sequence[Examples[X]]) -> tuple[str, ...]:
        """Names of the classes: as listed, as the dataset declares them, or as they occur in the training data."""
        kinds = listed(data)
        if not kinds and data.partition in OWN_FILES:
            raise ValueError(
                f"data.labels: expected the list of labels with data.partition = {data.partition}, found none; no "
                "cluster sees the labels of the others"
            )
        if not kinds and shares[0].declared:
            # In the order of the declaration.
            kinds = tuple(dict.fromkeys(kind for name in shares[0].declared for kind in self.kinds([name])))
        if not kinds:
            kinds = in_order(
                self.kinds({name for share in shares for label in share.labels for name in self.parts_of(label)})
            )
        return self.label_names(kinds)

    def _check_labels(self, examples: Examples[X], labels: Sequence[str], split: str) -> None:
        allowed = set(labels)
        for i, label in enumerate(examples.labels):
            for word, name in enumerate(self.parts_of(label)):
                if name not in allowed:
                    shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
                    raise ValueError(
                        f"data.labels: {examples.place(i, word)}: the {split} data has the label {name!r}, expected "
                        f"one of {shown}; data.labels can list labels that the training data lacks"
                    )

    def _load_all(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> _Loaded[X]:
        check_model(self.name, self.head, model, data.max_length)
        shares, sizes = training_shares(data, partial(self._load, data, "train", seed), num_clusters, seed)
        labels, held_out = self._labels(data, shares), self._held_out(data)
        for split, examples in [*(("train", share) for share in shares), *held_out.items()]:
            self._check_labels(examples, labels, split)
        return _Loaded(shares, sizes, labels, held_out, ready_tokenizer(data, model))


def labels_of(spec: ModelSpec) -> tuple[str, ...]:
    """Names of a model's classes, in the order of its logits."""
    names = spec.config["id2label"]
    return tuple(names[str(i)] for i in range(len(names)))


def predict_batch(parts: ModelParts, batch: Batch) -> tuple[list[list[int]], float, int]:
    """Run the model on a batch, with ``labels``.

    Returns
    -------
    The best class of every labelled position, by example; the plain (unweighted) cross-entropy, summed over them; their
    number.
    """
    labels = batch["labels"].reshape(len(batch["input_ids"]), -1)
    logits_BUC = parts.logits(batch).reshape(*labels.shape, -1)
    real = labels != IGNORED_LABEL
    loss = F.cross_entropy(logits_BUC[real], labels[real], reduction="sum")
    best = logits_BUC.argmax(dim=-1)
    return [row[mask].tolist() for row, mask in zip(best, real, strict=True)], float(loss), int(real.sum())


class LabelledEvaluator(Generic[X]):
    """Loss and the task's metrics on held-out examples.

    The loss is the plain cross-entropy per label, without class weights.
    """

    def __init__(
        self, task: LabelledTask[X], data: DataConfig, tokenizer: TextTokenizer, held_out: dict[str, Examples[X]]
    ) -> None:
        self.task = task
        self.data = data
        self.tokenizer = tokenizer
        self.held_out = held_out
        self._encoded: dict[tuple[str, tuple[str, ...]], LabelledData] = {}

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Label ``split`` and score it: of validation the first ``evaluate-examples``, of test all."""
        task, examples, labels = self.task, self.held_out[split], labels_of(parts.spec)
        encoded = self._encode(split, labels)
        number, size = len(examples), task.config.evaluate_batch_size
        if split == "validation" and task.config.evaluate_examples:
            number = min(number, task.config.evaluate_examples)
        names: list[list[str]] = [[] for _ in range(number)]
        loss_sum, weight = 0.0, 0
        with evaluating(parts) as device:
            for indices in batches_by_length(encoded.sequences.lengths()[:number], size):
                batch = {name: tensor.to(device) for name, tensor in encoded.collate(indices).items()}
                best, loss, count = predict_batch(parts, batch)
                loss_sum, weight = loss_sum + loss, weight + count
                for i, ids in zip(indices, best, strict=True):
                    names[i] = [labels[k] for k in ids]
        inputs, references = list(examples.inputs[:number]), list(examples.labels[:number])
        predictions = [task.join(x, found) for x, found in zip(inputs, names, strict=True)]
        metrics, signature = task.metrics(references, predictions)
        return Score(
            metrics={"loss": loss_sum / weight, **metrics},
            examples=number,
            signature=signature,
            truncated=encoded.truncated,
            sources=[" ".join(task.parts_of(x)) for x in inputs],
            predictions=[" ".join(task.parts_of(x)) for x in predictions],
            references=[" ".join(task.parts_of(x)) for x in references],
        )

    def _encode(self, split: str, labels: tuple[str, ...]) -> LabelledData:
        if (split, labels) not in self._encoded:
            self._encoded[split, labels] = self.task.encode_examples(
                self.held_out[split], labels, self.tokenizer, self.data.max_length, split
            )
        return self._encoded[split, labels]
