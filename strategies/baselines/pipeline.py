"""The baseline ``pipeline`` (PipeLine in the paper): every cluster trains a model of its own; nothing is averaged."""

from __future__ import annotations

from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.ranked import Segments
from strategies.planning.segment_rules import even_choice
from strategies.separate_models import SeparateModels


class PipeLine(SeparateModels):
    """TEBs even over the min(K, L) fastest devices, m = 8; no averaging, no upload."""

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy by which every cluster trains on even segments."""
        del seed
        return EveryCluster("pipeline", even_choice)


class EveryCluster(RoundPolicy):
    """Policy by which every cluster trains: none needs a channel.

    Parameters
    ----------
    name : of the policy
    segments : of the clusters
    """

    tells_tebs_apart = True

    def __init__(self, name: str, segments: Segments) -> None:
        self.name = name
        self._segments = segments

    def plan(self, round_: Round) -> Answer:
        """Plan the segments; a cluster whose devices do not hold them is infeasible."""
        instance, parts, faults = round_.instance, [], []
        for n in range(instance.num_clusters):
            choice = self._segments(instance, n)
            if choice is None:
                reason = "these segments do not fit; use more devices or more memory"
                faults.append(Infeasibility(n, "C7", instance.L, 0, reason))
            parts.append(
                ClusterAnswer("feasible", choice is not None, choice=choice, uplink_s=0.0, uplink_energy_j=0.0)
            )
        return Answer("infeasible" if faults else "feasible", tuple(parts), infeasible=tuple(faults))
