"""What a task gives to the apps, and the registry of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from client_pipeline.near_names import did_you_mean
from client_pipeline.partition.spec import has_seeds_of_parts
from client_pipeline.plugins import class_named

if TYPE_CHECKING:
    from torch import Tensor

    from client_pipeline.partition.base_weights import BaseWeights
    from client_pipeline.partition.parts import Batch, ModelParts
    from client_pipeline.partition.spec import ModelSpec
    from flower_app.tasks.corpus import DataConfig

TASKS = {
    "translation": "flower_app.tasks.translation:TranslationTask",
    "sequence-classification": "flower_app.tasks.classification:ClassificationTask",
    "token-classification": "flower_app.tasks.tagging:TaggingTask",
    "masked-lm": "flower_app.tasks.masked_lm:MaskedLMTask",
    "causal-lm": "flower_app.tasks.causal_lm:CausalLMTask",
}
"""Name of each task -> its class."""
DECODINGS = ("greedy", "beam")
CLASS_WEIGHTINGS = ("none", "balanced")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Table ``[task]``: what is learned and how it is scored."""

    name: str = "translation"
    """What is learned; a class of one's own is ``module:Class``."""
    decode: str = "greedy"
    """How translations are searched for scoring: ``greedy`` or ``beam``."""
    beam_size: int = 4
    """Hypotheses kept by ``beam``."""
    length_penalty: float = 1.0
    """``beam``: a hypothesis of n tokens is ranked by its log-probability divided by n to this power."""
    max_new_tokens: int = 0
    """Longest translation, or continuation of a text, in tokens; 0: twice the source's tokens plus ten."""
    mask_probability: float = 0.15
    """``masked-lm``: share of the tokens that are to be found again."""
    class_weights: str = "none"
    """Of tasks with labels: ``balanced`` multiplies the loss of a label with n of the N labels by N / (C n), for C
    labels that occur; ``none``."""
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
        for name, known in (("decode", DECODINGS), ("class_weights", CLASS_WEIGHTINGS)):
            if (choice := getattr(self, name)) not in known:
                key = f"task.{name.replace('_', '-')}"
                raise ValueError(f"{key}: expected one of {', '.join(known)}, found {choice!r}")
        for name, least in (
            ("beam_size", 1),
            ("length_penalty", 0),
            ("max_new_tokens", 0),
            ("evaluate_examples", 0),
            ("evaluate_batch_size", 1),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"task.{name.replace('_', '-')}: expected at least {least}, found {value}")


class ModelOptions(Protocol):
    """What a task reads of the ``[model]`` table."""

    @property
    def family(self) -> str: ...  # noqa: D102
    @property
    def width(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def feed_forward(self) -> int: ...  # noqa: D102
    @property
    def encoder_layers(self) -> int: ...  # noqa: D102
    @property
    def decoder_layers(self) -> int: ...  # noqa: D102
    @property
    def dropout(self) -> float: ...  # noqa: D102
    @property
    def norm(self) -> str: ...  # noqa: D102
    @property
    def label_smoothing(self) -> float: ...  # noqa: D102
    @property
    def max_length(self) -> int: ...  # noqa: D102
    @property
    def pretrained(self) -> str: ...  # noqa: D102
    @property
    def from_(self) -> str: ...  # noqa: D102


class ClusterData(Protocol):
    """One cluster's training examples, encoded. Plain data: it travels into the control unit's actor."""

    @property
    def truncated(self) -> int:
        """Sequences that were cut at ``data.max-length``."""
        ...

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Build the batch of these examples, padded to its longest; ``seed`` decides what is random in it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """Outcome of an evaluation."""

    metrics: dict[str, float]
    """``loss`` (plain cross-entropy for each target), and the task's own."""
    examples: int
    """Examples that were scored."""
    signature: str = ""
    """How the task's metric was computed, in its library's notation."""
    truncated: int = 0
    """Sequences of the split that were cut at ``data.max-length``."""
    sources: list[str] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


class Evaluator(Protocol):
    """Scores models on held-out data, which it has loaded."""

    def evaluate(self, parts: ModelParts, split: str = "validation") -> Score:
        """Score ``parts`` where they are (CPU or GPU); ``split`` is ``validation`` or ``test``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the server knows before the first round."""

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

    @property
    def base(self) -> BaseWeights | None:
        """What is frozen where adapters are added to weights in files; None: it is in memory, or trained."""
        from client_pipeline.partition.pretrained import PretrainedWeights

        if self.spec.lora is None or not isinstance(self.weights, PretrainedWeights):
            return None
        return self.weights.whole_base if self.spec.lora.freezes_head else self.weights.base

    def build(self, seed: int) -> ModelParts:
        """Build the model that training begins with; ``seed`` draws fresh weights."""
        from client_pipeline.partition.families import build_over, build_parts
        from client_pipeline.partition.fresh_base import FreshBase
        from client_pipeline.partition.lora import adapt
        from client_pipeline.partition.parts import part_weights

        if (base := self.base) is not None:
            return build_over(self.spec, base, part_weights(self.weights, "head"), seed)
        if self.spec.lora is not None and not self.weights and has_seeds_of_parts(self.spec.family):
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
        ...

    def check(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> None:
        """Raise the mistakes that :meth:`prepare` would, without its long work."""
        ...

    def prepare(self, data: DataConfig, model: ModelOptions, seed: int, num_clusters: int) -> Prepared:
        """Load data and tokenizer on the server, and size the model; every cluster must get an example."""
        ...

    def cluster_data(
        self, data: DataConfig, tokenizer_json: str, cluster: int, num_clusters: int, seed: int
    ) -> ClusterData:
        """Load one cluster's share, on the cluster."""
        ...

    def evaluator(self, data: DataConfig, tokenizer_json: str) -> Evaluator:
        """Load the held-out data for a model that is already there."""
        ...

    def predict(self, parts: ModelParts, tokenizer_json: str, inputs: Sequence[str]) -> list[str]:
        """Use the model."""
        ...

    def saved(self, data: DataConfig) -> dict[str, Any]:
        """What is saved beside a model as ``task.json``: JSON values."""
        ...


def task(config: TaskConfig) -> Task:
    """Build the configured task.

    Raises
    ------
    ValueError
        If a task of the user's own cannot be imported, or is none.
    """
    return cast(Task, class_named("task.name", TASKS.get(config.name, config.name), Task)(config))
