"""The TOML files of ``configs/paper``: one folder an experiment, one file a curve.

``label``, ``seeds`` (1) and three tables: ``[run]`` is a run configuration, ``[figure]`` what the figure varies, and
``[smoke]`` what a quick check changes of all these. ``base`` names another such file, seen from this one, over
which all this goes: what the curves of a figure share.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from client_pipeline.documents import toml_table
from experiments.base.experiment import Curve
from flower_app.config.sources import config_of

_KEYS = {"base": str, "label": str, "seeds": int, "run": dict, "figure": dict, "smoke": dict}


def load_curves(
    experiment: str, *, smoke: bool, folder: Path | None = None, sets: Sequence[str] = (), only: str = ""
) -> list[Curve]:
    """Read an experiment's curves, in the order of their names, which is that of the rows and of the figure, too.

    Parameters
    ----------
    experiment : its name, which is that of the folder
    smoke : whether ``[smoke]`` applies
    folder : that holds the folders; the packaged ``configs/paper`` if None
    sets : pairs ``key=value`` over every curve's ``[run]``
    only : curves whose name contains this; all if empty

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no such curve in it.
    ValueError
        Naming the file and key at fault.
    """
    root = Path(str(resources.files("configs"))) / "paper" if folder is None else folder
    files = sorted((root / experiment).glob("*.toml"), key=lambda file: file.stem)
    if not files:
        raise FileNotFoundError(f"{experiment}: no curves in {root / experiment}; expected one TOML for each curve")
    chosen = [file for file in files if only in file.stem]
    if not chosen:
        names = ", ".join(file.stem for file in files)
        raise FileNotFoundError(f"{experiment}: expected a part of one of the curves' names {names}; found {only!r}")
    return [_load(file, smoke, sets) for file in chosen]


def _load(file: Path, smoke: bool, sets: Sequence[str]) -> Curve:
    document = _document(file)
    changes = document.get("smoke", {})
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


def _document(file: Path, is_base: bool = False) -> dict[str, Any]:
    """A curve's file over its base."""
    try:
        document = toml_table(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected TOML, {error}") from error
    changes = document.get("smoke", {})
    for table, prefix in ((document, ""), (changes, "smoke.")):
        for key, value in table.items():
            kind = _KEYS.get(key)
            if kind is None or (prefix and key == "smoke"):
                raise ValueError(f"{file}: {prefix}{key}: unknown key; expected one of {', '.join(_KEYS)}")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{file}: {prefix}{key}: expected {kind.__name__}, found {value!r}")
    if not (base := document.get("base", "")):
        return document
    base_file = file.parent / base
    if not base_file.is_file() or base_file.resolve() == file.resolve():
        raise ValueError(f"{file}: base: expected another file such as ../base/translation.toml, found {base!r}")
    if is_base:
        raise ValueError(f"{file}: base: expected none in a file that is a base itself, found {base!r}")
    return _changed(_document(base_file, is_base=True), document)


def _changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A document with tables merged and values replaced."""
    merged = dict(document)
    for key, value in changes.items():
        merged[key] = _changed(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged
