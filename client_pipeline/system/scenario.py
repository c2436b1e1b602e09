"""Scenario files: a network of clusters in natural units (GHz, GB), converted to SI at load."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from client_pipeline.system.devices import DeviceProfile

SCENARIO_FORMAT = "collapipe-scenario/1"
_KEYS = {
    "": ("format", "clusters", "devices", "seed", "device", "block"),
    "device": ("flop-per-cycle", "frequency-ghz", "memory-gb"),
    "block": ("memory-gb",),
}
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A network: N clusters of K devices."""

    name: str
    clusters: tuple[tuple[DeviceProfile, ...], ...]
    block_memory: float
    """gamma_0: memory of one TEB on a device, with its optimizer and stored activations [byte]."""

    @property
    def num_clusters(self) -> int:
        """N."""
        return len(self.clusters)


def load_scenario(name: str) -> Scenario:
    """Load a scenario by the name of a packaged one, or by path.

    Raises
    ------
    FileNotFoundError, ValueError
        Naming the file and the key at fault.
    """
    path = Path(name)
    if path.suffix != ".toml":
        packaged = resources.files("configs") / "scenarios" / f"{name}.toml"
        if not packaged.is_file():
            names = sorted(f.name.removesuffix(".toml") for f in (resources.files("configs") / "scenarios").iterdir())
            raise FileNotFoundError(
                f"scenario: no packaged scenario {name!r}; expected one of {', '.join(names)} or a path to a .toml file"
            )
        text = packaged.read_text(encoding="utf-8")
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(f"scenario: no file {path}")
    try:
        return parse_scenario(tomllib.loads(text), name)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: expected TOML, {error}") from error


def parse_scenario(raw: dict[str, Any], where: str) -> Scenario:
    """Check a scenario and convert it to SI; ``where`` names the file in messages."""
    _check_keys(raw, "", where)
    if raw.get("format") != SCENARIO_FORMAT:
        raise ValueError(f"{where}: format: expected {SCENARIO_FORMAT!r}, found {raw.get('format')!r}")
    num_clusters, num_devices = _count(raw, "clusters", where), _count(raw, "devices", where)
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"{where}: seed: expected an integer of at least 0, found {seed!r}")
    device, block = _table(raw, "device", where), _table(raw, "block", where)
    clusters = []
    for n in range(num_clusters):
        generator = np.random.default_rng([seed, n])
        drawn = {key: _draw(device, "device", key, num_devices, generator, where) for key in _KEYS["device"]}
        clusters.append(
            tuple(
                DeviceProfile(
                    flop_per_cycle=drawn["flop-per-cycle"][k],
                    frequency=drawn["frequency-ghz"][k] * _GIGA,
                    memory=drawn["memory-gb"][k] * _GIGA,
                )
                for k in range(num_devices)
            )
        )
    block_memory = _draw(block, "block", "memory-gb", 1, np.random.default_rng(seed), where)[0] * _GIGA
    return Scenario(name=Path(where).stem, clusters=tuple(clusters), block_memory=block_memory)


def _check_keys(table: dict[str, Any], name: str, where: str) -> None:
    for key in table:
        if key not in _KEYS[name]:
            near = difflib.get_close_matches(key, _KEYS[name], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_KEYS[name])}"
            raise ValueError(f"{where}: unknown key {'.'.join(filter(None, (name, key)))!r}; {hint}")


def _table(raw: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    table = raw.get(name)
    if not isinstance(table, dict):
        raise ValueError(f"{where}: missing table [{name}]")
    _check_keys(table, name, where)
    return table


def _count(raw: dict[str, Any], key: str, where: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key}: expected an integer of at least 1, found {value!r}")
    return value


def _draw(
    table: dict[str, Any], name: str, key: str, count: int, generator: np.random.Generator, where: str
) -> list[float]:
    """One value a device: a number for all, {min, max} drawn, or an explicit list."""
    value = table.get(key)
    where = f"{where}: {name}.{key}"
    if isinstance(value, dict) and value.keys() == {"min", "max"}:
        low, high = _positive(value["min"], f"{where}.min"), _positive(value["max"], f"{where}.max")
        if low > high:
            raise ValueError(f"{where}: min {low:g} is above max {high:g}")
        return [float(v) for v in generator.uniform(low, high, count)]
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(f"{where}: expected one value for each of {count} devices, found {len(value)}")
        return [_positive(v, where) for v in value]
    return [_positive(value, where)] * count


def _positive(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise ValueError(f"{where}: expected a number above 0, a range {{min, max}} or a list, found {value!r}")
    return float(value)
