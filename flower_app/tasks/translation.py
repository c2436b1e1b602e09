"""Translation: parallel text in, BLEU and chrF out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from client_pipeline.partition import transformer
from client_pipeline.partition.families import is_library, max_length
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.seq2seq import Seq2SeqHead
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec
from flower_app.tasks import decoding
from flower_app.tasks.base import ModelOptions, Prepared, Score, TaskConfig
from flower_app.tasks.corpus import DataConfig, Pairs, load_pairs
from flower_app.tasks.encoded import EncodedText, batches_by_length, evaluating
from flower_app.tasks.partition import training_share, training_shares
from flower_app.tasks.start import (
    check_length,
    check_model,
    load_start,
    ready_tokenizer,
    run_to_start_from,
    table_sizes,
)
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer

CLASSIC = "transformer"
"""The family of this package that the transformers library does not know."""


@dataclass
class TranslationData:
    """Encoded pairs."""

    source: EncodedText
    target: EncodedText
    pad_id: int

    @classmethod
    def encode(cls, pairs: Pairs, tokenizer: TextTokenizer, max_length: int) -> TranslationData:
        """Encode both sides."""
        source, target = (EncodedText.encode(side, tokenizer, max_length) for side in (pairs.sources, pairs.targets))
        return cls(source, target, tokenizer.pad_id)

    @property
    def truncated(self) -> int:
        """Sequences of both sides that were cut."""
        return self.source.truncated + self.target.truncated

    def __len__(self) -> int:
        return len(self.source)

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these pairs; see :data:`client_pipeline.partition.parts.Batch`."""
        del seed
        return self.source.inputs(indices, self.pad_id) | {"labels": self.target.padded(indices, IGNORED_LABEL)}


class TranslationEvaluator:
    """Loss, BLEU and chrF on held-out pairs.

    The loss is the plain cross-entropy per target token, without the label smoothing of training. BLEU is sacreBLEU
    in percent: as it stands on tokenised text (``data.pretokenized``), else with the standard tokenisation 13a. chrF is
    sacreBLEU's chrF2, in percent, too.
    """

    def __init__(self, config: TaskConfig, data: DataConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.data = data
        self.tokenizer = tokenizer
        self._pairs = {split: load_pairs(data, split, seed=0) for split in ("validation", "test")}
        self._encoded = {
            split: TranslationData.encode(pairs, tokenizer, data.max_length) for split, pairs in self._pairs.items()
        }

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Translate ``split`` and score it: of validation the first ``evaluate-examples``, of test all."""
        pairs, encoded = self._pairs[split], self._encoded[split]
        number = len(pairs)
        if split == "validation" and self.config.evaluate_examples:
            number = min(number, self.config.evaluate_examples)
        translations: list[list[int]] = [[] for _ in range(number)]
        loss_sum, weight = 0.0, 0
        with evaluating(parts) as device:
            for indices in batches_by_length(encoded.source.lengths()[:number], self.config.evaluate_batch_size):
                batch = {name: tensor.to(device) for name, tensor in encoded.collate(indices).items()}
                memory = parts.encode(batch)
                loss, tokens = _plain_loss(parts, memory, batch)
                loss_sum, weight = loss_sum + loss, weight + tokens
                for i, ids in zip(indices, _search(self.config, parts, memory, batch), strict=True):
                    translations[i] = ids
        predictions = self.tokenizer.decode(translations)
        sources, references = list(pairs.sources[:number]), list(pairs.targets[:number])
        scores, signature = translation_scores(predictions, references, self.data.pretokenized)
        return Score(
            metrics={"loss": loss_sum / weight, **scores},
            examples=number,
            signature=signature,
            truncated=encoded.truncated,
            sources=sources,
            predictions=predictions,
            references=references,
        )


class TranslationTask:
    """Sequence-to-sequence training of an encoder-decoder on parallel text."""

    scores = ("loss", "bleu", "chrf")

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    def check(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and train no tokenizer."""
        _load_training(self.config, data, model, seed, num_clusters)
        for split in ("validation", "test"):
            load_pairs(data, split, seed=0)

    def prepare(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> Prepared:
        """Load the data, train or load the tokenizer, and size the model.

        Raises
        ------
        ValueError
            For all that cannot be loaded, a cluster without an example, or a model that cannot translate.
        """
        shares, sizes, tokenizer = _load_training(self.config, data, model, seed, num_clusters)
        if tokenizer is None:
            texts = (text for pairs in shares for side in (pairs.sources, pairs.targets) for text in side)
            tokenizer = train_tokenizer(texts, data.vocab_size, data.pretokenized)
        if not is_library(model.family):
            # Its decoder begins with the mark that others' tokenizers put before the text.
            tokenizer = tokenizer.without_rule()
        if model.family == CLASSIC:
            spec, weights = _classic(data, model, tokenizer)
        else:
            spec, weights = load_start(SEQ2SEQ, model, tokenizer, seed)
        return Prepared(
            spec=spec,
            tokenizer_json=tokenizer.to_json(),
            evaluator=TranslationEvaluator(self.config, data, tokenizer),
            cluster_sizes=sizes,
            weights=weights,
        )

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> TranslationData:
        """Load and encode one cluster's share of the training pairs."""
        load = partial(load_pairs, data, "train", seed)
        pairs, _ = training_share(data, load, cluster, num_clusters, seed)
        return TranslationData.encode(pairs, TextTokenizer.from_json(tokenizer_json), data.max_length)

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> TranslationEvaluator:
        """Load the held-out pairs for a model that is already there."""
        return TranslationEvaluator(self.config, data, TextTokenizer.from_json(tokenizer_json))

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[str]) -> list[str]:
        """Translate sentences; a source longer than the model is an error."""
        if not inputs:
            return []
        tokenizer = TextTokenizer.from_json(tokenizer_json)
        longest = max_length(parts.spec)
        encoded = EncodedText.encode([text.strip() for text in inputs], tokenizer, (longest or sys.maxsize - 1) + 1)
        for text, length in zip(inputs, encoded.lengths().tolist(), strict=True):
            if longest is not None and length > longest:
                raise ValueError(
                    f"a sentence of over {longest} tokens does not fit the model: {text[:60]!r}...; split it"
                )
        data = TranslationData(encoded, encoded, tokenizer.pad_id)
        translations: list[list[int]] = [[] for _ in inputs]
        with evaluating(parts) as device:
            for indices in batches_by_length(encoded.lengths(), self.config.evaluate_batch_size):
                batch = {name: tensor.to(device) for name, tensor in data.collate(indices).items()}
                for i, ids in zip(indices, _search(self.config, parts, parts.encode(batch), batch), strict=True):
                    translations[i] = ids
        return tokenizer.decode(translations)

    def saved(self, data: DataConfig) -> dict[str, Any]:
        """Name of the task, and how its text is written."""
        return {"name": self.config.name, "pretokenized": data.pretokenized}


def translation_scores(
    predictions: list[str], references: list[str], pretokenized: bool
) -> tuple[dict[str, float], str]:
    """Return sacreBLEU's BLEU and chrF2 in percent, and BLEU's signature."""
    from sacrebleu.metrics import BLEU, CHRF

    # On tokenised text sacrebleu would warn that it looks tokenised: that is meant.
    metric = BLEU(tokenize="none" if pretokenized else "13a", force=pretokenized)
    bleu, chrf = (m.corpus_score(predictions, [references]).score for m in (metric, CHRF()))
    return {"bleu": float(bleu), "chrf": float(chrf)}, str(metric.get_signature())


def _classic(data: DataConfig, model: ModelOptions, tokenizer: TextTokenizer) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Specification of the classic Transformer, and the weights that are not fresh."""
    if model.from_:
        start = run_to_start_from(model)
        check_length(start.spec, model, data.max_length)
        spec = replace(start.spec, config={**start.spec.config, "label_smoothing": model.label_smoothing})
        return spec, start.parts.weights()
    return transformer.spec(**table_sizes(model, tokenizer)), {}


def _load_training(
    config: TaskConfig, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int
) -> tuple[list[Pairs], tuple[int, ...], TextTokenizer | None]:
    """Load the training text (one share for each file), each cluster's number of examples, and a ready tokenizer."""
    if model.family != CLASSIC:
        check_model(config.name, SEQ2SEQ, model, data.max_length)
        if config.decode == "beam" and not is_library(model.family):
            raise ValueError(
                f"task.decode: beam goes with model.family = {CLASSIC} and the library's families, found "
                f"{model.family!r}; set it to greedy"
            )
    elif model.pretrained:
        raise ValueError(
            f"model.pretrained: a model.family = {CLASSIC} starts fresh or from another run (model.from), found "
            f"{model.pretrained!r}; name its family, such as bart or t5, or leave it empty"
        )
    shares, sizes = training_shares(data, partial(load_pairs, data, "train", seed), num_clusters, seed)
    return shares, sizes, ready_tokenizer(data, model)


def _plain_loss(parts: ModelParts, memory_BTD: Tensor, batch: Batch) -> tuple[float, int]:
    decoder = cast(Seq2SeqHead, parts.head)
    labels = batch["labels"]
    real = labels != IGNORED_LABEL
    states = decoder.hidden(memory_BTD, batch["attention_mask"], decoder.shift_right(labels))
    return float(F.cross_entropy(decoder.scores(states[real]), labels[real], reduction="sum")), int(real.sum())


def _search(config: TaskConfig, parts: ModelParts, memory_BTD: Tensor, batch: Batch) -> list[list[int]]:
    """Translate a batch that is already encoded."""
    longest = max_length(parts.spec)
    mask = batch["attention_mask"]
    limits = [config.max_new_tokens or 2 * n + 10 for n in mask.sum(dim=1).tolist()]
    if longest is not None:
        limits = [min(longest, limit) for limit in limits]
    if is_library(parts.spec.family):
        beams = config.beam_size if config.decode == "beam" else 1
        return decoding.library_search(parts, memory_BTD, mask, limits, beams, config.length_penalty)
    if parts.spec.family != CLASSIC:
        end_id = int(parts.spec.config["eos_id"])
        return decoding.plain_greedy(cast(Seq2SeqHead, parts.head), memory_BTD, mask, limits, end_id)
    decoder = cast(transformer.TransformerDecoder, parts.head)
    if config.decode == "beam":
        return decoding.beam(decoder, memory_BTD, mask, limits, config.beam_size, config.length_penalty)
    return decoding.greedy(decoder, memory_BTD, mask, limits)
