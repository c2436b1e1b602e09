"""Plan for the devices that are left: other segments, the same micro-batches.

With the same m and schedule a step's sums keep their order, so a step that is played again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from client_pipeline.partition.plan import ClusterPlan, even_parts, rounded_parts


class NoPlan(RuntimeError):
    """The devices that are left cannot hold the TEBs; the message says what is missing."""


class Replan(Protocol):
    """Chooses segments for the devices that are left; picklable."""

    def __call__(self, plan: ClusterPlan, usable: Sequence[int], slowdown: Mapping[int, float]) -> ClusterPlan:
        """Return a plan over ``usable`` with the micro-batches and the schedule of ``plan``.

        Parameters
        ----------
        plan : that cannot go on
        usable : devices that are there
        slowdown : by how much a device is slower than it should be, where it was measured

        Raises
        ------
        NoPlan
            If they cannot hold the TEBs (C7).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ProportionalReplan:
    """TEBs in proportion to the devices' speed over the fastest of them, as many as the plan has segments at least.

    As many devices take part as the plan had, or more where memory wants it. Shares are rounded by the largest
    remainder.
    """

    speed: tuple[float, ...]
    """phi_k f_k of each device [FLOP/s]."""
    capacity: tuple[int, ...]
    """TEBs that each device's memory holds (C7)."""

    def __call__(self, plan: ClusterPlan, usable: Sequence[int], slowdown: Mapping[int, float]) -> ClusterPlan:
        """See :class:`Replan`."""
        num_blocks = sum(plan.delta)
        speed = {k: self.speed[k] / max(slowdown.get(k, 1.0), 1.0) for k in usable if self.capacity[k] > 0}
        fastest = sorted(speed, key=lambda k: (-speed[k], k))
        room = sum(self.capacity[k] for k in fastest)
        if room < num_blocks:
            raise NoPlan(
                f"devices {sorted(usable)} are left and hold {room} TEBs, {num_blocks} are needed (C7); the cluster "
                "waits for others to come back"
            )
        size = min(len(plan.segments()), len(fastest), num_blocks)
        while sum(self.capacity[k] for k in fastest[:size]) < num_blocks:
            size += 1
        chosen = fastest[:size]
        total = sum(speed[k] for k in chosen)
        parts = rounded_parts([num_blocks * speed[k] / total for k in chosen], [self.capacity[k] for k in chosen])
        delta = [0] * len(plan.delta)
        for device, part in zip(chosen, parts, strict=True):
            delta[device] = part
        return replace(plan, delta=tuple(delta), order=tuple(chosen))


def equal_devices(num_devices: int, num_blocks: int) -> ProportionalReplan:
    """Return a replan for unknown devices: all alike, each with memory for all TEBs."""
    return ProportionalReplan(speed=(1.0,) * num_devices, capacity=(num_blocks,) * num_devices)


def answering_plans(replan: Replan, num_devices: int, num_blocks: int) -> Callable[[Sequence[int]], ClusterPlan]:
    """Return the plan of a cluster that answers, for the devices that are there: all take part, if there are TEBs.

    The function raises ``ValueError`` if they cannot hold the TEBs (C7).

    Parameters
    ----------
    replan : chooses the segments' sizes
    num_devices : K
    num_blocks : L
    """
    parts = even_parts(num_blocks, min(num_devices, num_blocks))
    every = ClusterPlan(delta=(*parts, *(0,) * (num_devices - len(parts))), order=tuple(range(num_devices)), m=1)

    def plan_for(devices: Sequence[int]) -> ClusterPlan:
        try:
            return replan(every, devices, {})
        except NoPlan as error:
            raise ValueError(str(error)) from error

    return plan_for
