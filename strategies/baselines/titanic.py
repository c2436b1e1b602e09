"""The baseline ``titanic``: pipelines by device speed, federated averaging of the whole model."""

# Alone: a baseline is one class in one file.

from __future__ import annotations

from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Instance
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.policy import RoundPolicy
from strategies.planning.ranked import RankedSelection, random_rank
from strategies.planning.segment_rules import proportional_choice


class Titanic(PlannedStrategy):
    """TEBs in proportion to the devices' speeds, m = 8; the control unit trains the decoder itself."""

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Clusters drawn where there are too few channels; channels by upload time, all the power that is allowed."""
        return RankedSelection("titanic", random_rank(seed), _segments)


def _segments(instance: Instance) -> list[SegmentChoice | None]:
    return [proportional_choice(instance, n) for n in range(instance.num_clusters)]
