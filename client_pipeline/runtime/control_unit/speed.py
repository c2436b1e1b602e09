"""Detection of slow devices: time per unit of work, against the other devices and against the device's own past."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from client_pipeline.runtime.devices.device import StepReport

SLOW = 2.0
"""A device this many times slower than usual is slow."""
WORTH_S = 0.5
"""Time that a step must lose by it: less is not worth another plan [s]."""
_ENOUGH = 3
"""Steps before anyone is judged."""
_REMEMBERED = 32


class SpeedWatch:
    """Compares the devices of a cluster step by step.

    A device's pace is its busy time per TEB and position, divided by the median of the other devices', so that a
    machine or a batch that slows down all of them is no evidence. It is slow if that ratio is :data:`SLOW` times its
    own median of the steps before, in two steps in a row.
    """

    def __init__(self) -> None:
        self._usual: dict[int, deque[float]] = {}
        self._suspects: set[int] = set()

    def observe(self, reports: Mapping[int, StepReport]) -> dict[int, float]:
        """Take a step's reports by device; returns by how much those are slower than usual that are slow."""
        pace = {device: report.busy_s / report.work for device, report in reports.items() if report.work > 0}
        slow, suspects = {}, set()
        for device in sorted(pace):
            others = [value for another, value in pace.items() if another != device]
            ratio = pace[device] / statistics.median(others) if others and min(others) > 0 else pace[device]
            usual = self._usual.setdefault(device, deque(maxlen=_REMEMBERED))
            normal = statistics.median(usual) if len(usual) >= _ENOUGH else None
            if normal is None or normal <= 0 or ratio < SLOW * normal:
                usual.append(ratio)
                continue
            if reports[device].busy_s * (1 - normal / ratio) < WORTH_S:
                continue
            suspects.add(device)
            if device in self._suspects:
                slow[device] = ratio / normal
        self._suspects = suspects
        return slow

    def begin_round(self, slow_before: Mapping[int, float]) -> None:
        """Begin a round: one more slow step suffices for a device that was slow in the round before."""
        self._suspects = set(slow_before)
