"""``collapipe leakage --choose``: the setting of least cost under which no attack reads more than a given share.

Settings are where the model is cut, how its activations are sent, and with what noise. A half of the validation set is
the attacker's text, the other is read; the setting that is chosen is tried once more on the test set, which has chosen
nothing. The bound is one against these attacks, and no proof against others. Where labels stay in the clusters, their
gradients get the same noise, and what is read from these counts, too; where they are text, the server must not be sent
them. What updates tell is said beside the choice: no setting of activations hides it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table

from client_pipeline import durable
from client_pipeline.counted import counted
from client_pipeline.families.hugging_face import CLUSTER_TAIL, SERVER_LAYERS
from client_pipeline.families.registry import family_named, is_decoder_only
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, ModelSpec
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_first_round, make_planner, work_of
from flower_app.leakage.measurement import (
    ATTACKS,
    LeakageRequest,
    Observation,
    Say,
    attack,
    label_attack,
    observe,
    scored,
    update_attacks,
)
from flower_app.runs.run_directory import CONFIG, find_run
from flower_app.saved_model import SavedModel, load_model
from flower_app.tasks.base import task
from flower_app.training.network import training_scenario
from strategies.planning.costs import round_costs
from strategies.planning.planner import InfeasibleRound

RECORD = "leakage-choice.json"
NEAR_BEST = 1.02
"""Settings whose loss is at most so many times the least one's are as good: of these the fastest is taken."""


@dataclass(frozen=True)
class Setting:
    """A way to send activations."""

    cut: int
    """TEBs of a cluster."""
    codec: str
    """As ``compression.stream``."""
    noise: float
    """As ``privacy.activation-noise``."""


@dataclass(frozen=True)
class Trial:
    """A setting, and what it reveals and costs."""

    setting: Setting
    clip: float | None
    """As ``privacy.activation-clip``; None: none."""
    gradient_clip: float | None
    """As ``privacy.gradient-clip``; None: none, or labels do not stay."""
    read: dict[str, float]
    """Share of the tokens, and of the labels that stay, that each attack names with its first guess."""
    round_s: float
    """Virtual time of the first round [s]."""
    loss: float | None = None
    """Of the validation set; None where the bound is not met."""

    @property
    def worst(self) -> float:
        """Share that the strongest attack reads."""
        return max(self.read.values())


def choose_setting(
    run: str | Path,
    request: LeakageRequest,
    codecs: Sequence[str],
    max_readable: float = 0.0,
    say: Say = lambda text: None,
    allowed: Sequence[str] = (),
) -> dict[str, Any]:
    """Try settings on a run's model, write the choice to the run's directory, and return it.

    Parameters
    ----------
    run : with a model
    request : noise to try, from the least on, until the bound is met; tokens and seed
    codecs : as ``compression.stream``
    max_readable : largest share that an attack may read; 0: the run's ``privacy.max-readable``
    say : told of each setting
    allowed : modules from outside that the run's configuration may name

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no such run, it sends no activations, there is no bound, or no setting meets it.
    """
    from flower_app.config.sources import load_stored_config

    run_dir = find_run(str(run))
    config = load_stored_config(run_dir / CONFIG, (), allowed)
    bound = max_readable or config.privacy.max_readable
    if not 0 < bound < 1:
        raise ValueError(
            f"--max-readable: expected a share above 0 and below 1, found {bound:g}; give it, or set "
            "privacy.max-readable in the run's configuration"
        )
    model = load_model(run_dir, config.model.family)
    if not config.traits.decoder_on_server:
        raise ValueError(
            f"--choose: expected a run whose server is sent activations, found strategy = {config.strategy}, "
            f"split.labels = {config.split.labels}"
        )
    stay = bool(model.spec.config.get(CLUSTER_TAIL))
    if not stay and model.spec.head not in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        raise ValueError(
            f"--choose: the labels of task.name = {config.task.name} are text, and the server is sent all of it; set "
            "split.labels = cluster, train again, and choose for that run"
        )
    evaluator = task(config.task).evaluator(config.data, model.tokenizer_json)
    validation = observe(model, evaluator, "validation", request.most_tokens, with_labels=stay)
    auxiliary, read = validation.halves()

    @cache
    def labels_told(noise: float) -> tuple[float, float | None]:
        """Share of the validation set's labels that are read, and the clip."""
        found = label_attack(model, validation, noise, config, request.seed)
        return found["top1"], found["clip"]

    def tried(setting: Setting, seconds: float) -> Trial:
        codec = ActivationCodec(setting.codec)
        found = attack(model, auxiliary, read, setting.cut, setting.noise, config, request, codec)
        told, gradient_clip = labels_told(setting.noise) if stay else (0.0, None)
        shares = {name: found[name]["top1"] for name in ATTACKS} | ({"labels": told} if stay else {})
        return Trial(setting, found["clip"], gradient_clip, shares, seconds)

    trials: list[Trial] = []
    unplanned: dict[int, str] = {}
    for cut in _cuts(model.spec):
        for codec in codecs:
            try:
                seconds = _round_seconds(config, model, cut, codec)
            except (InfeasibleRound, ValueError) as error:
                unplanned[cut] = str(error)
                continue
            for noise in sorted(request.noise):
                trial = tried(Setting(cut, codec, noise), seconds)
                if trial.worst <= bound:
                    seen = (noise, trial.clip, request.seed)
                    metrics = scored(model, evaluator, *seen, cut=cut, codec=ActivationCodec(codec), split="validation")
                    trial = replace(trial, loss=metrics["loss"])
                trials.append(trial)
                say(f"{counted(cut, 'TEB')}, {codec}, noise {noise:g}: {100 * trial.worst:.1f} % read")
                if trial.loss is not None:
                    # More noise costs more, and protects where nothing is asked for.
                    break
    fitting = [trial for trial in trials if trial.loss is not None]
    if not fitting:
        least = min((trial.worst for trial in trials), default=1.0)
        reasons = "".join(f"; {counted(cut, 'TEB')}: {reason}" for cut, reason in unplanned.items())
        raise ValueError(
            f"--choose: no setting is read by less than {100 * bound:g} %, the best by {100 * least:.1f} %{reasons}; "
            "add larger values to --noise"
        )
    best = min(trial.loss for trial in fitting if trial.loss is not None)
    near = [trial for trial in fitting if trial.loss is not None and trial.loss <= NEAR_BEST * best]
    chosen = min(near, key=lambda trial: (trial.round_s, trial.loss))
    victims = observe(model, evaluator, "test", request.most_tokens, with_labels=stay)
    held_out = _on_other_text(model, chosen, validation, victims, config, request)
    choice = {
        "max_readable": bound,
        "attacks": list(chosen.read),
        "settings": _keys(model.spec, chosen),
        "chosen": asdict(chosen),
        "held_out": {"split": "test", "tokens": len(victims.tokens(0)), "read": held_out},
        "holds": max(held_out.values()) <= bound,
        "updates": update_attacks(model, config, victims),
        "trials": [asdict(trial) for trial in trials],
    }
    durable.write_text(run_dir / RECORD, json.dumps(choice, indent=1))
    return choice


def _on_other_text(
    model: SavedModel,
    chosen: Trial,
    auxiliary: Observation,
    victims: Observation,
    config: RunConfig,
    request: LeakageRequest,
) -> dict[str, float]:
    """Return what each attack reads of text that has chosen nothing, under the very setting that is written."""
    setting, asked = chosen.setting, replace(request, clip=chosen.clip or 0.0)
    codec = ActivationCodec(setting.codec)
    found = attack(model, auxiliary, victims, setting.cut, setting.noise, config, asked, codec)
    read = {name: found[name]["top1"] for name in ATTACKS}
    if victims.label_rows:
        clip = chosen.gradient_clip or 0.0
        read["labels"] = label_attack(model, victims, setting.noise, config, request.seed, clip)["top1"]
    return read


def _cuts(spec: ModelSpec) -> list[int]:
    """TEBs that a cluster may have: of a decoder-only model the server may take some of the run's."""
    num_blocks = family_named(spec.family).num_blocks(spec)
    return list(range(1, num_blocks + 1)) if is_decoder_only(spec.family) else [num_blocks]


def _server_layers(spec: ModelSpec, cut: int) -> int:
    return int(spec.config.get(SERVER_LAYERS, 0)) + family_named(spec.family).num_blocks(spec) - cut


def _round_seconds(config: RunConfig, model: SavedModel, cut: int, codec: str) -> float:
    """Virtual time of a first round of the run, cut and coded otherwise."""
    spec = model.spec
    if is_decoder_only(spec.family):
        spec = replace(spec, config=spec.config | {SERVER_LAYERS: _server_layers(spec, cut)})
    changed = replace(config, compression=replace(config.compression, stream=codec))
    scenario = training_scenario(changed, spec)
    scenario = scenario.first(config.num_clusters or scenario.num_clusters)
    planner = make_planner(changed, scenario)
    assert planner is not None, "a strategy whose server trains the decoder plans"
    return round_costs(check_first_round(planner).as_declared(), work_of(changed)).latency_s


def _keys(spec: ModelSpec, trial: Trial) -> dict[str, Any]:
    """Return the configuration's keys of a setting."""
    keys: dict[str, Any] = {"compression.stream": trial.setting.codec}
    if is_decoder_only(spec.family):
        keys["model.decoder-layers"] = _server_layers(spec, trial.setting.cut)
    if trial.clip is not None:
        keys |= {"privacy.activation-clip": trial.clip, "privacy.activation-noise": trial.setting.noise}
    if trial.gradient_clip is not None:
        keys |= {"privacy.gradient-clip": trial.gradient_clip, "privacy.gradient-noise": trial.setting.noise}
    return keys


def choice_table(choice: dict[str, Any]) -> Table:
    """Return the settings that were tried, and the one that was chosen, for people."""
    share = f"{100 * choice['max_readable']:g} %"
    table = Table(title=f"Settings, and tokens read; at most {share}", title_justify="left", caption_justify="left")
    for column in ("TEBs", "stream", "noise", *choice["attacks"], "round s", "loss"):
        table.add_column(column, justify="right")
    for trial in choice["trials"]:
        setting, read = trial["setting"], [f"{100 * value:.1f} %" for value in trial["read"].values()]
        loss = "" if trial["loss"] is None else f"{trial['loss']:.4g}"
        mark = " (chosen)" if trial == choice["chosen"] else ""
        table.add_row(
            str(setting["cut"]),
            setting["codec"],
            f"{setting['noise']:g}",
            *read,
            f"{trial['round_s']:.4g}",
            loss + mark,
        )
    held_out = max(choice["held_out"]["read"].values())
    keys = " ".join(
        f"--set {key}={value:.4g}" if isinstance(value, float) else f"--set {key}={value}"
        for key, value in choice["settings"].items()
    )
    table.caption = (
        f"{keys}. On the test set, which has chosen nothing, {100 * held_out:.1f} % are read: the bound "
        f"{'holds' if choice['holds'] else 'does not hold; lower --max-readable'}. It is one against these attacks"
        f"{_beside(choice['updates'])}."
    )
    return table


def _beside(updates: Sequence[Mapping[str, Any]]) -> str:
    """Say what the updates tell, whatever the setting."""
    texts = [f"{100 * each['read']:.0f} % with {counted(each['examples'], 'example')}" for each in updates]
    beside = "; no setting of activations hides what the update of one step of SGD names of its batch's tokens, "
    return f"{beside}{', '.join(texts)}: privacy.update-noise does" if texts else ""
