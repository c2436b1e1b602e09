"""A policy as somebody else would add it: one class, in a file that this repository does not know."""

import numpy as np

from strategies.dssda.answer import Answer
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.ranked import RankedSelection
from strategies.planning.segment_rules import uniform_choice


class InTurn(RoundPolicy):
    """The clusters take turns at the channels; who begins depends on the run's seed."""

    name = "in-turn"

    def __init__(self, first: int = 0) -> None:
        self.first = first

    @classmethod
    def of_run(cls, seed: int) -> RoundPolicy:
        """Begin with the cluster of the seed's number."""
        return cls(seed)

    def plan(self, round_: Round) -> Answer:
        """Rank the clusters by how long they still wait for their turn."""

        def turns_until(round_, offers):
            return (np.array(round_.indices) - self.first - round_.number + 1.0) % round_.num_all

        return RankedSelection(self.name, turns_until, uniform_choice).plan(round_)
