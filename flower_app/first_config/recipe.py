"""Sizes, learning rate and length of a first run: as the packaged recipes have them, on what a scenario can hold.

The figures are those of ``configs/trec6.toml`` (5,000 questions), ``toutiao.toml`` (28,000 titles),
``chinese-ner.toml`` and ``multi30k-tiny.toml``, which were tuned; between and beyond them they follow the number of
examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline.families.families import read_library_config
from client_pipeline.families.pretrained import trained_classes
from client_pipeline.partition.plan import whole_blocks
from client_pipeline.partition.spec import CLASSIFIERS
from client_pipeline.system.scenario import load_scenario
from flower_app.first_config.guess import Guess, vocab_size_of
from flower_app.tasks.chat_template import own_template
from flower_app.tasks.tokenizer import load_tokenizer
from flower_app.tasks.trained_labels import numbered, unnamed

_LOCAL_STEPS = 4
_ALIKE = 10_000
"""Examples from which the larger recipe is taken."""
_MOST_BLOCKS = 1000
"""Most blocks of a device."""
_SHORTER = "99 of 100 texts are shorter"
_EMBEDDED = 512
"""Most positions of a model that is made anew."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key with its value, and why it has that one."""

    key: str
    value: str | int | float | bool
    because: str


def recipe(guess: Guess, scenario: str, pretrained: str = "") -> list[Setting]:
    """Choose what a run of this text begins with.

    Raises
    ------
    ValueError
        If no cluster can hold a model, or the folder holds none.
    """
    network = load_scenario(scenario)
    clusters = network.num_clusters
    room = min(
        sum(whole_blocks(device.memory, network.block_memory, _MOST_BLOCKS) for device in devices)
        for devices in network.clusters
    )
    batch = 64 if guess.num_examples >= 16 * 64 * clusters else 16
    is_chat = guess.task == "instruction"
    if guess.task == "token-classification":
        batch = 32
    elif is_chat and pretrained:
        batch = 8
    passes = _passes(guess, bool(pretrained))
    rounds = max(10, 10 * math.ceil(passes * guess.num_examples / (_LOCAL_STEPS * clusters * batch) / 10))
    steps = rounds * _LOCAL_STEPS
    most = _positions(pretrained) if is_chat and pretrained else _EMBEDDED
    length = min(most, max(16, 8 * math.ceil(guess.tokens / 8)))
    trained = f"{passes:.0f} passes over {guess.num_examples} examples, as the packaged recipes have for so many"
    settings = [
        Setting(key="num-rounds", value=rounds, because=trained),
        Setting(key="local-steps", value=_LOCAL_STEPS, because="optimizer steps of each cluster in a round"),
        Setting(key="batch-size", value=batch, because="examples of each cluster and step"),
        Setting(key="evaluate-every", value=max(1, rounds // 4), because="four scores on the way"),
        Setting(
            key="data.max-length",
            value=length,
            because="tokens; " + (f"the longest conversation has {guess.tokens}" if is_chat else _SHORTER),
        ),
    ]
    if is_chat and pretrained and not own_template(load_tokenizer(pretrained, "--pretrained", complete=False)):
        settings.append(Setting(key="task.chat-template", value="chatml", because="the tokenizer has none of its own"))
    if pretrained:
        return (
            settings + _pretrained(guess.task, pretrained, room, scenario, steps, length) + _new_head(guess, pretrained)
        )
    return settings + _fresh(guess, room, steps, length)


def _passes(guess: Guess, pretrained: bool) -> float:
    """Return the epochs: 6 for 5,000 examples, 2.5 for 28,000, fewer for more."""
    if pretrained:
        return 3.0
    if guess.task == "translation":
        return min(20.0, max(4.0, 9 * math.sqrt(29_000 / guess.num_examples)))
    if guess.task.endswith("-lm") or guess.task == "instruction":
        return min(20.0, max(3.0, 6 * math.sqrt(5_000 / guess.num_examples)))
    return min(30.0, max(2.0, 6 * math.sqrt(5_000 / guess.num_examples)))


def _fresh(guess: Guess, room: int, steps: int, length: int) -> list[Setting]:
    many = guess.num_examples >= _ALIKE
    family, layers, rate, feed_forward, dropout, warm = {
        "sequence-classification": ("modernbert", 2, 2e-3, 192, 0.2, 12) if many else ("bert", 2, 1e-3, 256, 0.3, 8),
        "token-classification": ("modernbert", 2, 3e-3, 192, 0.2, 12),
        "translation": ("transformer", 4, 2e-3, 512, 0.1, 2),
        "masked-lm": ("bert", 2, 1e-3, 256, 0.1, 8),
        "causal-lm": ("gpt2", 2, 1e-3, 512, 0.1, 8),
        "instruction": ("gpt2", 2, 1e-3, 512, 0.1, 8),
    }[guess.task]
    held = min(layers, room)
    if held < 1:
        raise ValueError(
            "--scenario: no device of a cluster holds a TEB; expected one with memory for it, name another"
        )
    size = "a small model from scratch" if held == layers else f"all that the devices hold, {room} TEBs a cluster"
    case = "fewer words to learn" if guess.lowercase else "case tells words apart"
    if guess.told_apart:
        case = f"case tells classes apart, as in {guess.told_apart}"
    settings = [
        Setting(key="model.family", value=family, because="trains from scratch on so much text"),
        Setting(key="model.width", value=128, because=size),
        Setting(key="model.num-heads", value=4, because="32 numbers a head"),
        Setting(key="model.feed-forward", value=feed_forward, because="inner width"),
        Setting(key="model.encoder-layers", value=held, because=f"TEBs; the devices of a cluster hold {room}"),
        Setting(key="model.max-length", value=max(length, 16), because="as data.max-length"),
        Setting(key="model.dropout", value=dropout, because="less with more text"),
        Setting(key="data.lowercase", value=guess.lowercase, because=case),
        Setting(key="data.vocab-size", value=vocab_size_of(guess.task), because="at most"),
    ]
    if guess.task in ("translation", "causal-lm", "instruction"):
        layers_after = 4 if guess.task == "translation" else 1
        settings.append(Setting(key="model.decoder-layers", value=layers_after, because="the server's part"))
    schedule = "inverse-sqrt" if guess.task == "translation" else "cosine"
    return settings + _optimizer(rate, max(1, steps // warm), schedule, "as the recipe of the same kind of text")


def _model_config(folder: str) -> Any:
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ValueError(
            f"--pretrained: expected a folder with a config.json, found none in {folder}; save a model there"
        )
    try:
        return read_library_config(str(Path(folder).expanduser()))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"--pretrained: {error}") from error


def _positions(folder: str) -> int:
    return getattr(_model_config(folder), "max_position_embeddings", None) or _EMBEDDED


def _new_head(guess: Guess, folder: str) -> list[Setting]:
    """Choose a new head where the classes of the model's own have no names, and the labels are not their numbers."""
    try:
        classes = trained_classes(str(Path(folder).expanduser()), guess.task) if guess.task in CLASSIFIERS else ()
    except ValueError as error:
        raise ValueError(f"--pretrained: {error}") from error
    if not unnamed(classes) or {*guess.names} <= {*classes} or numbered(classes, guess.names):
        return []
    because = "the classes of the model's head have no names; false, with data.labels in their order, keeps them"
    return [Setting(key="model.new-head", value=True, because=because)]


def _pretrained(task: str, folder: str, room: int, scenario: str, steps: int, length: int) -> list[Setting]:
    file, config = Path(folder).expanduser() / "config.json", _model_config(folder)
    layers = config.num_hidden_layers
    is_chat = task == "instruction"
    # The costs of a model's own TEBs decide otherwise.
    if layers > room and not is_chat:
        raise ValueError(
            f"--scenario: {scenario} has room for {room} TEBs in a cluster, the model of {folder} has {layers}; name a "
            "scenario with more memory or devices"
        )
    small = config.hidden_size <= 512
    family = config.model_type
    positions = _positions(folder)
    settings = [
        Setting(key="model.family", value=family, because=f"what {file} says"),
        Setting(key="model.pretrained", value=str(Path(folder).expanduser().absolute()), because="with its tokenizer"),
        Setting(key="model.max-length", value=max(length, min(positions, _EMBEDDED)), because="its positions"),
    ]
    if is_chat:
        settings += [
            Setting(key="costs", value="model", because="the scenario's devices, and the memory of this model's TEBs"),
            Setting(key="model.decoder-layers", value=1, because="the server's part"),
            Setting(key="model.trainable", value="lora", because="adapters alone are trained, and sent"),
            Setting(key="lora.rank", value=8, because="width of the adapters"),
            Setting(key="lora.targets", value="all-linear", because="all matrices of the TEBs"),
            Setting(key="lora.head", value="adapters", because="the server's part learns by adapters, too"),
        ]
        return settings + _optimizer(1e-3 if small else 5e-4, max(1, steps // 10), "linear", "usual for adapters")
    rate = 1e-4 if small else 5e-5
    return settings + _optimizer(rate, max(1, steps // 10), "linear", "usual for a model that is tuned on")


def _optimizer(rate: float, warm_up: int, schedule: str, because: str) -> list[Setting]:
    return [
        Setting(key="optimizer.name", value="adamw", because=because),
        Setting(key="optimizer.lr", value=rate, because=because),
        Setting(key="optimizer.warmup-steps", value=warm_up, because="steps, a share of all"),
        Setting(key="optimizer.schedule", value=schedule, because=because),
        Setting(key="optimizer.weight-decay", value=0.01, because=because),
        Setting(key="optimizer.clip-norm", value=1.0, because="longer gradients are cut"),
    ]
