"""The baseline ``titanic``: pipelines by device speed, federated averaging of the whole model."""

from __future__ import annotations

from strategies.planned_strategy import PlannedStrategy
from strategies.planning.policy import RoundPolicy
from strategies.planning.ranked import RankedSelection, random_rank
from strategies.planning.segment_rules import proportional_choice


class Titanic(PlannedStrategy):
    """TEBs in proportion to the devices' speeds, m = 8; the control unit trains the decoder itself."""

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy: clusters drawn if channels are too few, channels by upload time, all allowed power."""
        return RankedSelection("titanic", random_rank(seed), proportional_choice)
