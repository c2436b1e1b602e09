"""Devices as the planner sees them, in SI units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One weak device of a cluster."""

    flop_per_cycle: float
    """phi_k [FLOP/cycle]."""
    frequency: float
    """f_k [cycle/s]."""
    memory: float
    """[byte]."""

    @property
    def speed(self) -> float:
        """phi_k f_k [FLOP/s]."""
        return self.flop_per_cycle * self.frequency
