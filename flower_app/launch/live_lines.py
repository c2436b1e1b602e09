"""Lines for the terminal about what goes wrong in a round, at once; each fault and each recovery is told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flower_app.launch.run_events import fault_line, what_happened
from flower_app.runs.live_faults import MissingSign

TOLD_AFTER_S = 2.0
"""How long a device, or a cluster, is silent until the terminal tells of it: busy machines pause for a moment [s]."""

_Place = tuple[int, int | None]


class LiveLines:
    """Remembers what was told, so that a round's line, which has all of it, tells nothing twice."""

    def __init__(self) -> None:
        self._told: dict[tuple[Any, ...], bool] = {}
        """Faults, and whether their recovery was told, too."""
        self._silent: dict[_Place, MissingSign] = {}

    def present(self, faults: Iterable[Mapping[str, Any]], signs: Iterable[MissingSign]) -> Iterator[str]:
        """Yield what is new in the round under way.

        Parameters
        ----------
        faults : all of the round so far
        signs : who gives no sign of life
        """
        faults = list(faults)
        for key, fault in _numbered(faults):
            if key not in self._told:
                self._told[key] = bool(fault.get("recovered"))
                yield fault_line(fault) if fault.get("recovered") else what_happened(fault)
            elif fault.get("recovered") and not self._told[key]:
                self._told[key] = True
                yield fault_line(fault)
        signs = list(signs)
        missing = {(sign.cluster, sign.device): sign for sign in signs if sign.seconds >= TOLD_AFTER_S}
        for place, sign in missing.items():
            if place not in self._silent:
                self._silent[place] = sign
                yield str(sign)
        present = {(sign.cluster, sign.device) for sign in signs}
        lost = {(fault.get("cluster"), fault.get("device")) for fault in faults if not fault.get("recovered")}
        for place in self._silent.keys() - present:
            sign = self._silent.pop(place)
            # One that was given up has a line of its own, and so has its return.
            if place not in lost and sign.state == "silent":
                where = f"cluster {sign.cluster}" + ("" if sign.device is None else f", device {sign.device}")
                yield f"{where}: there again"

    def of_round(self, faults: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Yield what a round's line has beyond what was told while it went on."""
        self._silent.clear()
        for key, fault in _numbered(faults):
            if self._told.pop(key, None) is not bool(fault.get("recovered")) or not fault.get("recovered"):
                yield fault_line(fault)


def _numbered(faults: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Faults with what tells them apart: one device may be lost twice in a step."""
    numbers: Counter[tuple[Any, ...]] = Counter()
    for fault in faults:
        key = tuple(fault.get(name) for name in ("round", "cluster", "device", "kind", "step"))
        numbers[key] += 1
        yield (*key, numbers[key]), fault
