"""A strategy as somebody else would add it: one class, in a file that this repository does not know."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from strategies.clusters import ClusterState
from strategies.dssda.answer import Answer, ClusterAnswer
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.segment_rules import uniform_choice
from strategies.records import sole_arrays
from strategies.separate_models import cluster_arrays, cluster_prefix


class TradedModels(PlannedStrategy):
    """Averages nothing: every ``every`` rounds the clusters pass their models around."""

    traits = replace(PlannedStrategy.traits, averages=False, waives=("C9",))

    def __init__(self, *, every: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.every = every
        self._models: list[ArrayRecord] = []

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Uniform segments for all."""
        return Uniform()

    def prepare(self, server_round: int, arrays: ArrayRecord, selected: Sequence[ClusterState]) -> None:
        """Take the models apart, and pass them around."""
        models = [cluster_arrays(arrays, state.cluster) for state in self.clusters]
        shift = 0 if server_round % self.every else 1
        self._models = models[shift:] + models[:shift]

    def arrays_for(self, state: ClusterState, arrays: ArrayRecord) -> ArrayRecord:
        """The model that has come to the cluster."""
        return self._models[state.cluster]

    def join(
        self, server_round: int, replies: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None, list[Message]]:
        """Put the models beside each other."""
        _, metrics = self.aggregator.aggregate_train(server_round, replies)
        cluster_of = {state.node_id: state.cluster for state in self.clusters}
        for reply in replies:
            if not reply.has_error():
                self._models[cluster_of[reply.metadata.src_node_id]] = sole_arrays(reply)
        joined = {cluster_prefix(n) + name: a for n, model in enumerate(self._models) for name, a in model.items()}
        return ArrayRecord(joined), metrics, replies


class Uniform(RoundPolicy):
    """Uniform segments; nobody waits for a channel."""

    name = "traded"

    def plan(self, round_: Round) -> Answer:
        """Let every cluster train."""
        choices = [uniform_choice(round_.instance, n) for n in range(round_.instance.num_clusters)]
        parts = (ClusterAnswer("feasible", True, choice=c, uplink_s=0.0, uplink_energy_j=0.0) for c in choices)
        return Answer("feasible", tuple(parts))
