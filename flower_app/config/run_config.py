"""The run's configuration: read once, at the door, into frozen dataclasses.

Flower hands over flat, unchecked scalars (``{"optimizer.lr": 0.001, ...}``); :meth:`RunConfig.from_flat` checks them.
Each table is a dataclass that lives beside the code that it configures.
"""

from __future__ import annotations

import difflib
import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast, get_args, get_type_hints

from client_pipeline.documents import json_value
from client_pipeline.least_values import check_least
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.system.scenario import Bandwidth, Bound
from flower_app.config.other_names import without_other_names
from flower_app.config.privacy_checks import check_privacy
from flower_app.config.removed import without_removed_keys
from flower_app.config.selection import SelectionConfig
from flower_app.config.serve_config import ServeConfig
from flower_app.config.split_config import CLUSTER, SplitConfig
from flower_app.tasks.base import ModelConfig, TaskConfig, check_task_data
from flower_app.tasks.data.corpus import DataConfig
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.decoder.config import DecoderConfig
from strategies.dssda.paper.power_control import check_power_control
from strategies.dssda.queues import DRIFTS
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.registry import COLLAPIPE, traits_by_name
from strategies.traits import Traits

Scalar = bool | int | float | str

DECODER_SYNCS = ("auto", "step", "round")
COSTS = ("scenario", "model", "measured")
EMULATIONS = ("none", "paced")
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
class PlannerConfig:
    """Table ``[planner]``: what overrides the scenario's own settings."""

    v: float = 0.0
    """V, weight of the latency against the queues [1/s]; 0: the scenario's."""
    gamma_max: float = 0.0
    """Threshold of the convergence bound; 0: the scenario's."""
    bound: str = ""
    """Bound that the queues keep: ``gamma``, Eq. (28); or ``participation``, what a cluster lacks of the updates by
    the scenario's ``data-share``; empty: the scenario's."""
    participation_max: float = 0.0
    """Threshold of ``participation``; 0: the scenario's."""
    energy_price: float = 0.0
    """Cost of a joule in the plan's objective, beside V of a second [1/J]; 0: the scenario's."""
    bandwidth: str = ""
    """``channels``, or ``split``: the matched clusters divide a band; empty: the scenario's."""
    drift: str = "true"
    """``true``; or for ``dssda-paper`` alone ``printed``, the paper's P2, or ``mixed``, only the power's part of it."""
    c11: bool = False
    """``dssda-paper`` alone: hold the bound in every round, as printed."""
    schedule: str = ""
    """Pipeline schedule: ``gpipe``, ``1f1b``, ``zb-h1``; or ``auto``, the event simulator's choice for each cluster;
    empty: as the plans say, ``gpipe`` unless a plan file has another."""
    token_slices: int = 1
    """Slices of each micro-batch along the sequence (causal models), which enter the pipeline one after the other; 0:
    the event simulator's choice of 1, 2, 4 and 8 for each cluster; 1: as the plans say, none unless a plan file has."""
    length: int = 0
    """Tokens of the sample that ``costs = "model"`` counts; 0: ``data.max-length``."""
    power_control: str = "sca"
    """Power control of ``dssda`` and ``uniform``: ``sca``, Algorithm 3's convex programs; or ``exact``."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        check_power_control(self.power_control, "planner.power-control")
        check_least("planner.", self, v=0, gamma_max=0, participation_max=0, energy_price=0, length=0)
        for key, value, known in (
            ("bandwidth", self.bandwidth, get_args(Bandwidth)),
            ("bound", self.bound, get_args(Bound)),
        ):
            if value and value not in known:
                raise ValueError(
                    f"planner.{key}: expected {', '.join(known)} or an empty text for the scenario's, found {value!r}"
                )
        PipelineChoices.of(self.schedule, self.token_slices)
        if self.drift not in DRIFTS:
            raise ValueError(f"planner.drift: expected one of {', '.join(DRIFTS)}, found {self.drift!r}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a user can set about one training run. The defaults are the default run."""

    name: str = "default"
    """Part of the run directory's name."""
    seed: int = 0
    strategy: str = "collapipe"
    """``collapipe``, a baseline (``vanilla-fl``, ``pipeline``, ``titanic``, ``splitlora``, ``splitfrozen``,
    ``fedlora``, ``flexlora``, ``local``), a class of ``flwr.serverapp.strategy`` or
    ``module:Class``."""
    strategy_options: str = ""
    """Arguments of the strategy's constructor, a JSON object; empty: none."""
    policy: str = "dssda"
    """Policy of ``collapipe``: ``dssda``, ``dssda-paper``, ``random``, ``loss-only``, ``delay-only``,
    ``uniform``, ``fixed``, one of the middle three with ``+optimal`` behind it, or ``module:Class``.
    A plan file in ``plan`` takes its place."""
    plan: str = ""
    """A plan file, ``collapipe-plan/1``; empty: the policy plans."""
    scenario: str = "default"
    """The network: a name in ``configs/scenarios``, or a file."""
    scenario_seed: int = -1
    """Instead of the scenario's own: other devices and rounds from the same ranges; -1: its own."""
    costs: str = "scenario"
    """Costs of TEBs and uploads for the planner: as the ``scenario`` says, counted from the ``model``, or as
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
    own, and the copies are averaged. ``auto``: ``step``."""
    evaluate_every: int = 12
    """Rounds between evaluations; 0: only after the last round."""
    checkpoint_every: int = 1
    """Rounds between checkpoints, from which a run can be resumed; 0: none."""
    resume: bool = False
    """Go on with the run in ``run-dir``; ``collapipe run --resume`` sets it."""
    tensorboard: bool = False
    """Write scalars to TensorBoard files in the run directory."""
    report_to: str = ""
    """Trackers that receive the scalars: some of ``tensorboard``, ``mlflow`` and ``wandb``, with commas."""
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
    split: SplitConfig = field(default_factory=SplitConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot run, and derive the length of the learning-rate schedule."""
        check_least("", self, seed=0, num_rounds=1, num_clusters=0, local_steps=1, batch_size=1)
        check_least("", self, gradient_accumulation=1, evaluate_every=0, checkpoint_every=0, scenario_seed=-1)
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
        check_task_data(self.task.name, self.data)
        if self.selection.patience and not self.evaluate_every:
            raise ValueError(
                f"selection.patience: {self.selection.patience} evaluations, but evaluate-every = 0 evaluates only "
                "after the last round; set evaluate-every"
            )
        object.__setattr__(self, "optimizer", replace(self.optimizer, total_steps=self.num_rounds * self.local_steps))

    @property
    def sync(self) -> str:
        """Mode of the decoder's training: ``step`` or ``round``."""
        return "step" if self.decoder_sync == "auto" else self.decoder_sync

    @property
    def recomputes(self) -> bool:
        """True if devices compute activations again."""
        setting = self.runtime.recompute
        return setting == "always" or (setting == "auto" and self.model.trainable == "lora")

    def check_strategy(self) -> None:
        """Refuse what does not go with the strategy and the aggregation rule, as their classes declare."""
        if self.labels_stay and self.strategy != COLLAPIPE:
            raise ValueError(
                f"split.labels: {self.split.labels} needs strategy = {COLLAPIPE}, found {self.strategy!r}, "
                + (
                    "whose server computes the loss"
                    if self._declared.decoder_on_server
                    else "with which no label leaves"
                )
                + "; leave one of them out"
            )
        if self.compression.update != "none" and not self.traits.uploads:
            raise ValueError(
                f"compression.update: strategy = {self.strategy} uploads nothing that could be compressed, found "
                f"{self.compression.update!r}; leave it none"
            )
        if self.compression.stream and not self.traits.decoder_on_server:
            raise ValueError(
                f"compression.stream: no activation leaves its cluster with strategy = {self.strategy} and "
                f"split.labels = {self.split.labels}, found {self.compression.stream!r}; leave it empty"
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
                update=self.compression.update,
                clip_norm=self.optimizer.clip_norm,
                returns_states=self.returns_states,
            )

    @property
    def _declared(self) -> Traits:
        try:
            return _traits_by_name(self.strategy)
        except ValueError:
            return Traits()

    @property
    def traits(self) -> Traits:
        """Traits that the strategy declares; the defaults for an unknown one, which is refused where it is built."""
        traits = self._declared
        keeps_nothing = self.labels_stay and not self.returns_states
        return replace(traits, decoder_on_server=False) if keeps_nothing else traits

    @property
    def labels_stay(self) -> bool:
        """True if no label leaves its cluster by the configuration."""
        return self.split.labels == CLUSTER

    @property
    def returns_states(self) -> bool:
        """True if the server keeps blocks of a model whose labels stay, and returns their states."""
        return self.labels_stay and self.task.name in ("causal-lm", "instruction")

    def forward_only(self, num_blocks: int) -> bool:
        """Return whether clusters run forward alone: none of their ``num_blocks`` TEBs is trained, nor anything below.

        Times that are measured are of both passes.
        """
        frozen = self.model.trainable == "lora" and self.lora.first_block >= num_blocks
        return frozen and self.traits.decoder_on_server and not self.labels_stay and self.costs != "measured"

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Return a model's specification with the run's adapters, if it trains any."""
        if self.model.trainable != "lora":
            return spec
        return replace(spec, lora=self.lora, base_dtype=self.model.base_dtype)

    def strategy_arguments(self) -> dict[str, Any]:
        """Return ``strategy-options`` as a dictionary."""
        try:
            options = json_value(self.strategy_options or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise ValueError(
                f'strategy-options: expected a JSON object such as {{"eta": 0.1}}, found {self.strategy_options!r:.80}'
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
        """Build it as :meth:`from_flat`, without importing the classes that the server alone needs."""
        kinds = key_types()
        tables: dict[str, dict[str, Any]] = {"": {}}
        defaults = cls()
        for key, value in without_other_names(without_removed_keys(flat), defaults.to_flat()).items():
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


_traits_by_name = cache(traits_by_name)


@cache
def key_types() -> Mapping[str, type]:
    """Return every known key, in declaration order, and the type of its value."""

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
    if key == "runtime.recompute":
        # It was true or false before release 0.2.0.
        value = {"true": "always", "false": "never"}.get(str(value).lower(), value)
    value_type = type(value)
    if kind is float and value_type is int and abs(value) < 2**1023:
        return float(value)
    if value_type is not kind:
        raise ValueError(
            f"{key}: expected {_KINDS[kind]}, found {_KINDS.get(value_type, value_type.__name__)}: {value!r:.80}"
        )
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{key}: expected a finite number, found {value}")
    if kind is int and not -(2**63) <= value < 2**63:
        # Flower sends whole numbers in 64 bits.
        raise ValueError(f"{key}: expected a whole number from -2^63 to 2^63 - 1, found {value!r:.80}")
    return cast(Scalar, value)


def _kebab(name: str) -> str:
    # A field whose key is a word of Python has an underscore at its end.
    return name.rstrip("_").replace("_", "-")


def _field(key: str) -> str:
    return f"{key}_" if keyword.iskeyword(key) else key.replace("-", "_")
