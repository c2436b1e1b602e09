"""The TOML files of ``configs/paper``: one folder an experiment, one file a curve.

``label``, ``seeds`` (1) and three tables: ``[run]`` is a run configuration, ``[figure]`` what the figure varies, and
``[smoke]`` what a quick check changes of all these.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flower_app.config_sources import config_of
from flower_app.experiments.experiment import Curve

_KEYS = {"label": str, "seeds": int, "run": dict, "figure": dict, "smoke": dict}


def load_curves(experiment: str, *, smoke: bool, folder: Path | None = None, sets: Sequence[str] = ()) -> list[Curve]:
    """Read an experiment's curves, in the order of their file names.

    Parameters
    ----------
    experiment : its name, which is that of the folder
    smoke : whether ``[smoke]`` applies
    folder : that holds the folders; the packaged ``configs/paper`` if None
    sets : pairs ``key=value`` over every curve's ``[run]``

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no curve in it.
    ValueError
        Naming the file and key at fault.
    """
    root = Path(str(resources.files("configs"))) / "paper" if folder is None else folder
    files = sorted((root / experiment).glob("*.toml"))
    if not files:
        raise FileNotFoundError(f"{experiment}: no curves in {root / experiment}; expected one TOML for each curve")
    return [_load(file, smoke, sets) for file in files]


def _load(file: Path, smoke: bool, sets: Sequence[str]) -> Curve:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: expected TOML, {error}") from error
    changes = document.get("smoke", {})
    for table, where in ((document, ""), (changes, "smoke.")):
        for key, value in table.items():
            kind = _KEYS.get(key)
            if kind is None or (where and key == "smoke"):
                raise ValueError(f"{file}: {where}{key}: unknown key; expected one of {', '.join(_KEYS)}")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{file}: {where}{key}: expected {kind.__name__}, found {value!r}")
    if smoke:
        document = _changed(document, changes)
    seeds = document.get("seeds", 1)
    if seeds < 1:
        raise ValueError(f"{file}: seeds: expected at least 1, found {seeds}")
    try:
        config = config_of(document.get("run", {}), file.parent, sets)
    except ValueError as error:
        raise ValueError(f"{file}: [run] {error}") from error
    name = file.stem
    label = document.get("label", name)
    return Curve(name=name, label=label, config=config, seeds=seeds, figure=document.get("figure", {}))


def _changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A document with tables merged and values replaced."""
    merged = dict(document)
    for key, value in changes.items():
        merged[key] = _changed(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged
