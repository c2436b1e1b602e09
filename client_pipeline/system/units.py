"""Natural units of scenario files and their SI values."""

from __future__ import annotations

GIGA = 1e9
MEGA = 1e6


def from_db(value: float) -> float:
    """A power ratio given in dB as a plain factor."""
    return float(10.0 ** (value / 10.0))


def watt_from_dbm(value: float) -> float:
    """A power given in dBm [W]; a density in dBm/Hz [W/Hz]."""
    return from_db(value) * 1e-3


def giga(value: float) -> float:
    """GHz, GFLOP or GB as Hz, FLOP or byte."""
    return value * GIGA


def mega(value: float) -> float:
    """MHz or Mbit as Hz or bit."""
    return value * MEGA
