"""The run's configuration: read once, at the door, into frozen dataclasses.

Flower hands over flat, unchecked scalars (``{"optimizer.lr": 0.001, ...}``); :meth:`RunConfig.from_flat` checks them.
Each table is a dataclass that lives beside the code that it configures.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast, get_type_hints

from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.optimizer import OptimizerConfig
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.corpus import DataConfig
from strategies.decoder_service import DecoderConfig

Scalar = bool | int | float | str

DECODER_SYNCS = ("auto", "step", "round")
NORMS = ("pre", "post")
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
    """Name of the adapter: see :func:`client_pipeline.partition.families.families`."""
    width: int = 64
    """D."""
    num_heads: int = 4
    feed_forward: int = 256
    """Inner width of the feed-forward layers."""
    encoder_layers: int = 4
    """L, the TEBs."""
    decoder_layers: int = 2
    dropout: float = 0.0
    norm: str = "pre"
    """Of the classic Transformer: ``pre`` or ``post``."""
    label_smoothing: float = 0.0
    max_length: int = 256
    """Longest sequence that the model has positions for."""
    pretrained: str = ""
    """Folder or hub id of pretrained weights; empty: fresh weights."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        for name in ("width", "num_heads", "feed_forward", "encoder_layers", "decoder_layers", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{_kebab(name)}: expected at least 1, found {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width: {self.width} is not a multiple of model.num-heads = {self.num_heads}; change one of them"
            )
        if self.norm not in NORMS:
            raise ValueError(f"model.norm: expected pre or post, found {self.norm!r}")
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
    """``collapipe``, or the name of a class of ``flwr.serverapp.strategy``."""
    strategy_options: str = ""
    """Arguments of the strategy's constructor, a JSON object; empty: none."""
    policy: str = "uniform"
    """Who chooses the plan; a plan file in ``plan`` takes its place."""
    plan: str = ""
    """A plan file, ``collapipe-plan/1``; empty: the policy plans."""
    scenario: str = "default"
    """The network: a name in ``configs/scenarios``, or a file."""
    num_rounds: int = 60
    num_clusters: int = 0
    """Nodes to wait for; 0: those that are there, at most the scenario's."""
    local_steps: int = 4
    """Optimizer steps of a cluster per round."""
    batch_size: int = 32
    """b, examples per control unit and step."""
    decoder_sync: str = "auto"
    """When the decoder joins what the clusters teach it: ``step``, ``round`` or ``auto``."""
    evaluate_every: int = 12
    """Rounds between evaluations; 0: only after the last round."""
    runs_dir: str = "runs"
    """Folder of the run directories."""
    run_dir: str = ""
    """This run's directory; empty: a new one in ``runs-dir``."""
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(vocab_size=1000))
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=5e-3, schedule="cosine", warmup_steps=40)
    )
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot run, and derive the length of the learning-rate schedule."""
        for name, least in (
            ("seed", 0),
            ("num_rounds", 1),
            ("num_clusters", 0),
            ("local_steps", 1),
            ("batch_size", 1),
            ("evaluate_every", 0),
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
        self.strategy_arguments()
        if self.data.max_length > self.model.max_length:
            raise ValueError(
                f"data.max-length: {self.data.max_length} exceeds model.max-length = {self.model.max_length}; "
                "lower the first or raise the second"
            )
        total = self.num_rounds * self.local_steps
        object.__setattr__(self, "optimizer", replace(self.optimizer, total_steps=total))

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
            For an unknown key (the nearest known one is named), a value of another type, or one out of range.
        """
        kinds = key_types()
        tables: dict[str, dict[str, Any]] = {"": {}}
        for key, value in flat.items():
            if key not in kinds:
                raise ValueError(unknown_key(key))
            table, _, name = key.rpartition(".")
            tables.setdefault(table, {})[name.replace("-", "_")] = _checked(key, value, kinds[key])
        arguments, defaults = tables.pop(""), cls()
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
    found = type(value)
    if kind is float and found is int:
        return float(value)
    if found is not kind:
        raise ValueError(f"{key}: expected {_KINDS[kind]}, found {_KINDS.get(found, found.__name__)}: {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{key}: expected a finite number, found {value}")
    return cast(Scalar, value)


def _kebab(name: str) -> str:
    return name.replace("_", "-")
