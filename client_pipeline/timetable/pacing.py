"""Paced devices: actors that take the time of their profiles, so that the model can be compared with a running system.

Computation is padded to what the device would need; a link is a token bucket without burst that its sender waits for.
All times are scaled by one factor. A stage keeps its own clock: what one wait oversleeps, the next one makes up for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.timetable.event_simulator import StageTimes


@dataclass(frozen=True)
class StagePace:
    """Times of one stage's actions, (m,) each [s], scaled."""

    forward_s: list[float]
    backward_s: list[float]
    forward_link_s: list[float]
    """Time to send the activations on; 0 for the last stage."""
    backward_link_s: list[float]
    """Time to send the gradient back; 0 for the first stage."""
    weight_s: list[float]
    """Part of ``backward_s`` that a schedule may put off: the weights' gradients."""


@dataclass(frozen=True)
class Pace:
    """A cluster's round, scaled."""

    stages: list[StagePace]
    """(S,), in pipeline order."""
    uplink_s: float
    """[s]."""

    @classmethod
    def of(cls, times: StageTimes, uplink_s: float, scale: float) -> Pace:
        """Scale times as :func:`client_pipeline.timetable.event_simulator.simulate_pipeline` takes them."""
        forward, backward, forward_link, backward_link, weights = (scale * t for t in times)
        nothing = np.zeros((1, forward.shape[1]))
        # The gradient over link s is sent by stage s + 1.
        sent_on, sent_back = np.vstack([forward_link, nothing]), np.vstack([nothing, backward_link])
        return cls(
            [
                StagePace(*(column[s].tolist() for column in (forward, backward, sent_on, sent_back, weights)))
                for s in range(len(forward))
            ],
            scale * uplink_s,
        )

    def moved(self, before: ClusterPlan, after: ClusterPlan) -> Pace:
        """Return the pace of other segments: a TEB takes on its device what each took there.

        A device that had none takes the mean of those that had, and so does a link that nothing went over.
        """
        if (before.devices, before.delta) == (after.devices, after.delta):
            return self
        old = list(zip(before.devices, self.stages, strict=True))
        teb_s = {k: np.array([s.forward_s, s.backward_s, s.weight_s]) / before.delta[k] for k, s in old}
        typical: NDArray[np.float64] = np.mean(list(teb_s.values()), axis=0)
        on_s, back_s = {k: s.forward_link_s for k, s in old[:-1]}, {k: s.backward_link_s for k, s in old[1:]}
        nothing = [0.0] * typical.shape[1]

        def link(known_s: dict[int, list[float]], device: int) -> list[float]:
            mean_s = np.mean(list(known_s.values()), axis=0).tolist() if known_s else nothing
            return known_s.get(device, mean_s)

        stages = []
        for place, k in enumerate(after.devices):
            forward, backward, weights = ((teb_s[k] if k in teb_s else typical) * after.delta[k]).tolist()
            sent_on = link(on_s, k) if place < len(after.devices) - 1 else nothing
            stages.append(StagePace(forward, backward, sent_on, link(back_s, k) if place else nothing, weights))
        return Pace(stages, self.uplink_s)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"stages": [vars(stage) for stage in self.stages], "uplink_s": self.uplink_s}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Pace:
        """Read :meth:`to_dict`'s form."""
        return cls([StagePace(**stage) for stage in raw["stages"]], float(raw["uplink_s"]))


class PacedClock:
    """One stage's clock during a step.

    Parameters
    ----------
    pace : of the stage
    splits : whether backward passes put their weights' gradients off
    """

    def __init__(self, pace: StagePace, splits: bool = False) -> None:
        self._pace, self._splits = pace, splits
        self._free = 0.0

    def begin(self) -> None:
        """Note that an action's input is there; it starts now, or has started when the stage should have been free."""
        now = time.monotonic()
        # After an idle wait the clock is behind; after a busy one it is ahead by what was overslept, at most.
        self._free = now if now - self._free > _CATCH_UP_S else self._free

    def compute(self, kind: str, micro_batch: int) -> None:
        """Wait until the action's computation would be done."""
        pace, i = self._pace, micro_batch
        if kind == "F":
            self._occupy(pace.forward_s[i])
        elif kind == "W":
            self._occupy(pace.weight_s[i])
        else:
            self._occupy(pace.backward_s[i] - (pace.weight_s[i] if self._splits else 0.0))

    def send(self, kind: str, micro_batch: int) -> None:
        """Wait until the link has taken the action's result."""
        times_s = self._pace.forward_link_s if kind == "F" else self._pace.backward_link_s
        self._occupy(times_s[micro_batch])

    def _occupy(self, seconds: float) -> None:
        self._free += seconds
        left = self._free - time.monotonic()
        if left > 0:
            time.sleep(left)


_CATCH_UP_S = 0.005
"""Longer than a sleep oversleeps, shorter than an idle wait that matters [s]."""
