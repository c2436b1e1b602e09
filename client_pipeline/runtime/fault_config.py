"""Faults to inject, with their rates: table ``[faults]``."""

from __future__ import annotations

from dataclasses import dataclass

INJECTED_KINDS = ("device", "freeze", "slow", "cluster", "stream", "nan", "server", "partition")


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Table ``[faults]``: what goes wrong on purpose. Rates are probabilities per round, and per cluster in it."""

    device: float = 0.0
    """A device's process is killed in the middle of a step."""
    freeze: float = 0.0
    """A device's process is stopped for ``freeze-seconds``."""
    slow: float = 0.0
    """A device computes ``slow-factor`` times slower until the round ends."""
    cluster: float = 0.0
    """The control unit's process is killed."""
    stream: float = 0.0
    """The stream to the decoder is cut."""
    nan: float = 0.0
    """The activations of a micro-batch become NaN."""
    server: float = 0.0
    """The server's process is killed; ``collapipe run --resume`` goes on. Per round, not per cluster."""
    partition: float = 0.0
    """The stream to the decoder is cut, and cannot be opened again for ``partition-seconds``."""
    freeze_seconds: float = 30.0
    slow_factor: float = 10.0
    partition_seconds: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no probability."""
        for kind in INJECTED_KINDS:
            if not 0 <= getattr(self, kind) <= 1:
                raise ValueError(f"faults.{kind}: expected a probability from 0 to 1, found {getattr(self, kind)}")
        for name in ("freeze_seconds", "partition_seconds"):
            if not getattr(self, name) > 0:
                key = f"faults.{name.replace('_', '-')}"
                raise ValueError(f"{key}: expected a number above 0, found {getattr(self, name)}")
        if not self.slow_factor > 1:
            raise ValueError(f"faults.slow-factor: expected a number above 1, found {self.slow_factor}")
        if self.seed < 0:
            raise ValueError(f"faults.seed: expected at least 0, found {self.seed}")

    @property
    def any(self) -> bool:
        """True if any fault is to be injected."""
        return any(getattr(self, kind) > 0 for kind in INJECTED_KINDS)
