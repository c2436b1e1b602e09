"""Faults of a cluster's devices, as errors and as records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

KILLED, FROZEN, PARTED = "killed", "frozen", "parted"
"""Ways in which a step loses a device: its process ended; it does not answer; or neighbours lost each other while
all are there."""
CLUSTER_FAULTS = ("device", "freeze", "link", "slow", "joined", "stream", "nan", "cluster")
"""Kinds of a control unit's own records."""


class PipelineError(RuntimeError):
    """A local step did not complete; the message names the device and the cause."""


class DeviceFault(PipelineError):
    """A device is gone, or cannot be reached: the step can be played again on the other devices.

    Parameters
    ----------
    message : names the device and the cause
    kind : one of :data:`KILLED`, :data:`FROZEN`, :data:`PARTED`
    devices : at fault; none if it is not known who
    """

    def __init__(self, message: str, kind: str, devices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.devices = devices


class NotFinite(PipelineError):
    """Gradients hold NaN or Inf: no optimizer has taken them."""


class OutOfMemory(PipelineError):
    """A device needs more than its memory limit; the other devices would need as much."""


class LostRound(PipelineError):
    """The cluster cannot go on with this round; the message says why."""


class FailedRound(RuntimeError):
    """Answer of a control unit to a round that it could not finish.

    Parameters
    ----------
    message : the reason
    faults : JSON values of the :class:`FaultRecord` of the round, at least one
    """

    def __init__(self, message: str, faults: list[dict[str, Any]]) -> None:
        super().__init__(message, faults)
        self.faults = faults

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """One fault, as it stands in the round's line."""

    kind: str
    """``device`` (its process ended), ``freeze``, ``link`` (devices lost each other), ``slow``, ``joined`` (a lost
    device is back; without a device, a lost control unit), ``stream``, ``nan``, ``cluster`` (its control unit was lost)
    or ``server``."""
    cluster: int | None
    round: int
    device: int | None = None
    step: int = 0
    """Local step in progress, from 1; 0: before the first, or not known."""
    recovered: bool
    """True if the cluster's round went on; for ``server``: if the run did."""
    seconds: float | None = None
    """Time from the fault to the next finished micro-batch [s]; where the time of the fault is not known, from the last
    sign of progress. None if no micro-batch finished."""
    bytes: int = 0
    """Weights and optimizer states that were put back, or bytes that were sent again."""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)
