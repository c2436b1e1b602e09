"""One table of a scenario file: known keys alone, values checked, natural units converted."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from client_pipeline.system.units import same


class Quantity(NamedTuple):
    """A key that holds a physical quantity."""

    to_si: Callable[[float], float] = same
    sign: str = "above 0"
    """``above 0``, ``of at least 0`` or ``any``."""
    default: float | tuple[float, float] | None = None
    """In the file's unit; a pair is a range; None: the key must be there."""


class Range(NamedTuple):
    """A range in the file's unit."""

    low: float
    high: float


class ScenarioTable:
    """Read access to a table, with messages that name file and key."""

    def __init__(self, raw: Any, name: str, known_keys: Sequence[str], location: str) -> None:
        self._prefix = f"{name}." if name else ""
        if not isinstance(raw, dict):
            raise ValueError(f"{location}: expected a table [{name}], found {raw!r}")
        for key in raw:
            if key not in known_keys:
                near = difflib.get_close_matches(key, known_keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known_keys)}"
                raise ValueError(f"{location}: unknown key {self._prefix + key!r}; {hint}")
        self._raw, self._location = raw, location

    def draw(self, key: str, quantity: Quantity, count: int, generator: np.random.Generator) -> Array:
        """One value for each of ``count``: a number for all, {min, max} drawn, or a list; (count,) in SI."""
        value = self._value(key, quantity, ", a range {min, max} or a list")
        if isinstance(value, Range):
            values = generator.uniform(value.low, value.high, count)
        elif isinstance(value, list):
            if len(value) != count:
                raise ValueError(f"{self._name(key)}: expected one value for each of {count}, found {len(value)}")
            values = np.array(value)
        else:
            values = np.full(count, value)
        return np.array([self._si(key, quantity, float(v)) for v in values])

    def number(self, key: str, quantity: Quantity) -> float:
        """One number, in SI."""
        value = self._value(key, quantity, "")
        if not isinstance(value, float):
            raise ValueError(f"{self._name(key)}: expected one number, found {self._raw.get(key)!r}")
        return self._si(key, quantity, value)

    def optional(self, key: str, quantity: Quantity) -> float | None:
        """One number in SI, or None where the key is absent."""
        return self.number(key, quantity) if key in self._raw else None

    def limits(self, key: str, quantity: Quantity) -> tuple[float, float]:
        """Both ends of a range, equal ones for a number, in SI."""
        value = self._value(key, quantity, " or a range {min, max}")
        if isinstance(value, list):
            raise ValueError(f"{self._name(key)}: expected a number or a range {{min, max}}, found {value!r}")
        low, high = (value.low, value.high) if isinstance(value, Range) else (value, value)
        return self._si(key, quantity, low), self._si(key, quantity, high)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer."""
        value, expectation = self._raw.get(key, default), f"expected an integer of at least {least}"
        if value is None:
            raise ValueError(f"{self._name(key)}: missing; {expectation}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self._name(key)}: {expectation}, found {value!r}")
        return value

    def choice(self, key: str, names: Sequence[str], default: str) -> Any:
        """One of several words."""
        value = self._raw.get(key, default)
        if value not in names:
            raise ValueError(f"{self._name(key)}: expected one of {', '.join(names)}, found {value!r}")
        return value

    def _value(self, key: str, quantity: Quantity, other_forms: str) -> float | list[float] | Range:
        if key not in self._raw and quantity.default is not None:
            return Range(*quantity.default) if isinstance(quantity.default, tuple) else float(quantity.default)
        name = self._name(key)
        sign = "" if quantity.sign == "any" else f" {quantity.sign}"
        expectation = f"expected a number{sign} in the unit that the key names{other_forms}"
        if key not in self._raw:
            raise ValueError(f"{name}: missing; {expectation}")
        value = self._raw[key]
        if isinstance(value, dict) and value.keys() == {"min", "max"}:
            low, high = (_checked(value[end], f"{name}.{end}", quantity.sign, expectation) for end in ("min", "max"))
            if low > high:
                raise ValueError(f"{name}: min {low:g} is above max {high:g}; expected min to be at most max")
            return Range(low, high)
        if isinstance(value, list):
            return [_checked(v, f"{name}[{i}]", quantity.sign, expectation) for i, v in enumerate(value)]
        return _checked(value, name, quantity.sign, expectation)

    def _si(self, key: str, quantity: Quantity, value: float) -> float:
        """The value in SI; one that overflows or vanishes on the way was meant in another unit."""
        try:
            si = quantity.to_si(value)
        except OverflowError:
            si = math.inf
        if not math.isfinite(si) or (si == 0 and value != 0):
            raise ValueError(f"{self._name(key)}: expected a value that can be held in SI units, found {value:g}")
        return si

    def _name(self, key: str) -> str:
        return f"{self._location}: {self._prefix}{key}"


def _checked(value: Any, name: str, sign: str, expectation: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (sign == "above 0" and value <= 0) or (sign == "of at least 0" and value < 0):
        raise ValueError(f"{name}: {expectation}, found {value!r}")
    return float(value)
