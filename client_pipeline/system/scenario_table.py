"""One table of a scenario file: known keys alone, values checked, natural units converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.near_names import did_you_mean
from client_pipeline.system.radio import Array

MOST_COUNT = 10_000
"""Most clusters, devices of one, channels or TEBs: beyond it no planner ends."""


class Quantity(NamedTuple):
    """A key that holds a physical quantity."""

    to_si: Callable[[float], float] = float
    sign: str = "above 0"
    """``above 0``, ``of at least 0`` or ``any``."""
    default: float | tuple[float, float] | None = None
    """In the file's unit; a pair is a range; None: the key must be there."""


class Range(NamedTuple):
    """A range in the file's unit."""

    low: float
    high: float


class ScenarioTable:
    """Read access to a table, with messages that name file and key.

    Parameters
    ----------
    raw : as read from the file
    name : of the table; empty: the file's top
    known_keys : that may stand in it
    location : names the file in messages
    base : the table whose keys hold where ``raw`` has none of its own
    """

    def __init__(
        self, raw: Any, name: str, known_keys: Sequence[str], location: str, base: ScenarioTable | None = None
    ) -> None:
        self._prefix = f"{name}." if name else ""
        if not isinstance(raw, dict):
            raise ValueError(f"{location}: expected a table [{name}], found {raw!r}")
        for key in raw:
            if key not in known_keys:
                hint = did_you_mean(key, known_keys) or f"; expected one of {', '.join(known_keys)}"
                raise ValueError(f"{location}: unknown key {self._prefix + key!r}{hint}")
        self._raw, self._location, self._base = raw, location, None
        if base is not None:
            self._raw, self._base = base._raw | raw, base
        self._keys = frozenset(raw)

    def draw(self, key: str, quantity: Quantity, count: int, generator: np.random.Generator, hint: str = "") -> Array:
        """One value for each of ``count``: a number for all, {min, max} drawn, or a list; (count,) in SI.

        ``hint`` says in a message where the count comes from.
        """
        value = self._value(key, quantity, ", a range {min, max} or a list")
        if isinstance(value, Range):
            values = generator.uniform(value.low, value.high, count)
        elif isinstance(value, list):
            if len(value) != count:
                raise ValueError(f"{self.place(key)}: expected one value for each of {count}, found {len(value)}{hint}")
            values = np.array(value)
        else:
            values = np.full(count, value)
        return np.array([self.in_si(key, quantity, float(v)) for v in values])

    def number(self, key: str, quantity: Quantity) -> float:
        """One number, in SI."""
        value = self._value(key, quantity, "")
        if not isinstance(value, float):
            raise ValueError(f"{self.place(key)}: expected one number, found {self._raw.get(key)!r}")
        return self.in_si(key, quantity, value)

    def optional(self, key: str, quantity: Quantity) -> float | None:
        """One number in SI, or None where the key is absent."""
        return self.number(key, quantity) if key in self._raw else None

    def limits(self, key: str, quantity: Quantity) -> tuple[float, float]:
        """Both ends of a range, equal ones for a number, in SI."""
        value = self._value(key, quantity, " or a range {min, max}")
        if isinstance(value, list):
            raise ValueError(f"{self.place(key)}: expected a number or a range {{min, max}}, found {value!r}")
        low, high = (value.low, value.high) if isinstance(value, Range) else (value, value)
        return self.in_si(key, quantity, low), self.in_si(key, quantity, high)

    def holder(self, key: str) -> ScenarioTable:
        """Return the table in which a key stands: this one, or the base."""
        return self._base if self._base is not None and key not in self._keys else self

    def values_for(self, key: str, quantity: Quantity, count: int) -> list[float | Range]:
        """Return the values of ``count`` clusters of this table: one number or range, or each its entry of a list."""
        value = self._value(key, quantity, ", a range {min, max} or a list")
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{self.place(key)}: expected one value for each of {count} clusters, found {len(value)}")
        return list(value)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MOST_COUNT) -> int:
        """An integer."""
        value, expectation = self._raw.get(key, default), f"expected an integer of at least {least}"
        if value is None:
            raise ValueError(f"{self.place(key)}: missing; {expectation}")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self.place(key)}: {expectation}, found {value!r}")
        if value > most:
            raise ValueError(f"{self.place(key)}: expected at most {most:,}, found {value!r}")
        return value

    def whole_number(self, key: str, generator: np.random.Generator) -> int:
        """An integer of at least 1, or one that is drawn from a range of integers, both ends included."""
        value = self._raw.get(key)
        if not isinstance(value, dict):
            return self.count(key)
        low, high = value.get("min"), value.get("max")
        if value.keys() != {"min", "max"} or type(low) is not int or type(high) is not int or not 1 <= low <= high:
            raise ValueError(
                f"{self.place(key)}: expected an integer of at least 1 or a range of integers, such as "
                f"{{ min = 6, max = 14 }}, found {value!r}"
            )
        if high > MOST_COUNT:
            raise ValueError(f"{self.place(key)}.max: expected at most {MOST_COUNT:,}, found {high!r}")
        return int(generator.integers(low, high, endpoint=True))

    def choice(self, key: str, names: Sequence[str], default: str) -> Any:
        """One of several words."""
        value = self._raw.get(key, default)
        if value not in names:
            raise ValueError(f"{self.place(key)}: expected one of {', '.join(names)}, found {value!r}")
        return value

    def _value(self, key: str, quantity: Quantity, other_forms: str) -> float | list[float] | Range:
        if key not in self._raw and quantity.default is not None:
            return Range(*quantity.default) if isinstance(quantity.default, tuple) else float(quantity.default)
        name = self.place(key)
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

    def in_si(self, key: str, quantity: Quantity, value: float) -> float:
        """Convert a key's value to SI; one that overflows or vanishes on the way was meant in another unit."""
        try:
            si = quantity.to_si(value)
        except OverflowError:
            si = math.inf
        if not math.isfinite(si) or (si == 0 and value != 0):
            raise ValueError(f"{self.place(key)}: expected a value that can be held in SI units, found {value:g}")
        return si

    def place(self, key: str) -> str:
        """Name the file and the key, as a message begins."""
        holder = self.holder(key) if key in self._raw else self
        return f"{self._location}: {holder._prefix}{key}"


def draw_each(tables: Sequence[ScenarioTable], key: str, quantity: Quantity, generator: np.random.Generator) -> Array:
    """Draw one value for each cluster, whose tables may be of several kinds.

    Parameters
    ----------
    tables : of each cluster, (N,); clusters of one kind have the same object
    key, quantity : what is read
    generator : gives a number to each cluster where any has a range: the n-th is cluster n's, whatever others have

    Returns
    -------
    (N,), in SI.
    """
    holders = [table.holder(key) for table in tables]
    values: list[float | Range] = []
    given: dict[int, list[float | Range]] = {}
    taken: dict[int, int] = {}
    for n, (table, holder) in enumerate(zip(tables, holders, strict=True)):
        # A list of a cluster's own table is for the clusters of that table, one of the file's own for all clusters.
        for_all = holder is not table
        if id(holder) not in given:
            count = len(tables) if for_all else sum(other is table for other in tables)
            given[id(holder)] = holder.values_for(key, quantity, count)
        place = n if for_all else taken.get(id(holder), 0)
        taken[id(holder)] = place + 1
        values.append(given[id(holder)][place])
    numbers = np.array([value.low if isinstance(value, Range) else value for value in values])
    if any(isinstance(value, Range) for value in values):
        highs = np.array([value.high if isinstance(value, Range) else value for value in values])
        numbers = generator.uniform(numbers, highs)
    return np.array([table.in_si(key, quantity, float(v)) for table, v in zip(tables, numbers, strict=True)])


def _checked(value: Any, name: str, sign: str, expectation: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (sign == "above 0" and value <= 0) or (sign == "of at least 0" and value < 0):
        raise ValueError(f"{name}: {expectation}, found {value!r}")
    return float(value)
