"""Base of the tasks with labels: a model with a head over the labels, trained and scored."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from client_pipeline.families.families import max_length
from client_pipeline.families.registry import is_decoder_only
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from flower_app.tasks.base import ModelConfig, PackagedTask, Prepared, Score
from flower_app.tasks.data.corpus import GENERATED_EVALUATION_SEED, OWN_FILES, DataConfig, listed
from flower_app.tasks.data.data_split import training_share, training_shares
from flower_app.tasks.encoded import check_known, evaluating, num_scored, scored_batches
from flower_app.tasks.labelled import Examples, LabelledData, X, balanced_weights, in_order
from flower_app.tasks.mistakes import mistakes_of
from flower_app.tasks.pairs import with_pair_rule, with_single_rule
from flower_app.tasks.start import check_model, load_start, ready_tokenizer
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.trained_labels import class_order, labels_of
from flower_app.tasks.word_pieces import train_wordpiece

logger = logging.getLogger("flwr.collapipe.text")


@dataclass(frozen=True)
class _Loaded(Generic[X]):
    shares: list[Examples[X]]
    """Training examples: one share for each file."""
    cluster_sizes: tuple[int, ...]
    labels: tuple[str, ...]
    """In the order of the model's classes."""
    data_labels: tuple[str, ...]
    """In the order that the data alone gives."""
    held_out: dict[str, Examples[X]]
    tokenizer: TextTokenizer | None
    """Tokenizer to read with; None where one is still to be trained."""


class LabelledTask(PackagedTask, ABC, Generic[X]):
    """A model that learns labels; a task of this kind fills in what is abstract.

    An input and its label are of one type X, and the words of one (:meth:`parts_of`) go with the names of the other:
    a text with its label, or words with their tags.
    """

    name: ClassVar[str]
    head: ClassVar[str]
    """Head of the model: one of :data:`client_pipeline.partition.spec.HEADS`."""
    scored: ClassVar[str] = "texts"
    """Name of what :meth:`items` returns."""
    scores: ClassVar[tuple[str, ...]]
    """``loss``, and what :meth:`metrics` returns."""

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
    def from_text(self, text: Any, tokenizer: TextTokenizer) -> X:
        """Make an input of a user's text."""

    @abstractmethod
    def to_text(self, inputs: X, label: X) -> str:
        """Write a prediction for the user."""

    def class_of(self, name: str) -> str:
        """Return the class that a name of a label counts for; the name itself unless a task has marks in it."""
        return name

    def items(self, names: Sequence[str]) -> set[tuple[Hashable, ...]]:
        """Return what a class is scored by, its class first; the names themselves unless a task has spans."""
        return {(name,) for name in names}

    # The task's protocol, flower_app.tasks.base.Task.

    def check(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and train no tokenizer."""
        self._load_all(data, model, seed, num_clusters)

    def prepare(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Prepared:
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
            self._check_known(labelled_data, tokenizer)
        if is_decoder_only(model.family):
            tokenizer = tokenizer.with_settings(by_rule=True)
        elif not data.pair_column:
            tokenizer = with_single_rule(tokenizer)
        if data.pair_column:
            tokenizer = with_pair_rule(tokenizer)
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
        if labelled_data.labels != labelled_data.data_labels:
            tokenizer = tokenizer.with_settings(classes=labelled_data.labels)
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
        tokenizer = TextTokenizer.from_json(tokenizer_json)
        labels = tokenizer.settings.classes or self._labels(data, [known])
        return self.encode_examples(cluster_examples, labels, tokenizer, data.max_length, "train")

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> LabelledEvaluator[X]:
        """Load the held-out examples for a model that is already there."""
        return LabelledEvaluator(self, data, TextTokenizer.from_json(tokenizer_json), self._held_out(data))

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[Any]) -> list[str]:
        """Label texts; one longer than the model is cut, as in training, with a warning; an empty one is an error."""
        labels = labels_of(parts.spec)
        return [
            self.to_text(value, self.join(value, [labels[i] for i in logits_UC.argmax(dim=-1).tolist()]))
            for value, logits_UC in self.logits(parts, tokenizer_json, inputs)
        ]

    def logits(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[Any]) -> list[tuple[X, Tensor]]:
        """Return each text as an input, with the logits of its U words over the C classes, (U, C); see predict."""
        tokenizer = TextTokenizer.from_json(tokenizer_json)
        longest = max_length(parts.spec) or sys.maxsize
        examples = [self.from_text(text, tokenizer) for text in inputs]
        for text, value in zip(inputs, examples, strict=True):
            if not value:
                raise ValueError(f"expected a text, found {text!r}")
        if not examples:
            return []
        data = self.encode(examples, [[0] * len(self.parts_of(x)) for x in examples], tokenizer, longest)
        if data.truncated:
            logger.warning("%d of %d texts are over %d tokens and were cut", data.truncated, len(inputs), longest)
        logits_by_example: dict[int, Tensor] = {}
        with evaluating(parts) as device:
            size = self.config.evaluate_batch_size
            for indices, batch in scored_batches(data, data.sequences.lengths(), size, device):
                outcome = predict_batch(parts, batch)
                for i, logits_UC, is_labelled in zip(indices, outcome.logits_BUC, outcome.is_labelled_BU, strict=True):
                    logits_by_example[i] = logits_UC[is_labelled]
        return [(value, logits_by_example[i]) for i, value in enumerate(examples)]

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

    def _load_all(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> _Loaded[X]:
        check_model(self.name, self.head, model, data.max_length)
        shares, sizes = training_shares(data, partial(self._load, data, "train", seed), num_clusters, seed)
        data_labels, held_out = self._labels(data, shares), self._held_out(data)
        occurring: set[str] = set()
        for split, examples in [*(("train", share) for share in shares), *held_out.items()]:
            self._check_labels(examples, data_labels, split)
            occurring.update(name for label in examples.labels for name in self.parts_of(label))
        labels = class_order(self.head, model, data_labels, occurring, bool(listed(data)))
        labelled_data = _Loaded(shares, sizes, labels, data_labels, held_out, ready_tokenizer(data, model))
        if labelled_data.tokenizer is not None:
            self._check_known(labelled_data, labelled_data.tokenizer)
        return labelled_data

    def _check_known(self, labelled_data: _Loaded[X], tokenizer: TextTokenizer) -> None:
        # With data.partition = nodes the server has the held-out text alone.
        examples = labelled_data.shares or labelled_data.held_out.values()
        texts = (" ".join(self.parts_of(value)) for share in examples for value in share.inputs)
        check_known(tokenizer, texts, is_ready=labelled_data.tokenizer is not None)


class BatchOutcome(NamedTuple):
    """Logits of a batch, and their plain (unweighted) cross-entropy."""

    logits_BUC: Tensor
    is_labelled_BU: Tensor
    """True where an example has a label."""
    losses_BU: Tensor
    """[nat]; 0 where there is none."""
    loss: float
    """Sum over the labels [nat]."""

    @property
    def num_labels(self) -> int:
        """Positions with a label."""
        return int(self.is_labelled_BU.sum())


def predict_batch(parts: ModelParts, batch: Batch) -> BatchOutcome:
    """Run the model on a batch, with ``labels``."""
    labels = batch["labels"].reshape(len(batch["input_ids"]), -1)
    logits_BUC = parts.logits(batch).reshape(*labels.shape, -1)
    real = labels != IGNORED_LABEL
    loss = F.cross_entropy(logits_BUC[real], labels[real], reduction="sum")
    losses = F.cross_entropy(logits_BUC.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return BatchOutcome(logits_BUC, real, losses.reshape(labels.shape), float(loss))


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
        if (split, labels) not in self._encoded:
            self._encoded[split, labels] = task.encode_examples(
                examples, labels, self.tokenizer, self.data.max_length, split
            )
        encoded = self._encoded[split, labels]
        number, size = num_scored(task.config, split, len(examples)), task.config.evaluate_batch_size
        names: list[list[str]] = [[] for _ in range(number)]
        losses, confidences = [0.0] * number, [0.0] * number
        loss_sum, weight = 0.0, 0
        with evaluating(parts) as device:
            for indices, batch in scored_batches(encoded, encoded.sequences.lengths()[:number], size, device):
                outcome = predict_batch(parts, batch)
                loss_sum, weight = loss_sum + outcome.loss, weight + outcome.num_labels
                best_BU = outcome.logits_BUC.argmax(dim=-1)
                best_probability_BU = outcome.logits_BUC.softmax(dim=-1).amax(dim=-1)
                for row, (i, is_labelled) in enumerate(zip(indices, outcome.is_labelled_BU, strict=True)):
                    names[i] = [labels[k] for k in best_BU[row][is_labelled].tolist()]
                    losses[i] = float(outcome.losses_BU[row][is_labelled].mean())
                    confidences[i] = float(best_probability_BU[row][is_labelled].mean())
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
            mistakes=mistakes_of(
                task,
                words=[task.parts_of(x) for x in inputs],
                expected=[task.parts_of(x) for x in references],
                found=[task.parts_of(x) for x in predictions],
                losses=losses,
                confidences=confidences,
            ),
        )
