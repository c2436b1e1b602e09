"""The baseline ``pipeline`` (PipeLine in the paper): every cluster trains a model of its own; nothing is averaged."""

from __future__ import annotations

from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.segment_rules import even_choice
from strategies.separate_models import SeparateModels


class PipeLine(SeparateModels):
    """TEBs even over the min(K, L) fastest devices, m = 8; no averaging, no upload."""

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy by which every cluster trains on even segments."""
        del seed
        return EvenPipelines()


class EvenPipelines(RoundPolicy):
    """Policy by which every cluster trains: none needs a channel."""

    name = "pipeline"
    tells_tebs_apart = True

    def plan(self, round_: Round) -> Answer:
        """Plan even segments; a cluster whose devices do not hold them is infeasible."""
        instance, parts, faults = round_.instance, [], []
        for n in range(instance.num_clusters):
            choice = even_choice(instance, n)
            if choice is None:
                reason = "even segments do not fit; use more devices or more memory"
                faults.append(Infeasibility(n, "C7", instance.L, 0, reason))
            parts.append(
                ClusterAnswer("feasible", choice is not None, choice=choice, uplink_s=0.0, uplink_energy_j=0.0)
            )
        return Answer("infeasible" if faults else "feasible", tuple(parts), infeasible=tuple(faults))
