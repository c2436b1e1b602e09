"""A task's interface to the apps, and the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from client_pipeline.least_values import check_least
from client_pipeline.near_names import did_you_mean
from client_pipeline.partition.spec import BASE_DTYPES
from client_pipeline.plugins import class_named
from flower_app.tasks.answer_scores import scorer_names
from flower_app.tasks.data.tables import TABLES
from flower_app.tasks.data.texts import check_format, ending

if TYPE_CHECKING:
    from torch import Tensor

    from client_pipeline.partition.parts import ModelParts
    from client_pipeline.partition.spec import ModelSpec
    from client_pipeline.runtime.control_unit.round_order import TrainingData
    from client_pipeline.weights.base_weights import BaseWeights
    from flower_app.tasks.data.corpus import DataConfig

TASKS = {
    "translation": "flower_app.tasks.translation:TranslationTask",
    "sequence-classification": "flower_app.tasks.classification:ClassificationTask",
    "token-classification": "flower_app.tasks.tagging:TaggingTask",
    "masked-lm": "flower_app.tasks.masked_lm:MaskedLMTask",
    "causal-lm": "flower_app.tasks.causal_lm:CausalLMTask",
    "instruction": "flower_app.tasks.instruction:InstructionTask",
}
"""Name of each task -> its class."""
DECODINGS = ("greedy", "beam")
CLASS_WEIGHTINGS = ("none", "balanced")
NORMS = ("pre", "post")
TRAINABLE = ("full", "lora")
LOSSES = ("assistant", "last-answer", "all")
_WITH_COLUMNS = (*TABLES, ".conll", ".bio", ".conllu")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Table ``[task]``: what is learned and how it is scored."""

    name: str = "translation"
    """Task that is learned; a class of one's own is ``module:Class``."""
    decode: str = "greedy"
    """Search for the translations that are scored: ``greedy`` or ``beam``."""
    beam_size: int = 4
    """Hypotheses kept by ``beam``."""
    length_penalty: float = 1.0
    """``beam``: a hypothesis of n tokens is ranked by its log-probability divided by n to this power."""
    max_new_tokens: int = 0
    """Longest translation, answer, or continuation of a text, in tokens; 0: twice the source's tokens plus ten."""
    mask_probability: float = 0.15
    """``masked-lm``: share of the tokens that are to be found again."""
    class_weights: str = "none"
    """For tasks with labels: ``balanced`` multiplies the loss of a label with n of the N labels by N / (C n), for C
    labels that occur; ``none``."""
    chat_template: str = ""
    """``instruction``: a file with a chat template (Jinja), or ``chatml``; empty: the tokenizer's own, or
    ``chatml`` for one that is trained here. The marks of one named here must be tokens that the tokenizer has, unless
    all weights are trained. The run keeps the template."""
    loss_on: str = "assistant"
    """``instruction``: tokens that count: those of the ``assistant``, of the ``last-answer``, or ``all``. Where a
    template changes earlier answers (Qwen3 drops their thoughts), ``assistant`` counts the last answer alone."""
    date: str = ""
    """``instruction``: date that a chat template writes, such as 2026-01-31; empty: the day on which the run begins."""
    evaluate_generate: str = ""
    """``instruction``: scores of the answers that the model writes, with commas between: ``exact-match``, ``rouge-l``,
    and functions ``module:function(question, answer, reference)`` of your own; empty: none is written."""
    temperature: float = 0.0
    """``instruction``, in ``predict``: divides the logits of a drawn token; 0: the likeliest token."""
    top_p: float = 1.0
    """``instruction``, in ``predict``: tokens are drawn from the likeliest that have this probability together."""
    evaluate_examples: int = 0
    """Examples of the validation set that the evaluation after a round scores; 0: all."""
    evaluate_batch_size: int = 128
    """Sentences scored at once."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.name not in TASKS and ":" not in self.name:
            raise ValueError(
                f"task.name: expected one of {', '.join(TASKS)}, or module:Class, found {self.name!r}"
                f"{did_you_mean(self.name, TASKS)}"
            )
        if not 0 < self.mask_probability < 1:
            raise ValueError(f"task.mask-probability: expected a number in (0, 1), found {self.mask_probability}")
        choices = (("decode", DECODINGS), ("class_weights", CLASS_WEIGHTINGS), ("loss_on", LOSSES))
        for name, known in choices:
            if (choice := getattr(self, name)) not in known:
                key = f"task.{name.replace('_', '-')}"
                raise ValueError(f"{key}: expected one of {', '.join(known)}, found {choice!r}")
        check_least("task.", self, beam_size=1, evaluate_batch_size=1)
        check_least("task.", self, length_penalty=0, max_new_tokens=0, evaluate_examples=0, temperature=0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"task.top-p: expected a number in (0, 1], found {self.top_p}")
        if self.date:
            try:
                date.fromisoformat(self.date)
            except ValueError as error:
                raise ValueError(f"task.date: expected such as 2026-01-31, found {self.date!r}") from error
        scorer_names(self.evaluate_generate)


def check_task_data(name: str, data: DataConfig) -> None:
    """Raise ``ValueError`` where a key of the data is set for a task that has no use for it."""
    if data.packing and name in TASKS and name != "instruction":
        raise ValueError(f"data.packing: expected task.name = instruction, found {name}; set it to false")
    # The default is a column that other tasks have no use for, either.
    has_target = data.target_column not in ("", type(data).target_column)
    if has_target and name in TASKS and name not in ("translation", "instruction"):
        raise ValueError(
            f"data.target-column: expected task.name = translation or instruction, found {name}; leave it out: "
            "data.label-column names labels"
        )
    if data.pair_column and name in TASKS and name not in ("sequence-classification", "instruction"):
        raise ValueError(
            "data.pair-column: expected task.name = sequence-classification, the task of pairs, or instruction, found "
            f"{name}; leave it empty"
        )
    files = [Path(file) for file in (data.train_source, data.validation_source, data.test_source) if file]
    if name in ("translation", "masked-lm", "causal-lm") and not any(ending(file) in _WITH_COLUMNS for file in files):
        for file in files:
            check_format(file, "data.train-source")
            for key in ("source_column", "target_column", "label_column"):
                if (column := getattr(data, key)) != getattr(type(data), key):
                    raise ValueError(
                        f"data.{key.replace('_', '-')}: the text file {file} has no columns, found {column!r}; use a "
                        "table, or leave the key out"
                    )


MOST_WEIGHTS = 10**12
"""Most weights of an architecture, roughly counted: beyond it no machine builds it."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Table ``[model]``: the architecture; what the task and its tokenizer decide is not here."""

    family: str = "transformer"
    """Model family: ``transformer``, ``bert``, ``llama``, ... (docs/models.md has all); or ``module:Class``."""
    width: int = 64
    """D, the numbers of a token's activation."""
    num_heads: int = 4
    key_value_heads: int = 0
    """Heads of keys and values (LLaMA, Mistral, Qwen), shared by groups of ``num-heads``; 0: as many as these."""
    feed_forward: int = 256
    """Inner width of the feed-forward layers."""
    encoder_layers: int = 4
    """L, the number of TEBs."""
    decoder_layers: int = 2
    """Layers of the decoder; of a causal language model, the blocks that the server keeps."""
    dropout: float = 0.0
    norm: str = "pre"
    """Place of the norm in the classic Transformer: ``pre`` or ``post``."""
    label_smoothing: float = 0.0
    max_length: int = 256
    """Longest sequence that the model has positions for."""
    trainable: str = "full"
    """``full``: everything; ``lora``: adapters in the TEBs, by the ``[lora]`` table, and the head."""
    base_dtype: str = "float32"
    """With ``lora``: how the TEBs' matrices are held: ``float32``, ``bfloat16``, ``int8`` or ``nf4``."""
    pretrained: str = ""
    """Folder or hub id of pretrained weights, or a GGUF file; empty: fresh weights."""
    from_: str = ""
    """A run, by its directory or its name in ``runs-dir``: start from its embedding and TEBs (and from its head, if the
    task and the labels are the same), with its tokenizer; the sizes above are then its own. Empty: fresh weights."""
    new_head: bool = False
    """Train a new head (tasks with labels). ``false``: the head of ``pretrained`` goes on, and each label of the data
    needs a class of its name there; a model without such a head gets a new one."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        check_least("model.", self, width=1, num_heads=1, feed_forward=1, encoder_layers=1, decoder_layers=1)
        check_least("model.", self, max_length=1)
        weights = (self.encoder_layers + self.decoder_layers) * self.width * (self.width + self.feed_forward)
        if (weights := weights + self.max_length * self.width) > MOST_WEIGHTS:
            raise ValueError(
                "model.width: expected, with these layers, feed-forward and max-length, at most "
                f"{MOST_WEIGHTS:,} weights, found about {weights:,}; lower one of them"
            )
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width: {self.width} is not a multiple of model.num-heads = {self.num_heads}; change one of them"
            )
        if self.key_value_heads and (self.key_value_heads < 0 or self.num_heads % self.key_value_heads):
            raise ValueError(
                f"model.key-value-heads: expected a divisor of model.num-heads = {self.num_heads}, or 0, found "
                f"{self.key_value_heads}"
            )
        if self.key_value_heads:
            self._check_groups()
        if self.norm not in NORMS:
            raise ValueError(f"model.norm: expected pre or post, found {self.norm!r}")
        if self.trainable not in TRAINABLE:
            raise ValueError(f"model.trainable: expected full or lora, found {self.trainable!r}")
        # Imports torch: for those alone who ask for it.
        if self.base_dtype != BASE_DTYPES[0]:
            from client_pipeline.families.registry import check_base_dtype

            check_base_dtype(self.base_dtype, self.trainable, self.pretrained, self.family)
        if self.pretrained and self.from_:
            raise ValueError(
                f"model.from: {self.from_} and model.pretrained = {self.pretrained} cannot both be set; leave one empty"
            )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                key = f"model.{name.replace('_', '-')}"
                raise ValueError(f"{key}: expected a number in [0, 1), found {getattr(self, name)}")

    def _check_groups(self) -> None:
        """Refuse fewer heads of keys and values in a family whose heads share none."""
        from client_pipeline.families.hugging_face import has_setting
        from client_pipeline.families.registry import is_decoder_only

        if not (is_decoder_only(self.family) and has_setting(self.family, "num_key_value_heads")):
            raise ValueError(
                "model.key-value-heads: expected a model.family whose heads share keys and values, such as llama or "
                f"qwen3, found {self.family!r}; leave it 0"
            )


@dataclass(frozen=True, kw_only=True)
class Score:
    """Outcome of an evaluation."""

    metrics: dict[str, float]
    """``loss`` (plain cross-entropy for each target), and the task's own."""
    examples: int
    """Examples that were scored."""
    signature: str = ""
    """Computation of the task's metric, in its library's notation."""
    truncated: int = 0
    """Sequences of the split that were cut at ``data.max-length``."""
    sources: list[str] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    mistakes: dict[str, Any] = field(default_factory=dict)
    """For tasks with labels: scores by class, confusions and worst examples; see
    :func:`flower_app.tasks.mistakes.mistakes_of`."""


class Evaluator(Protocol):
    """Scores models on held-out data, which it has loaded."""

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Score ``parts`` where they are (CPU or GPU); ``split`` is ``validation`` or ``test``."""


@runtime_checkable
class AnswersQuestions(Protocol):
    """Evaluator of a task whose model answers questions."""

    def examples(self, parts: ModelParts) -> list[dict[str, str]]:
        """Answer a few questions of the test data: each ``question``, its ``reference`` and the ``answer``."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The server's knowledge before the first round."""

    spec: ModelSpec
    tokenizer_json: str
    evaluator: Evaluator
    cluster_sizes: tuple[int, ...]
    """Training examples of each cluster."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights to start from, by global name of the model without adapters; what is absent is fresh."""

    @property
    def num_examples(self) -> int:
        """Training examples of all clusters."""
        return sum(self.cluster_sizes)

    def with_tail(self, of_cluster: bool) -> Prepared:
        """Return the same with the head's tail as the control unit's, or as the server's."""
        from client_pipeline.families.pretrained import with_tail

        spec, weights = with_tail(self.spec, self.weights, of_cluster)
        return replace(self, spec=spec, weights=weights)

    @property
    def base(self) -> BaseWeights | None:
        """Frozen weights where adapters are added to weights in files; None: they are in memory, or trained."""
        from client_pipeline.families.pretrained import PretrainedWeights

        if self.spec.lora is None or not isinstance(self.weights, PretrainedWeights):
            return None
        return self.weights.whole_base if self.spec.lora.freezes_head else self.weights.base

    def build(self, seed: int) -> ModelParts:
        """Build the model that training begins with; ``seed`` draws fresh weights."""
        from client_pipeline.families.families import build_over, build_parts
        from client_pipeline.families.fresh_base import FreshBase
        from client_pipeline.families.lora import adapt
        from client_pipeline.families.registry import is_decoder_only
        from client_pipeline.partition.parts import part_weights

        if (base := self.base) is not None:
            return build_over(self.spec, base, part_weights(self.weights, "head"), seed)
        if self.spec.lora is not None and not self.weights and is_decoder_only(self.spec.family):
            drawn = FreshBase(self.spec, seed)
            return build_over(self.spec, drawn, drawn.part("head."), seed)
        if self.spec.low_bits:
            raise ValueError(
                f"model.base-dtype: {self.spec.base_dtype} needs fresh weights of a decoder-only family, or a model "
                "whose embedding and TEBs are in its safetensors files as they are used, found one that is converted, "
                "computed or of another run; use float32"
            )
        parts = build_parts(replace(self.spec, lora=None), seed)
        parts.load({**dict(parts.named_parameters()), **self.weights})
        return parts if self.spec.lora is None else adapt(parts, self.spec.lora, seed)


class Task(Protocol):
    """One task. Configuration mistakes raise ``ValueError`` here, before any work starts."""

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the metrics of its evaluation."""

    def check(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> None:
        """Raise the mistakes that :meth:`prepare` would, without its long work."""

    def prepare(self, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int) -> Prepared:
        """Load data and tokenizer on the server, and size the model; every cluster must get an example."""

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> TrainingData:
        """Load one cluster's share, on the cluster."""

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> Evaluator:
        """Load the held-out data for a model that is already there."""

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[Any]) -> list[str]:
        """Use the model on texts; or on pairs of them, words one by one, as the task takes them."""

    def saved(self, data: DataConfig) -> dict[str, Any]:
        """JSON values that are saved beside a model as ``task.json``."""


class PackagedTask:
    """Common part of this package's own tasks."""

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    def saved(self, data: DataConfig) -> dict[str, Any]:
        """Return the name of the task, and how its text is written; a model's labels stand in its specification."""
        return {"name": self.config.name, "pretokenized": data.pretokenized}


@runtime_checkable
class LabelProbabilities(Protocol):
    """Task that gives each label of a text a probability."""

    def probabilities(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each label, for each text; those of a text sum to 1."""


def task_with_probabilities(config: TaskConfig) -> LabelProbabilities:
    """Build the configured task, for its probabilities.

    Raises
    ------
    ValueError
        If it gives none.
    """
    chosen = task(config)
    if not isinstance(chosen, LabelProbabilities):
        raise ValueError(
            f"proba: expected a run of sequence-classification, found {config.name}: it gives a text no probability "
            "for each of several labels; leave proba out"
        )
    return chosen


def task(config: TaskConfig) -> Task:
    """Build the configured task.

    Raises
    ------
    ValueError
        If a task of the user's own cannot be imported, or is none.
    """
    return cast(Task, class_named("task.name", TASKS.get(config.name, config.name), Task)(config))
