"""Answer of a planner: plain data with status, objective, lower bound and gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True)
class SegmentChoice:
    """Segments and micro-batches of one cluster."""

    delta: tuple[int, ...]
    """delta_k of each of the K devices."""
    m: int
    """Micro-batches."""
    last: int | None
    """Device at the end of the pipeline, which pays no link; None under eq15, where the order does not matter unless
    the last device's energy pays no link either."""
    pipeline_s: float
    """D_n, one step of the pipeline [s]."""
    sequence: tuple[int, ...] = ()
    """Busy devices in pipeline order, where TEBs cost differently; empty: it follows from speeds and ``last``."""

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.delta) - self.delta.count(0)

    def order(self, speed: Any) -> tuple[int, ...]:
        """Busy devices in pipeline order: faster ones first, ``last`` at the end.

        Parameters
        ----------
        speed : (K,), phi_k f_k [FLOP/s]
        """
        if self.sequence:
            return self.sequence
        busy = sorted((k for k, d in enumerate(self.delta) if d > 0), key=lambda k: (k == self.last, -speed[k], k))
        return tuple(busy)


_SENTENCES = {
    "C2": "at least {needs:.6g} segments are required, at most {has:.6g} are possible (C2)",
    "C5": "{needs:.6g} clusters must get a channel, {has:.6g} can (C5)",
    "C8": "the upload needs {needs:.6g} J, its budget is {has:.6g} J (C8)",
    "C11": "Gamma is at least {needs:.6g}, its limit is {has:.6g} (C11)",
    "eps_max": "the distortion is at least {needs:.6g}, its limit is {has:.6g} (eps_max)",
}


@dataclass(frozen=True)
class Infeasibility:
    """A constraint that cannot be met."""

    cluster: int | None
    """Cluster at fault; None: the clusters together."""
    constraint: str
    """C1 to C9, or ``eps_max``."""
    needs: float
    has: float
    remedy: str
    """Change that would make it feasible, in words, with the figure (C8: the largest upload that fits)."""

    @property
    def reason(self) -> str:
        """The unmet constraint and the remedy, in words, without naming the cluster."""
        sentence = _SENTENCES.get(self.constraint, "{constraint} needs {needs:.6g}, has {has:.6g}")
        return f"{sentence.format(constraint=self.constraint, needs=self.needs, has=self.has)}; {self.remedy}"

    def __str__(self) -> str:
        who = "the round" if self.cluster is None else f"cluster {self.cluster}"
        return f"{who}: {self.reason}"


@dataclass(frozen=True)
class Match:
    """Decision for one matched cluster."""

    choice: SegmentChoice
    channel: int
    power_w: float


@dataclass(frozen=True)
class ClusterAnswer:
    """One cluster's part of an answer; what does not apply is None."""

    status: Status
    selected: bool
    channel: int | None = None
    power_w: float | None = None
    choice: SegmentChoice | None = None
    uplink_s: float | None = None
    """t_up,n [s]."""
    uplink_energy_j: float | None = None
    """E_up,n [J]."""
    band_hz: float | None = None
    """Band of the uplink, where the planner divides one [Hz]."""
    cost: float | None = None
    """Matched: its segment and power costs; otherwise ``skip``. The latency is shared and not in it."""

    @property
    def match(self) -> Match | None:
        """Return the decision of a cluster that trains and uploads; None for another."""
        if not self.selected or self.choice is None or self.channel is None or self.power_w is None:
            return None
        return Match(self.choice, self.channel, self.power_w)

    def to_dict(self) -> dict[str, Any]:
        """Return the part as JSON values."""
        choice = self.choice
        return {
            "status": self.status,
            "selected": self.selected,
            "channel": self.channel,
            "power_w": self.power_w,
            "S": choice.num_segments if choice else None,
            "m": choice.m if choice else None,
            "delta": list(choice.delta) if choice else None,
            **({"order": list(choice.sequence)} if choice and choice.sequence else {}),
            "last": choice.last if choice else None,
            "pipeline_s": choice.pipeline_s if choice else None,
            "uplink_s": self.uplink_s,
            "uplink_energy_j": self.uplink_energy_j,
            "cost": self.cost,
            **({} if self.band_hz is None else {"band_hz": self.band_hz}),
        }


@dataclass(frozen=True)
class Answer:
    """The answer to a round's problem."""

    status: Status
    """``optimal``: within the planner's tolerance of the lower bound; ``feasible``: the constraints hold."""
    clusters: tuple[ClusterAnswer, ...]
    objective: float | None = None
    lower_bound: float | None = None
    """No decision costs less; -inf where the planner proves nothing."""
    latency_s: float | None = None
    """tau, Eq. (26) [s]."""
    infeasible: tuple[Infeasibility, ...] = ()

    @classmethod
    def without_plan(cls, faults: Sequence[Infeasibility], num_clusters: int) -> Answer:
        """Return the answer to a problem without a plan, for all that is missing."""
        at_fault = {fault.cluster for fault in faults}
        parts = (ClusterAnswer("infeasible" if n in at_fault else "feasible", False) for n in range(num_clusters))
        return cls("infeasible", tuple(parts), infeasible=tuple(faults))

    @property
    def gap(self) -> float | None:
        """(objective - lower bound) / max(|objective|, 1e-12); None without an objective or a bound."""
        if self.objective is None or self.lower_bound is None or not math.isfinite(self.lower_bound):
            return None
        return max(self.objective - self.lower_bound, 0.0) / max(abs(self.objective), 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer of ``collapipe plan --json`` as JSON values."""
        bounded = self.lower_bound is not None and math.isfinite(self.lower_bound)
        return {
            "status": self.status,
            "objective": self.objective,
            "lower_bound": self.lower_bound if bounded else None,
            "gap": self.gap,
            "latency_s": self.latency_s,
            "infeasible": [asdict(i) for i in self.infeasible],
            "clusters": [c.to_dict() for c in self.clusters],
        }
