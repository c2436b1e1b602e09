"""Configuration file for a user's text, each key with the reason for its value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from client_pipeline import durable
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import expanded_path, load_config
from flower_app.first_config.guess import Guess, guess_task
from flower_app.first_config.held_out import put_back, set_aside
from flower_app.first_config.own_text import OwnText, read_own_text
from flower_app.first_config.recipe import Setting, recipe
from flower_app.launch.preflight import check_run
from flower_app.tasks.base import TaskConfig, task as make_task
from flower_app.tasks.instruction import InstructionTask

_SHOWN = 12
"""Labels that a line of comment shows."""
_MOST_LISTED = 200


@dataclass(frozen=True, kw_only=True)
class FirstConfigRequest:
    """Options of ``collapipe init``."""

    sources: Sequence[str]
    """A file, two parallel files, a folder, or a hub id."""
    validation: Sequence[str] = ()
    test: Sequence[str] = ()
    task: str = ""
    """Empty: guessed."""
    text_column: str = ""
    label_column: str = ""
    pair_column: str = ""
    """Column of second texts; empty: guessed, unless ``text_column`` is named."""
    scenario: str = "two-clusters"
    pretrained: str = ""
    out: Path = Path("collapipe.toml")


@dataclass(frozen=True, kw_only=True)
class FirstConfig:
    """Result of ``collapipe init``."""

    file: Path
    guess: Guess
    notes: list[str]
    """Guesses with their reasons, a line each."""


def make_first_config(request: FirstConfigRequest, say: Callable[[str], None]) -> FirstConfig:
    """Read a user's text, guess its task, write the configuration and check it.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the file or option, what was found and what was expected; nothing is written then.
    """
    out = expanded_path("--out", request.out).absolute()
    if out.exists():
        raise ValueError(f"--out: {out} is there already; remove it, or name another file")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out: no folder {out.parent}; make it, or name another file")
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", out.stem).lstrip(".") or "mine"
    text = read_own_text(request.sources, request.validation, request.test)
    guess = guess_task(
        text, request.task, request.text_column, request.label_column, request.pair_column, request.pretrained
    )
    settings = recipe(guess, request.scenario, request.pretrained)
    notes = [f"task: {guess.task} ({guess.because})", *text.notes]
    if guess.left_over:
        notes.append(
            f"not used: {', '.join(guess.left_over)}; --text-column, --label-column and --pair-column choose others"
        )
    text, unlabelled = _labelled(request, text, guess)
    notes += unlabelled
    files = text.files
    task = [Setting(key="task.name", value=guess.task, because=guess.because)]
    folder = out.with_name(f"{out.stem}-data")
    is_set_aside = text.kind != "hub" and not files.keys() - {"train"}
    if is_set_aside:
        # Mistakes are reported at their place in the file that the user named.
        named_data = _data(text, guess, {"train": files["train"], "validation": files["train"]}, None)
        scenario = Setting(key="scenario", value=request.scenario, because="as named")
        check_run(RunConfig.from_flat({each.key: each.value for each in [scenario, *settings, *task, *named_data]}))
        files = set_aside(text, folder)
        notes.append(f"validation: no file of its own was found, so one in ten examples was set aside in {folder}")
    if "validation" in (text.hub_splits if text.kind == "hub" else files):
        # The first score of the task beside its loss, on validation data of their own.
        score = next(score for score in make_task(TaskConfig(name=guess.task)).scores if score != "loss")
        best = "model/ is the best of the evaluated models, not the last; predict and evaluate use it"
        settings += [
            Setting(key="selection.metric", value=score, because="the score of this task, on the validation data"),
            Setting(key="selection.load-best-at-end", value=True, because=best),
        ]
    data = _data(text, guess, files, out.parent)
    notes += [f"{setting.key} = {json.dumps(setting.value, ensure_ascii=False)}: {setting.because}" for setting in data]
    head = [
        Setting(key="name", value=name, because="part of the run directory's name"),
        Setting(key="scenario", value=request.scenario, because="the network: collapipe plan --scenario draws it"),
    ]
    try:
        durable.write_text(out, _toml(request, guess, [*head, *settings, *task, *data]), lasting=False)
        config = load_config(str(out))
        num_clusters = check_run(config)
        # As the server does before its first round: a tokenizer is trained, or a model's files are opened.
        chosen = make_task(config.task)
        prepared = chosen.prepare(config.data, config.model, config.seed, num_clusters)
        if isinstance(chosen, InstructionTask):
            example = chosen.example(config.data, prepared.tokenizer_json)
            notes.append(f"an example as the model sees it, with what counts between ⟦ and ⟧:\n{example}")
    except BaseException:
        # An interrupted user starts again, too.
        out.unlink(missing_ok=True)
        if is_set_aside:
            put_back(files, folder)
        raise
    notes += [
        f"{setting.key} = {json.dumps(setting.value)}: {setting.because}"
        for setting in settings
        if setting.key
        in ("num-rounds", "model.family", "model.encoder-layers", "optimizer.lr", "selection.metric", "model.new-head")
    ]
    for note in notes:
        say(note)
    return FirstConfig(file=out, guess=guess, notes=notes)


def _labelled(request: FirstConfigRequest, text: OwnText, guess: Guess) -> tuple[OwnText, list[str]]:
    """Leave out splits without labels; returns the text without them, and a line for each."""
    notes = []
    for split in guess.unlabelled:
        name = text.hub_splits.get(split) or ", ".join(path.name for path in text.files.get(split, ()))
        lack = f"{name} has no labels in a column {guess.labels}"
        if {"validation": request.validation, "test": request.test}[split]:
            raise ValueError(f"--{split}: {lack}; name a file that has them")
        notes.append(f"{split}: {lack}, so it is left out; collapipe predict --file labels it")
    hub_splits = {split: name for split, name in text.hub_splits.items() if split not in guess.unlabelled}
    if text.kind == "hub" and not hub_splits.keys() - {"train"}:
        raise ValueError(
            f"{text.hub_id}: expected a split validation or test with labels in the column {guess.labels}, found none"
        )
    if guess.unlabelled and text.kind == "hub":
        # The default names would find the splits that are left out.
        scored = hub_splits.get("validation") or hub_splits["test"]
        hub_splits = {"validation": scored, "test": scored} | hub_splits
    files = {split: paths for split, paths in text.files.items() if split not in guess.unlabelled}
    return replace(text, files=files, hub_splits=hub_splits), notes


def _data(text: OwnText, guess: Guess, files: dict[str, tuple[Path, ...]], folder: Path | None) -> list[Setting]:
    settings = []
    if text.kind == "hub":
        settings += [
            Setting(key="data.source", value="hub", because="no such file or folder of text is here"),
            Setting(key="data.hub-id", value=text.hub_id, because="as you named it"),
        ]
        settings += [
            Setting(key=f"data.{split}-split", value=name, because="its name in the dataset")
            for split, name in text.hub_splits.items()
        ]
    else:
        root = Path(os.path.commonpath([path.parent for paths in files.values() for path in paths]))
        shown = os.path.relpath(root, folder) if folder and root.is_relative_to(folder) else str(root)
        settings += [
            Setting(key="data.source", value="files", because="your own"),
            Setting(key="data.path", value=shown, because="folder of the files, seen from here"),
        ]
        purposes = {"train": "what is learned from", "validation": "scored after rounds", "test": "scored at the end"}
        for split, paths in files.items():
            reasons = (purposes[split], "line i translates line i")
            for side, path, reason in zip(("source", "target"), paths, reasons, strict=False):
                relative = path.relative_to(root).as_posix()
                settings.append(Setting(key=f"data.{split}-{side}", value=relative, because=reason))
    if text.kind in ("table", "hub"):
        settings.append(Setting(key="data.source-column", value=guess.inputs, because="the texts"))
        if guess.pair:
            purpose = "the second text of each pair" if guess.task != "instruction" else "what each question is about"
            settings.append(Setting(key="data.pair-column", value=guess.pair, because=purpose))
        if guess.labels:
            key = "data.target-column" if guess.task in ("translation", "instruction") else "data.label-column"
            settings.append(Setting(key=key, value=guess.labels, because=guess.because))
    if guess.names and len(guess.names) <= _MOST_LISTED and not any("," in name for name in guess.names):
        named = [f"{name} ({count})" for name, count in zip(guess.names, guess.counts, strict=False)]
        shown = ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")
        reason = f"with their examples: {shown}" if named else "the types of the tags"
        settings.append(Setting(key="data.labels", value=",".join(guess.names), because=reason))
    return settings


def _toml(request: FirstConfigRequest, guess: Guess, settings: Sequence[Setting]) -> str:
    sources = " ".join(request.sources)
    lines = [
        f"# Written by collapipe init {sources}: each value is a guess, with its reason. Change what you know better.",
        "#",
        f"#     collapipe run --config {request.out.name}",
        '#     collapipe predict latest "a text of yours"',
        "#",
        f"# {guess.num_examples} examples to train on; {_share(guess)} at most {guess.tokens} tokens.",
    ]
    table = ""
    for setting in sorted(settings, key=lambda setting: setting.key.rpartition(".")[0]):
        owner, _, key = setting.key.rpartition(".")
        if owner != table:
            lines += ["", f"[{owner}]"]
            table = owner
        reason = " ".join(setting.because.split())
        lines.append(f"{key} = {_value(setting.value)} # {reason}")
    return "\n".join(lines) + "\n"


def _share(guess: Guess) -> str:
    return "all have" if guess.task == "instruction" else "99 of 100 have"


def _value(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
