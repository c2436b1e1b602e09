"""A cluster's training examples, for the process of its control unit."""

# Alone: a control unit's process has no need of Flower's client.

from __future__ import annotations

from collections.abc import Sequence

from client_pipeline.runtime.control_unit.round_order import TrainingData
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task
from flower_app.tasks.data.data_split import weighted_split


def load_cluster_data(
    config: RunConfig, tokenizer_json: str, cluster: int, num_clusters: int, data_shares: Sequence[float]
) -> TrainingData:
    """Load one cluster's training examples; ``data_shares`` weigh the clusters in the split of the data."""
    data = weighted_split(config.data, data_shares)
    return task(config.task).cluster_data(data, tokenizer_json, cluster, num_clusters, config.seed)
