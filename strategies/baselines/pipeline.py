"""The baseline ``pipeline`` (PipeLine in the paper): every cluster trains a model of its own; nothing is averaged."""

from __future__ import annotations

from flwr.app import ArrayRecord, Message, MetricRecord

from strategies.clusters import ClusterState
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.segment_rules import even_choice
from strategies.records import sole_arrays


def cluster_prefix(cluster: int) -> str:
    """What the names of a cluster's own arrays begin with."""
    return f"cluster-{cluster}/"


class PipeLine(PlannedStrategy):
    """TEBs even over the min(K, L) fastest devices, m = 8; no averaging, no upload.

    The arrays hold every cluster's model, each name behind ``cluster-n/``. They go up and down for evaluation alone,
    and count neither as bytes nor as time.
    """

    def arrays_for(self, state: ClusterState, arrays: ArrayRecord) -> ArrayRecord:
        """The cluster's own model; in round 1 the initial one."""
        return cluster_arrays(arrays, state.cluster)

    def join(
        self, server_round: int, replies: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None, list[Message]]:
        """Keep every cluster's model; one that failed has its last one."""
        _, metrics = self.aggregator.aggregate_train(server_round, replies)
        cluster_of = {state.node_id: state.cluster for state in self.clusters}
        for reply in replies:
            if not reply.has_error():
                self._models[cluster_of[reply.metadata.src_node_id]] = sole_arrays(reply)
        joined = {
            cluster_prefix(n) + name: array
            for n, model in sorted(self._models.items())
            for name, array in model.items()
        }
        return ArrayRecord(joined), metrics, replies

    def prepare(self, server_round: int, arrays: ArrayRecord, selected: object) -> None:
        """Remember where every cluster stands."""
        self._models = {state.cluster: cluster_arrays(arrays, state.cluster) for state in self.clusters}


def cluster_arrays(arrays: ArrayRecord, cluster: int) -> ArrayRecord:
    """A cluster's own arrays; all of them where they are not of one cluster each."""
    prefix = cluster_prefix(cluster)
    own = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
    return ArrayRecord(own) if own else arrays


class EvenPipelines(RoundPolicy):
    """Every cluster trains: none needs a channel."""

    name = "pipeline"

    def plan(self, round_: Round) -> Answer:
        """Even segments; a cluster whose devices do not hold them is infeasible."""
        instance, parts, missing = round_.instance, [], []
        for n in range(instance.num_clusters):
            choice = even_choice(instance, n)
            if choice is None:
                reason = "even segments do not fit; use more devices or more memory"
                missing.append(Infeasibility(n, "C7", instance.L, 0, reason))
            parts.append(
                ClusterAnswer("feasible", choice is not None, choice=choice, uplink_s=0.0, uplink_energy_j=0.0)
            )
        return Answer("infeasible" if missing else "feasible", tuple(parts), infeasible=tuple(missing))
