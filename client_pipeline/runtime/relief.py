"""Whether it pays to relieve slow devices within a round: what it would wait for them, beside the move of TEBs."""

from __future__ import annotations

import statistics
from collections.abc import Collection

from client_pipeline.partition.plan import ClusterPlan, Segment
from client_pipeline.runtime.step_outcome import StepOutcome

SURELY = 2.0
"""How many times the move the waits must take: both are estimates, and the slow device may recover."""


def pays(
    outcome: StepOutcome, relieved: ClusterPlan, slow: Collection[int], steps_left: int, seconds_of_move: float
) -> bool:
    """Say whether the steps that are left gain surely more than a move takes.

    Parameters
    ----------
    outcome : of the last step, under the old segments
    relieved : the plan with less for the slow devices
    slow : devices
    steps_left : local steps of the round
    seconds_of_move : until its TEBs are where they shall be [s]
    """
    return steps_left * saved_s(outcome, relieved, slow) > SURELY * seconds_of_move


def saved_s(outcome: StepOutcome, relieved: ClusterPlan, slow: Collection[int]) -> float:
    """How much shorter a step's slowest stage becomes; a device that had no TEB is as fast as the middle one [s]."""
    teb_s = {s.device: outcome.devices[s.device].busy_s / len(s.blocks) for s in outcome.segments}
    others = [seconds for device, seconds in teb_s.items() if device not in slow]
    middle = statistics.median(others or teb_s.values())

    def slowest_s(segments: list[Segment]) -> float:
        return max(len(s.blocks) * teb_s.get(s.device, middle) for s in segments)

    return slowest_s(outcome.segments) - slowest_s(relieved.segments())


def num_moved(old: list[Segment], new: list[Segment]) -> int:
    """TEBs that another device has than before."""
    owners = [{index: segment.device for segment in segments for index in segment.blocks} for segments in (old, new)]
    return sum(owners[0][index] != device for index, device in owners[1].items())
