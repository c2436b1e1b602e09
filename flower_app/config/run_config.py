"""The run's configuration: read once, at the door, into frozen dataclasses.

Flower hands over flat, unchecked scalars (``{"optimizer.lr": 0.001, ...}``); :meth:`RunConfig.from_flat` checks them.
Each table is a dataclass that lives beside the code that it configures.
"""

from __future__ import annotations

import difflib
import json
import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast, get_type_hints

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.spec import GROUPED_FAMILIES, LoraConfig, ModelSpec, check_base_dtype
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from flower_app.config.other_names import without_other_names
from flower_app.config.planner_config import PlannerConfig
from flower_app.config.privacy_checks import check_privacy
from flower_app.config.selection import SelectionConfig
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.corpus import DataConfig
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.decoder.config import DecoderConfig
from strategies.registry import traits_by_name
from strategies.traits import Traits

Scalar = bool | int | float | str

DECODER_SYNCS = ("auto", "step", "round")
COSTS = ("scenario", "model", "measured")
EMULATIONS = ("none", "paced")
NORMS = ("pre", "post")
TRAINABLE = ("full", "lora")
DERIVED = frozenset({"optimizer.total-steps"})
"""Fields that follow from others and are no keys."""

_KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "a table",
    list: "a list",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Table ``[model]``: the architecture; what the task and its tokenizer decide is not here."""

    family: str = "transformer"
    """Which kind of model: ``transformer``, ``bert``, ``llama``, ... (docs/models.md has all); or ``module:Class``."""
    width: int = 64
    """D, the numbers of a token's activation."""
    num_heads: int = 4
    key_value_heads: int = 0
    """Of LLaMA, Mistral and Qwen: heads of keys and values, shared by groups of ``num-heads``; 0: as many as these."""
    feed_forward: int = 256
    """Inner width of the feed-forward layers."""
    encoder_layers: int = 4
    """L, the number of TEBs."""
    decoder_layers: int = 2
    """Of the decoder; of a causal language model, the blocks that the server keeps."""
    dropout: float = 0.0
    norm: str = "pre"
    """Of the classic Transformer: ``pre`` or ``post``."""
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

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        for name in ("width", "num_heads", "feed_forward", "encoder_layers", "decoder_layers", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{_kebab(name)}: expected at least 1, found {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width: {self.width} is not a multiple of model.num-heads = {self.num_heads}; change one of them"
            )
        if self.key_value_heads and (self.key_value_heads < 0 or self.num_heads % self.key_value_heads):
            raise ValueError(
                f"model.key-value-heads: expected a divisor of model.num-heads = {self.num_heads}, or 0, found "
                f"{self.key_value_heads}"
            )
        if self.key_value_heads and self.family not in GROUPED_FAMILIES:
            raise ValueError(
                f"model.key-value-heads: expected a model.family of {', '.join(GROUPED_FAMILIES)}, found "
                f"{self.family!r}; leave it 0"
            )
        if self.norm not in NORMS:
            raise ValueError(f"model.norm: expected pre or post, found {self.norm!r}")
        if self.trainable not in TRAINABLE:
            raise ValueError(f"model.trainable: expected full or lora, found {self.trainable!r}")
        check_base_dtype(self.base_dtype, self.trainable, self.pretrained, self.family)
        if self.pretrained and self.from_:
            raise ValueError(
                f"model.from: {self.from_} and model.pretrained = {self.pretrained} cannot both be set; leave one empty"
            )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"model.{_kebab(name)}: expected a number in [0, 1), found {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a user can set about one training run. The defaults are the default run."""

    name: str = "default"
    """Part of the run directory's name."""
    seed: int = 0
    strategy: str = "collapipe"
    """``collapipe``, a baseline (``vanilla-fl``, ``pipeline``, ``titanic``), a class of ``flwr.serverapp.strategy`` or
    ``module:Class``."""
    strategy_options: str = ""
    """Arguments of the strategy's constructor, a JSON object; empty: none."""
    policy: str = "dssda"
    """Who plans the rounds of ``collapipe``: ``dssda``, ``dssda-paper``, ``random``, ``loss-only``, ``delay-only``,
    ``uniform``, ``fixed``, one of the middle three with ``+optimal`` behind it, or ``module:Class``.
    A plan file in ``plan`` takes its place."""
    plan: str = ""
    """A plan file, ``collapipe-plan/1``; empty: the policy plans."""
    scenario: str = "default"
    """The network: a name in ``configs/scenarios``, or a file."""
    scenario_seed: int = -1
    """Instead of the scenario's own: other devices and rounds from the same ranges; -1: its own."""
    costs: str = "scenario"
    """What TEBs and uploads cost in the planner's eyes: as the ``scenario`` says, counted from the ``model``, or as
    ``measured`` in the rounds before, which is what ``collapipe run --superlink`` does."""
    device_emulation: str = "none"
    """``paced``: devices take the time that their profiles say, times ``time-scale``; ``none``: as fast as they go."""
    time_scale: float = 0.05
    """Wall seconds of a virtual second of paced devices."""
    num_rounds: int = 60
    num_clusters: int = 0
    """Clusters of the run, each a node to wait for; 0: the scenario's."""
    local_steps: int = 4
    """Optimizer steps of a cluster per round."""
    batch_size: int = 32
    """b, examples per control unit and batch."""
    gradient_accumulation: int = 1
    """Batches of each optimizer step, one after the other through the pipeline: a step trains on that many times
    ``batch-size`` examples per control unit, with the memory of one batch."""
    decoder_sync: str = "auto"
    """``step``: clusters wait for each other in every step, and train one decoder. ``round``: each trains a copy of its
    own, and the copies are averaged. ``auto``: ``step``, but ``round`` where a simulation runs its clusters one after
    the other."""
    evaluate_every: int = 12
    """Rounds between evaluations; 0: only after the last round."""
    checkpoint_every: int = 1
    """Rounds between checkpoints, from which a run can be resumed; 0: none."""
    resume: bool = False
    """Go on with the run in ``run-dir``; ``collapipe run --resume`` sets it."""
    tensorboard: bool = False
    """Whether scalars go to TensorBoard files in the run directory."""
    report_to: str = ""
    """Where they go: some of ``tensorboard``, ``mlflow`` and ``wandb``, with commas."""
    runs_dir: str = "runs"
    """Folder of the run directories."""
    run_dir: str = ""
    """This run's directory; empty: a new one in ``runs-dir``."""
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(vocab_size=1000))
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=5e-3, schedule="cosine", warmup_steps=40)
    )
    server_optimizer: ServerOptimizerConfig = field(default_factory=ServerOptimizerConfig)
    aggregator: AggregatorConfig = field(default_factory=AggregatorConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot run, and derive the length of the learning-rate schedule."""
        for name, least in (
            ("seed", 0),
            ("num_rounds", 1),
            ("num_clusters", 0),
            ("local_steps", 1),
            ("batch_size", 1),
            ("gradient_accumulation", 1),
            ("evaluate_every", 0),
            ("checkpoint_every", 0),
            ("scenario_seed", -1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{_kebab(name)}: expected at least {least}, found {getattr(self, name)}")
        for name in ("name", "strategy", "policy", "scenario", "runs_dir"):
            if not getattr(self, name):
                raise ValueError(f"{_kebab(name)}: expected a text, found an empty one")
        if not all(c.isalnum() or c in "-_." for c in self.name) or self.name.startswith("."):
            raise ValueError(f"name: expected letters, digits, '-', '_' and '.' alone, found {self.name!r}")
        if self.decoder_sync not in DECODER_SYNCS:
            raise ValueError(f"decoder-sync: expected one of {', '.join(DECODER_SYNCS)}, found {self.decoder_sync!r}")
        for name, known in (("costs", COSTS), ("device_emulation", EMULATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{_kebab(name)}: expected one of {', '.join(known)}, found {getattr(self, name)!r}")
        if self.time_scale <= 0:
            raise ValueError(f"time-scale: expected a number above 0, found {self.time_scale}")
        if self.resume and not self.run_dir:
            raise ValueError("resume: no run is named; set run-dir to its directory, or use collapipe run --resume RUN")
        self.strategy_arguments()
        if self.data.max_length > self.model.max_length:
            raise ValueError(
                f"data.max-length: {self.data.max_length} exceeds model.max-length = {self.model.max_length}; "
                "lower the first or raise the second"
            )
        if self.selection.patience and not self.evaluate_every:
            raise ValueError(
                f"selection.patience: {self.selection.patience} evaluations, but evaluate-every = 0 evaluates only "
                "after the last round; set evaluate-every"
            )
        total = self.num_rounds * self.local_steps
        object.__setattr__(self, "optimizer", replace(self.optimizer, total_steps=total))

    def check_strategy(self) -> None:
        """Refuse what does not go with the strategy and the aggregation rule, as their classes declare."""
        if self.compression.update != "none" and not self.traits.uploads:
            raise ValueError(
                f"compression.update: strategy = {self.strategy} uploads nothing that could be compressed, found "
                f"{self.compression.update!r}; leave it none"
            )
        if self.selection.load_best_at_end and not self.traits.averages:
            raise ValueError(
                f"selection.load-best-at-end: with strategy = {self.strategy} every cluster has a model of its own, so "
                "none is the best; leave it out"
            )
        if self.privacy != PrivacyConfig():
            check_privacy(
                self.privacy,
                strategy=self.strategy,
                traits=self.traits,
                aggregator=self.aggregator.name,
                update=self.compression.update,
                clip_norm=self.optimizer.clip_norm,
            )

    @property
    def traits(self) -> Traits:
        """What the strategy declares of itself; the defaults where it is not known here: whoever builds it says so."""
        try:
            return _traits_of(self.strategy)
        except ValueError:
            return Traits()

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return a model's specification with the run's adapters, if it trains any."""
        if self.model.trainable != "lora":
            return spec
        return replace(spec, lora=self.lora, base_dtype=self.model.base_dtype)

    def strategy_arguments(self) -> dict[str, Any]:
        """Return ``strategy-options`` as a dictionary."""
        try:
            options = json.loads(self.strategy_options or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise ValueError(
                f'strategy-options: expected a JSON object such as {{"eta": 0.1}}, found {self.strategy_options!r}'
            )
        return options

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> RunConfig:
        """Build the configuration from flat, kebab-case keys; keys that are absent keep their default.

        Raises
        ------
        ValueError
            For an unknown key (the nearest known one is named), a value of another type, or one out of range; for
            settings that do not go with the strategy.
        """
        config = cls.as_sent(flat)
        config.check_strategy()
        return config

    @classmethod
    def as_sent(cls, flat: Mapping[str, Any]) -> RunConfig:
        """As :meth:`from_flat`, on a control unit: the classes that the server alone needs are not imported."""
        kinds = key_types()
        tables: dict[str, dict[str, Any]] = {"": {}}
        defaults = cls()
        for key, value in without_other_names(flat, defaults.to_flat()).items():
            if key not in kinds:
                raise ValueError(unknown_key(key))
            table, _, name = key.rpartition(".")
            tables.setdefault(_field(table), {})[_field(name)] = _checked(key, value, kinds[key])
        arguments = tables.pop("")
        # The default run may set a table otherwise than the table's own class.
        arguments.update({name: replace(getattr(defaults, name), **values) for name, values in tables.items()})
        return cls(**arguments)

    def to_flat(self) -> dict[str, Scalar]:
        """Every key with its value: the inverse of :meth:`from_flat`."""
        return dict(_flatten(self, ""))


def key_types() -> Mapping[str, type]:
    """Every known key, in declaration order, and the type of its value."""
    return _key_types()


def nested(flat: Mapping[str, Scalar]) -> dict[str, Any]:
    """Turn dotted keys into tables, as a TOML file has them."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        table, _, name = key.rpartition(".")
        (result.setdefault(table, {}) if table else result)[name] = value
    return result


def unknown_key(key: str) -> str:
    """Message for a key that is not known."""

    def likeness(known: str) -> float:
        # A key without its table ("lr") is as common a slip as a misspelt one.
        names = (known, known.rpartition(".")[2])
        return max(difflib.SequenceMatcher(a=key.replace("_", "-"), b=name).ratio() for name in names)

    return f"unknown configuration key {key!r}; did you mean {max(key_types(), key=likeness)!r}?"


@cache
def _traits_of(strategy: str) -> Traits:
    return traits_by_name(strategy)


@cache
def _key_types() -> Mapping[str, type]:
    def declared(owner: type, prefix: str) -> Iterator[tuple[str, type]]:
        hints = get_type_hints(owner)
        for item in fields(owner):
            key = prefix + _kebab(item.name)
            if is_dataclass(hints[item.name]):
                yield from declared(hints[item.name], f"{key}.")
            elif key not in DERIVED:
                yield key, hints[item.name]

    return dict(declared(RunConfig, ""))


def _flatten(config: Any, prefix: str) -> Iterator[tuple[str, Scalar]]:
    for item in fields(config):
        key, value = prefix + _kebab(item.name), getattr(config, item.name)
        if is_dataclass(value):
            yield from _flatten(value, f"{key}.")
        elif key not in DERIVED:
            yield key, value


def _checked(key: str, value: Any, kind: type) -> Scalar:
    """Return the value in the key's type; only a whole number may stand for a number."""
    value_type = type(value)
    if kind is float and value_type is int and abs(value) < 2**1023:
        return float(value)
    if value_type is not kind:
        raise ValueError(
            f"{key}: expected {_KINDS[kind]}, found {_KINDS.get(value_type, value_type.__name__)}: {value!r}"
        )
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{key}: expected a finite number, found {value}")
    if kind is int and not -(2**63) <= value < 2**63:
        # Flower sends whole numbers in 64 bits.
        raise ValueError(f"{key}: expected a whole number from -2^63 to 2^63 - 1, found {value}")
    return cast(Scalar, value)


def _kebab(name: str) -> str:
    # A field whose key is a word of Python has an underscore at its end.
    return name.rstrip("_").replace("_", "-")


def _field(key: str) -> str:
    return f"{key}_" if keyword.iskeyword(key) else key.replace("-", "_")
