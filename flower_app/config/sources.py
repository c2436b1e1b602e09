"""Sources of a configuration: ``--set`` over a TOML file over the defaults.

Flower takes either a file or pairs, and checks neither; so the command line merges them and passes on one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from client_pipeline.documents import toml_table
from client_pipeline.near_names import did_you_mean
from client_pipeline.plugins import is_within
from flower_app.config.other_names import OTHER_NAMES, with_own_names
from flower_app.config.removed import REMOVED_KEYS, without_kept_keys
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
_NAMES_OR_PATHS = ("data.tokenizer", "data.hub-id", "model.pretrained", "model.from", "task.chat-template")
"""Keys whose value is a path only if such a file or folder exists; ``scenario`` is one if it ends in ``.toml``."""
_TEXT_FILES = tuple(
    f"data.{split}-{side}" for split in ("train", "validation", "test") for side in ("source", "target")
)
"""Keys whose value is a file name within ``data.path``."""
_CLASSES = ("strategy", "policy", "task.name", "task.evaluate-generate", "model.family", "aggregator.name")
"""Keys whose value may be ``module:name``, or several such with commas between."""


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
    if config_file is None:
        return merged_config({}, Path.cwd(), sets)
    path = find_config(config_file)
    return merged_config(read_config(path), path.parent, sets)


def merged_config(in_file: Mapping[str, Any], folder: Path, sets: Sets) -> RunConfig:
    """Merge the flat keys of a file in a folder with ``sets``, and check the result; see :func:`load_config`."""
    # Results belong to who runs, not to who wrote the configuration.
    places = {key: in_file[key] for key in ("runs-dir", "run-dir") if key in in_file}
    flat_config = absolute(in_file, folder) | absolute(places, Path.cwd())
    in_sets = read_sets(sets)
    flat_config |= absolute(in_sets, Path.cwd())
    if flat_config.get("data.source") == "files" and not flat_config.get("data.path"):
        # The server app has a working directory of its own: the path is where the training text is.
        bases = {key: Path.cwd() if key in in_sets else folder for key in _TEXT_FILES}
        flat_config["data.path"] = str(bases["data.train-source"])
        for key, base in bases.items():
            name = flat_config.get(key)
            if base != bases["data.train-source"] and isinstance(name, str) and name:
                flat_config[key] = str(base / name)
    flat_config.setdefault("runs-dir", str(Path.cwd() / RunConfig().runs_dir))
    # A run's name, such as ``latest``, is soon another one's.
    start, runs = flat_config.get("model.from"), flat_config["runs-dir"]
    if isinstance(start, str) and start and isinstance(runs, str) and (Path(runs) / start).is_dir():
        flat_config["model.from"] = str((Path(runs) / start).resolve())
    return RunConfig.from_flat(flat_config)


def load_stored_config(config_file: Path, sets: Sets = (), allowed: Iterable[str] = ()) -> RunConfig:
    """Load the configuration of a run directory, which may be from anybody, or of an earlier release.

    Parameters
    ----------
    config_file : the run directory's
    sets : as for :func:`load_config`; classes that these name are the user's own choice
    allowed : modules and packages whose classes and functions the file may name
    """
    chosen = read_sets(sets)
    in_file = read_config(config_file)
    refuse_unknown_classes({key: value for key, value in in_file.items() if key not in chosen}, allowed)
    return merged_config(without_kept_keys(in_file), config_file.resolve().parent, sets)


def refuse_unknown_classes(flat: Mapping[str, Any], allowed: Iterable[str] = ()) -> None:
    """Refuse a stored configuration that names anything of a module that is not allowed, imported already or not."""
    for key in _CLASSES:
        for module in named_modules({key: flat.get(key)}):
            if not is_within(module, allowed):
                raise ValueError(
                    f"{key}: {flat[key]!r}: a run directory may be from anybody, and this runs code of the module; "
                    f"if you trust it: --allow-module {module} (in Python: Run(..., allow_modules=[{module!r}]))"
                )


def named_modules(flat: Mapping[str, Any]) -> list[str]:
    """Return the modules of the classes that a configuration names."""
    names = (name.strip() for key in _CLASSES for name in str(flat.get(key) or "").split(","))
    return [module for module, colon, _ in (name.partition(":") for name in names) if colon]


def config_of(table: Mapping[str, Any], folder: Path, sets: Sequence[str] = ()) -> RunConfig:
    """Check a configuration that stands within another file."""
    in_sets = absolute(read_sets(sets), Path.cwd())
    in_table = with_own_names(dict(_flatten(table, "")), str(folder))
    return RunConfig.from_flat(absolute(in_table, folder) | in_sets)


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
    """Return the path of the key or option ``name``, which may begin with ``~`` or ``~user``.

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
    if path.exists() and not path.is_file():
        # A stranger's configuration may name the run that it goes on from.
        raise ValueError(f"{path}: expected a file, found a folder, pipe or device; remove it")
    try:
        table = toml_table(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path}: expected TOML: {error}") from error
    return with_own_names(dict(_flatten(table, "")), str(path))


def given_keys(config_file: str | None, sets: Sets = ()) -> dict[str, Any]:
    """Return the keys that the user has set in a file or as ``sets``, with their values."""
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
                table = toml_table(f"table = {text if text.startswith('{') else f'{{{text}}}'}")["table"]
            except ValueError as error:
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
    if own_name not in key_types() and own_name not in REMOVED_KEYS:
        raise ValueError(unknown_key(key))
    try:
        value = toml_table(f"value = {text}")["value"]
    except ValueError:
        return key, text
    if key_types().get(own_name) is str and not isinstance(value, str):
        return key, text
    return key, value


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value) if isinstance(value, os.PathLike) else value


def absolute(flat: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return flat keys with the paths among their values absolute, seen from the folder ``base``."""
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
