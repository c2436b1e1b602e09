"""Where a configuration comes from: ``--set`` over a TOML file over the defaults.

Flower takes either a file or pairs, and checks neither; so the command line merges them and passes on one file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from client_pipeline.near_names import did_you_mean
from flower_app.config.other_names import OTHER_NAMES, with_own_names
from flower_app.config.run_config import RunConfig, Scalar, key_types, unknown_key

_PATHS = (
    "plan",
    "runs-dir",
    "run-dir",
    "data.path",
    "decoder.tls-certificate",
    "decoder.tls-key",
    "decoder.tls-ca",
    "decoder.tls-crl",
)
"""Keys whose value is a path, there or not."""
_NAMES_OR_PATHS = ("data.tokenizer", "data.hub-id", "model.pretrained", "model.from")
"""Keys whose value is a path only if such a file or folder exists; ``scenario`` is one if it ends in ``.toml``."""
_TEXT_FILES = tuple(
    f"data.{split}-{side}" for split in ("train", "validation", "test") for side in ("source", "target")
)
"""Keys whose value is a file name within ``data.path``."""


Sets = Sequence[str] | Mapping[str, Any]
"""Pairs ``key=value`` as ``--set`` has them, or keys with values as Python has them, tables too."""


def load_config(config_file: str | None = None, sets: Sets = ()) -> RunConfig:
    """Merge the sources and check the result.

    Parameters
    ----------
    config_file : a TOML file, or the name of one in the packaged ``configs``
    sets : pairs ``key=value``, or a mapping; they win over the file

    Returns
    -------
    The configuration, with absolute paths: those of ``sets`` seen from the working directory, those of the file from
    its folder.

    Raises
    ------
    ValueError
        For a file that is no TOML, a pair without ``=``, and all that :meth:`RunConfig.from_flat` refuses.
    FileNotFoundError
        If there is no such configuration file.
    """
    flat_config: dict[str, Any] = {}
    folder = Path.cwd()
    if config_file is not None:
        path = find_config(config_file)
        folder = path.parent
        # Results belong to who runs, not to who wrote the configuration.
        in_file = read_config(path)
        flat_config |= _absolute(in_file, path.parent) | _absolute(_only(in_file, "runs-dir", "run-dir"), Path.cwd())
    in_sets = read_sets(sets)
    flat_config |= _absolute(in_sets, Path.cwd())
    flat_config |= _data_folder(flat_config, {key: Path.cwd() if key in in_sets else folder for key in _TEXT_FILES})
    flat_config.setdefault("runs-dir", str(Path.cwd() / RunConfig().runs_dir))
    flat_config |= _start(flat_config)
    return RunConfig.from_flat(flat_config)


def config_of(table: Mapping[str, Any], folder: Path, sets: Sequence[str] = ()) -> RunConfig:
    """Check a configuration that stands within another file.

    Parameters
    ----------
    table : its keys, nested or flat
    folder : that relative paths are seen from
    sets : pairs ``key=value``, which win

    Raises
    ------
    ValueError
        As :func:`load_config`.
    """
    in_sets = _absolute(read_sets(sets), Path.cwd())
    in_table = with_own_names(dict(_flatten(table, "")), str(folder))
    return RunConfig.from_flat(_absolute(in_table, folder) | in_sets)


def find_config(name: str) -> Path:
    """Find a configuration file by path, or by name in the packaged ``configs``."""
    path = expanded_path("--config", name)
    if path.is_file():
        return path.resolve()
    packaged = Path(str(resources.files("configs")))
    if path.name == name:
        candidate = packaged / f"{name.removesuffix('.toml')}.toml"
        if candidate.is_file():
            return candidate
    known = sorted(file.stem for file in packaged.glob("*.toml"))
    raise FileNotFoundError(
        f"--config: expected a TOML file or one of {', '.join(known)}; found no {name!r}{did_you_mean(name, known)}"
    )


def expanded_path(name: str, path: str | Path) -> Path:
    """Return a path that may begin with ``~`` or ``~user``.

    Parameters
    ----------
    name : of the key or option that it comes from
    path : as it is given

    Raises
    ------
    ValueError
        If there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}: no home directory is known for {path}; write the whole path") from error


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML file into flat keys."""
    try:
        with path.open("rb") as file:
            return with_own_names(dict(_flatten(tomllib.load(file), "")), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected TOML: {error}") from error


def given_keys(config_file: str | None, sets: Sets = ()) -> dict[str, Any]:
    """Return the keys that somebody has written, with their values, in a file or as ``sets``."""
    in_file = read_config(find_config(config_file)) if config_file is not None else {}
    return in_file | read_sets(sets)


def read_sets(sets: Sets) -> dict[str, Any]:
    """Read pairs ``key=value``, and whole tables as ``table=key=value, key=value``; or a mapping, nested or flat.

    >>> read_sets(["seed=3", "faults=device=0.1, stream=0.02"])
    {'seed': 3, 'faults.device': 0.1, 'faults.stream': 0.02}
    """
    if isinstance(sets, Mapping):
        return with_own_names(dict(_flatten(sets, "")), "the configuration")
    values: dict[str, Any] = {}
    for pair in sets:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if equals and name not in key_types() and any(key.startswith(f"{name}.") for key in key_types()):
            try:
                table = tomllib.loads(f"table = {text if text.startswith('{') else f'{{{text}}}'}")["table"]
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"--set {name}: expected key=value, key=value, found {text!r}: {error}") from error
            values |= dict(_flatten(table, f"{name}."))
        else:
            key, value = parse_set(pair)
            values[key] = value
    return with_own_names(values, "--set")


def parse_set(pair: str) -> tuple[str, Scalar]:
    """Read one ``key=value``: the value as TOML; as it stands where it is none, or where the key wants text.

    >>> parse_set("optimizer.lr=2e-3")
    ('optimizer.lr', 0.002)
    >>> parse_set("strategy=FedAvg")
    ('strategy', 'FedAvg')
    """
    key, equals, text = pair.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise ValueError(f"--set: expected key=value, found {pair!r}")
    own_name = OTHER_NAMES.get(key, key)
    if own_name not in key_types():
        raise ValueError(unknown_key(key))
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text
    if key_types()[own_name] is str and not isinstance(value, str):
        return key, text
    return key, value


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value) if isinstance(value, os.PathLike) else value


def _only(flat: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: flat[key] for key in keys if key in flat}


def _absolute(flat: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Make the paths among the values absolute, seen from ``base``."""
    result = dict(flat)
    for key in (*_PATHS, *_NAMES_OR_PATHS, "scenario"):
        value = result.get(key)
        if isinstance(value, str) and value:
            path = (base / expanded_path(key, value)).resolve()
            if key in _PATHS or (key in _NAMES_OR_PATHS and path.exists()) or value.endswith(".toml"):
                result[key] = str(path)
    for key in _TEXT_FILES:
        value = result.get(key)
        if isinstance(value, str) and value.startswith("~"):
            result[key] = str(expanded_path(key, value))
    return result


def _start(flat: Mapping[str, Any]) -> dict[str, str]:
    """Settle ``model.from`` where it is a run's name: ``latest`` is soon another one."""
    name, runs = flat.get("model.from"), flat.get("runs-dir")
    if not (isinstance(name, str) and name and isinstance(runs, str)) or not (Path(runs) / name).is_dir():
        return {}
    return {"model.from": str((Path(runs) / name).resolve())}


def _data_folder(flat: Mapping[str, Any], bases: Mapping[str, Path]) -> dict[str, str]:
    """Settle ``data.path`` where it is empty: the server app has a working directory of its own.

    Parameters
    ----------
    flat : all sources merged
    bases : file name's key -> folder that it is seen from

    Returns
    -------
    Keys to change: ``data.path`` is where the training text is; names from elsewhere become absolute.
    """
    if flat.get("data.source") != "files" or flat.get("data.path"):
        return {}
    folder = bases["data.train-source"]
    moved = {key: flat[key] for key, base in bases.items() if base != folder and isinstance(flat.get(key), str)}
    return {"data.path": str(folder)} | {key: str(bases[key] / name) for key, name in moved.items() if name}
