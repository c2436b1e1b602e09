"""Base of the language-model tasks: text in sequences, a model over its vocabulary, loss and perplexity."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar

from client_pipeline.families.families import max_length, merged
from client_pipeline.partition.parts import ModelParts, target_weight, targets
from client_pipeline.partition.spec import MASKED_LM
from flower_app.tasks.base import ModelConfig, PackagedTask, Prepared, Score, TaskConfig
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.data_split import training_share, training_shares
from flower_app.tasks.encoded import (
    EncodedText,
    SequenceData,
    batches_by_length,
    check_known,
    evaluating,
    num_scored,
)
from flower_app.tasks.pairs import with_single_rule
from flower_app.tasks.plain_text import PlainText, load_text
from flower_app.tasks.start import check_model, load_start, ready_tokenizer
from flower_app.tasks.tokenizer import TextTokenizer

# Not flwr's own: control units' actors, which import this, do without flwr.
logger = logging.getLogger("flwr.collapipe.text")

_EVALUATION_SEED = 0
"""Seed of held-out batches: their random choices are the same each time, so that scores can be compared."""
_TOGETHER = 8
"""Batches that go through a TEB one after the other, before the next TEB has its turn."""


class LanguageModelTask(PackagedTask, ABC):
    """A model that learns plain text; a task of this kind says how it is read and what is asked of it."""

    scores = ("loss", "perplexity")
    name: ClassVar[str]
    head: ClassVar[str]
    """Head of the model: one of :data:`client_pipeline.partition.spec.HEADS`."""

    @abstractmethod
    def train_tokenizer(self, texts: Iterable[str], data: DataConfig) -> TextTokenizer:
        """Train a tokenizer on the training text."""

    @abstractmethod
    def pieces(self, ids: Sequence[int], tokenizer: TextTokenizer, longest: int) -> Iterator[list[int]]:
        """Yield the sequences, with their marks, of one text's ids; none where it has no ids."""

    @abstractmethod
    def sequence_data(self, sequences: EncodedText, tokenizer: TextTokenizer) -> SequenceData:
        """Make the task's data of closed sequences."""

    @abstractmethod
    def complete(self, parts: ModelParts, tokenizer: TextTokenizer, text: str) -> str:
        """Use the model on one text; it is in evaluation mode."""

    # The task's protocol, flower_app.tasks.base.Task.

    def check(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and train no tokenizer."""
        self._load(data, model, seed, num_clusters)

    def prepare(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Prepared:
        """Load the text, train or load the tokenizer, and size or load the model.

        Raises
        ------
        ValueError
            For all that cannot be loaded, or a cluster without text.
        """
        shares, sizes, tokenizer = self._load(data, model, seed, num_clusters)
        _say_skipped(shares, "train")
        if tokenizer is None:
            tokenizer = self.train_tokenizer((text for share in shares for text in share.texts), data)
            check_known(tokenizer, (text for share in shares for text in share.texts), is_ready=False)
        if self.head == MASKED_LM:
            tokenizer = with_single_rule(tokenizer)
        spec, weights = load_start(self.head, model, tokenizer, seed)
        return Prepared(
            spec=spec,
            tokenizer_json=tokenizer.to_json(),
            evaluator=self._evaluator(data, tokenizer),
            cluster_sizes=sizes,
            weights=weights,
        )

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> SequenceData:
        """Load and encode one cluster's share of the training text."""
        cluster_text, _ = training_share(data, partial(load_text, data, "train", seed), cluster, num_clusters, seed)
        if data.partition == "nodes":
            # The server has not seen it.
            _say_skipped([cluster_text], "train")
        return self.encode(cluster_text, TextTokenizer.from_json(tokenizer_json), data.max_length)

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> LanguageModelEvaluator:
        """Load the held-out text for a model that is already there."""
        return self._evaluator(data, TextTokenizer.from_json(tokenizer_json))

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[str]) -> list[str]:
        """Complete texts, one by one."""
        tokenizer, plain = TextTokenizer.from_json(tokenizer_json), merged(parts)
        with evaluating(plain):
            return [self.complete(plain, tokenizer, text) for text in inputs]

    def encode(self, text: PlainText, tokenizer: TextTokenizer, longest: int) -> SequenceData:
        """Encode texts as ``[BOS] tokens [EOS]``; a text that is longer goes on in another sequence."""
        pieces = EncodedText.of(
            piece for ids in tokenizer.encode_each(text.texts) for piece in self.pieces(ids, tokenizer, longest)
        )
        if not len(pieces):
            raise ValueError(
                f"data.tokenizer: it gives no tokens for {len(text)} texts, {text.texts[0][:60]!r} among them"
            )
        return self.sequence_data(pieces, tokenizer)

    def fits(self, parts: ModelParts, ids: Sequence[int], text: str) -> None:
        """Raise ``ValueError`` where a user's text has more tokens than the model has positions."""
        longest = max_length(parts.spec)
        if longest is not None and len(ids) > longest:
            raise ValueError(f"a text of over {longest} tokens does not fit the model: {text[:60]!r}...; shorten it")

    def _load(
        self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int
    ) -> tuple[list[PlainText], tuple[int, ...], TextTokenizer | None]:
        check_model(self.name, self.head, model, data.max_length)
        shares, sizes = training_shares(data, partial(load_text, data, "train", seed), num_clusters, seed)
        held_out = [load_text(data, split, seed=0) for split in ("validation", "test")]
        tokenizer = ready_tokenizer(data, model, templates=True)
        if tokenizer is not None:
            check_known(tokenizer, (text for share in shares or held_out for text in share.texts), is_ready=True)
        return shares, sizes, tokenizer

    def _evaluator(self, data: DataConfig, tokenizer: TextTokenizer) -> LanguageModelEvaluator:
        held_out = {split: load_text(data, split, seed=0) for split in ("validation", "test")}
        for split, text in held_out.items():
            _say_skipped([text], split)
        encoded = {split: self.encode(text, tokenizer, data.max_length) for split, text in held_out.items()}
        return LanguageModelEvaluator(self.config, encoded)


class LanguageModelEvaluator:
    """Loss per target token, and perplexity = exp(loss), on held-out text.

    Parameters
    ----------
    config : of the task
    data : encoded text by split
    """

    def __init__(self, config: TaskConfig, data: Mapping[str, SequenceData]) -> None:
        self.config = config
        self._data = data

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Score ``split``: of validation the first ``evaluate-examples`` sequences, of test all."""
        data = self._data[split]
        number, size = num_scored(self.config, split, len(data)), self.config.evaluate_batch_size
        loss_sum, weight = 0.0, 0
        with evaluating(parts) as device:
            for indices in batches_by_length(data.sequences.lengths()[:number], size * _TOGETHER):
                pieces = [indices[start : start + size] for start in range(0, len(indices), size)]
                batches = [data.collate(piece, _EVALUATION_SEED) for piece in pieces]
                batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
                for batch, states_BTD in zip(batches, parts.encode_each(batches), strict=True):
                    weight += target_weight(targets(batch))
                    loss_sum += float(parts.head(states_BTD, batch["attention_mask"], targets(batch)))
        loss = loss_sum / weight
        # Where training has diverged, exp has no floating-point value.
        perplexity = math.exp(min(loss, 700))
        return Score(
            metrics={"loss": loss, "perplexity": perplexity},
            examples=number,
            signature=f"perplexity of {weight} tokens",
            truncated=data.truncated,
        )


def _say_skipped(texts: Sequence[PlainText], split: str) -> None:
    if skipped := sum(text.skipped for text in texts):
        logger.warning("%d empty texts of the %s data were left out, %d remain", skipped, split, sum(map(len, texts)))
