"""Strategies that average nothing: every cluster goes on with a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from strategies.clusters import ClusterState
from strategies.planned_strategy import PlannedStrategy
from strategies.records import sole_arrays


class SeparateModels(PlannedStrategy):
    """Every cluster trains a model of its own.

    The arrays hold every cluster's model, each name behind ``cluster-n/``. They go up and down for evaluation alone,
    and count neither as bytes nor as time.
    """

    traits = replace(PlannedStrategy.traits, uploads=False, averages=False)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._models: dict[int, ArrayRecord] = {}

    def prepare(self, server_round: int, arrays: ArrayRecord, selected: Sequence[ClusterState]) -> None:
        """Remember where every cluster stands."""
        self._models = {state.cluster: cluster_arrays(arrays, state.cluster) for state in self.clusters}

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
        arrays = {
            cluster_prefix(n) + name: array
            for n, model in sorted(self._models.items())
            for name, array in model.items()
        }
        # It reads what is on disk into memory: these are the models of the rounds to come.
        return ArrayRecord(arrays), metrics, replies


def cluster_prefix(cluster: int) -> str:
    """Return the prefix of the names of a cluster's own arrays."""
    return f"cluster-{cluster}/"


def cluster_arrays(arrays: ArrayRecord, cluster: int) -> ArrayRecord:
    """A cluster's own arrays; all of them where they are not of one cluster each."""
    prefix = cluster_prefix(cluster)
    model = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
    return ArrayRecord(model) if model else arrays
