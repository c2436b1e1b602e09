"""Translation: parallel text in, BLEU and chrF out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from client_pipeline.families import transformer
from client_pipeline.families.families import max_length
from client_pipeline.families.registry import is_library
from client_pipeline.families.seq2seq import Seq2SeqHead
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import SEQ2SEQ
from flower_app.tasks import beam_search
from flower_app.tasks.base import ModelConfig, PackagedTask, Prepared, Score, TaskConfig
from flower_app.tasks.data.corpus import DataConfig, Pairs, load_pairs
from flower_app.tasks.data.data_split import training_share, training_shares
from flower_app.tasks.encoded import EncodedText, check_known, evaluating, num_scored, scored_batches
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
        """Encode both sides; a target that is cut teaches no end."""
        source = EncodedText.encode(pairs.sources, tokenizer, max_length)
        target = EncodedText.encode(pairs.targets, tokenizer, max_length, ends_cut=False)
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
        number, size = num_scored(self.config, split, len(pairs)), self.config.evaluate_batch_size
        translations: list[list[int]] = [[] for _ in range(number)]
        loss_sum, weight = 0.0, 0
        with evaluating(parts) as device:
            for indices, batch in scored_batches(encoded, encoded.source.lengths()[:number], size, device):
                memory, labels = parts.encode(batch), batch["labels"]
                real, decoder = labels != IGNORED_LABEL, cast(Seq2SeqHead, parts.head)
                states = decoder.hidden(memory, batch["attention_mask"], decoder.shift_right(labels))
                loss_sum += float(F.cross_entropy(decoder.scores(states[real]), labels[real], reduction="sum"))
                weight += int(real.sum())
                translated = search(self.config, parts, memory, batch["attention_mask"], self.tokenizer.end_ids)
                for i, ids in zip(indices, translated, strict=True):
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


class TranslationTask(PackagedTask):
    """Sequence-to-sequence training of an encoder-decoder on parallel text."""

    scores = ("loss", "bleu", "chrf")

    def check(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> None:
        """Load what :meth:`prepare` loads, and train no tokenizer."""
        _load_training(self.config, data, model, seed, num_clusters)
        for split in ("validation", "test"):
            load_pairs(data, split, seed=0)

    def prepare(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Prepared:
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
        if model.family != CLASSIC:
            spec, weights = load_start(SEQ2SEQ, model, tokenizer, seed)
        elif model.from_:
            start = run_to_start_from(model)
            check_length(start.spec, model, data.max_length)
            spec = replace(start.spec, config={**start.spec.config, "label_smoothing": model.label_smoothing})
            weights = start.parts.weights()
        else:
            spec, weights = transformer.spec(**table_sizes(model, tokenizer)), {}
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
            size = self.config.evaluate_batch_size
            for indices, batch in scored_batches(data, encoded.lengths(), size, device):
                memory, mask = parts.encode(batch), batch["attention_mask"]
                translated = search(self.config, parts, memory, mask, tokenizer.end_ids)
                for i, ids in zip(indices, translated, strict=True):
                    translations[i] = ids
        return tokenizer.decode(translations)


def translation_scores(
    predictions: list[str], references: list[str], pretokenized: bool
) -> tuple[dict[str, float], str]:
    """Return sacreBLEU's BLEU and chrF2 in percent, and BLEU's signature."""
    from sacrebleu.metrics import BLEU, CHRF

    # On tokenised text sacrebleu would warn that it looks tokenised: that is meant.
    metric = BLEU(tokenize="none" if pretokenized else "13a", force=pretokenized)
    bleu, chrf = (m.corpus_score(predictions, [references]).score for m in (metric, CHRF()))
    return {"bleu": float(bleu), "chrf": float(chrf)}, str(metric.get_signature())


def _load_training(
    config: TaskConfig, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int
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
    tokenizer = ready_tokenizer(data, model)
    if tokenizer is not None:
        # A trained one knows every byte.
        texts = (text for pairs in shares for pair in zip(pairs.sources, pairs.targets, strict=True) for text in pair)
        check_known(tokenizer, texts, is_ready=True)
    return shares, sizes, tokenizer


def longest_translation(config: TaskConfig, parts: ModelParts, num_tokens: int) -> int:
    """Return the most tokens of a translation, with its end, of a source of ``num_tokens``."""
    limit = config.max_new_tokens or 2 * num_tokens + 10
    return min(limit, max_length(parts.spec) or limit)


def search(
    config: TaskConfig, parts: ModelParts, memory_BTD: Tensor, mask: Tensor, end_ids: Sequence[int]
) -> list[list[int]]:
    """Return the ids of translations, without begin and end.

    Parameters
    ----------
    config : says which search
    parts : of the model, in evaluation
    memory_BTD : what its last TEB gives for the sources
    mask : [B, T], True at real source tokens
    end_ids : the tokenizer's ends
    """
    limits = [longest_translation(config, parts, n) for n in mask.sum(dim=1).tolist()]
    if is_library(parts.spec.family):
        beams = config.beam_size if config.decode == "beam" else 1
        return beam_search.library_search(parts, memory_BTD, mask, limits, beams, config.length_penalty, end_ids)
    if parts.spec.family != CLASSIC:
        end_id = int(parts.spec.config["eos_id"])
        return beam_search.plain_greedy(cast(Seq2SeqHead, parts.head), memory_BTD, mask, limits, end_id)
    decoder = cast(transformer.TransformerDecoder, parts.head)
    if config.decode == "beam":
        return beam_search.beam(decoder, memory_BTD, mask, limits, config.beam_size, config.length_penalty)
    return beam_search.greedy(decoder, memory_BTD, mask, limits)
