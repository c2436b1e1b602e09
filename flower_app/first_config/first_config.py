"""A configuration file for somebody's own text, each key with the reason for its value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client_pipeline import durable
from flower_app.config.sources import expanded_path, load_config
from flower_app.first_config.guess import Guess, guess_task
from flower_app.first_config.held_out import set_aside
from flower_app.first_config.own_text import OwnText, read_own_text
from flower_app.first_config.recipe import Setting, recipe
from flower_app.launch.preflight import check_run

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
    scenario: str = "two-clusters"
    pretrained: str = ""
    out: Path = Path("collapipe.toml")


@dataclass(frozen=True, kw_only=True)
class FirstConfig:
    """What was written."""

    file: Path
    guess: Guess
    notes: list[str]
    """What was guessed, and why: a line each."""


def make_first_config(request: FirstConfigRequest, say: Callable[[str], None]) -> FirstConfig:
    """Read somebody's text, guess what it is for, write the configuration and check it.

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
    guess = guess_task(text, request.task, request.text_column, request.label_column)
    settings = recipe(guess, request.scenario, request.pretrained)
    notes = [f"task: {guess.task}, for there are {guess.because}"]
    files = text.files
    if text.kind != "hub" and not files.keys() - {"train"}:
        folder = out.with_name(f"{out.stem}-data")
        files = set_aside(text, folder)
        notes.append(f"validation: no file of its own was found, so one in ten examples was set aside in {folder}")
    data = _data(text, guess, files, out.parent)
    notes += [f"{setting.key} = {json.dumps(setting.value, ensure_ascii=False)}: {setting.because}" for setting in data]
    head = [
        Setting(key="name", value=name, because="part of the run directory's name"),
        Setting(key="scenario", value=request.scenario, because="the network: collapipe plan --scenario draws it"),
    ]
    task = [Setting(key="task.name", value=guess.task, because=guess.because)]
    durable.write_text(out, _toml(request, guess, [*head, *settings, *task, *data]), lasting=False)
    try:
        config = load_config(str(out))
        check_run(config)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"{out} was written, and does not run yet: {error}") from error
    notes += [
        f"{setting.key} = {json.dumps(setting.value)}: {setting.because}"
        for setting in settings
        if setting.key in ("num-rounds", "model.family", "model.encoder-layers", "optimizer.lr")
    ]
    for note in notes:
        say(note)
    return FirstConfig(file=out, guess=guess, notes=notes)


def _data(text: OwnText, guess: Guess, files: dict[str, tuple[Path, ...]], folder: Path) -> list[Setting]:
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
        shown = os.path.relpath(root, folder) if root.is_relative_to(folder) else str(root)
        settings += [
            Setting(key="data.source", value="files", because="your own"),
            Setting(key="data.path", value=shown, because="folder of the files, seen from here"),
        ]
        for split, paths in files.items():
            for side, path in zip(("source", "target"), paths, strict=False):
                relative = path.relative_to(root).as_posix()
                settings.append(Setting(key=f"data.{split}-{side}", value=relative, because=_purpose(split, side)))
    if text.kind in ("table", "hub"):
        settings.append(Setting(key="data.source-column", value=guess.inputs, because="the texts"))
        if guess.labels:
            key = "data.target-column" if guess.task == "translation" else "data.label-column"
            settings.append(Setting(key=key, value=guess.labels, because=guess.because))
    if guess.names and len(guess.names) <= _MOST_LISTED and not any("," in name for name in guess.names):
        settings.append(Setting(key="data.labels", value=",".join(guess.names), because=_label_text(guess)))
    return settings


def _purpose(split: str, side: str) -> str:
    purposes = {"train": "what is learned from", "validation": "scored after rounds", "test": "scored at the end"}
    return purposes[split] if side == "source" else "line i translates line i"


def _label_text(guess: Guess) -> str:
    if not guess.counts:
        return "the types of the tags"
    named = [f"{name} ({count})" for name, count in zip(guess.names, guess.counts, strict=True)]
    return "with their examples: " + ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")


def _toml(request: FirstConfigRequest, guess: Guess, settings: Sequence[Setting]) -> str:
    sources = " ".join(request.sources)
    lines = [
        f"# Written by collapipe init {sources}: each value is a guess, with its reason. Change what you know better.",
        "#",
        f"#     collapipe run --config {request.out.name}",
        '#     collapipe predict latest "a text of yours"',
        "#",
        f"# {guess.num_examples} examples to train on; 99 of 100 have at most {guess.tokens} tokens.",
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


def _value(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
