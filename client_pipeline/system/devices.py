"""Devices and control units as the planner sees them, in SI units."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE_PREFIX = "collapipe-device-"


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One weak device of a cluster, and its link to the next one."""

    flop_per_cycle: float
    """phi_k [FLOP/cycle]."""
    frequency: float
    """f_k, before a round's speed factor [cycle/s]."""
    memory: float
    """[byte]."""
    kappa: float
    """Effective switched capacitance [J/(cycle Hz^2)]."""
    energy_budget_j: float
    """C9 [J]."""
    link_power_w: float
    """Transmit power p_k [W]."""
    link_bandwidth_hz: float
    """[Hz]."""
    link_gain: float
    """h_dd, linear."""
    link_interference_w: float
    """I_dd [W]."""

    @property
    def speed(self) -> float:
        """phi_k f_k [FLOP/s]."""
        return self.flop_per_cycle * self.frequency


@dataclass(frozen=True, kw_only=True)
class UplinkProfile:
    """Budgets of a control unit for reaching the server."""

    bandwidth_hz: float
    """B_n, on whichever channel it gets [Hz]."""
    max_power_w: float
    """C6 [W]."""
    energy_budget_j: float
    """C8, of one upload [J]."""
    mean_energy_j: float | None
    """Mean upload energy that the energy queue keeps [J]; None: no such queue."""


def device_resource(device: int) -> str:
    """Name of the custom resource that a device's Ray node offers, where devices are machines of their own."""
    return f"{DEVICE_PREFIX}{device}"
