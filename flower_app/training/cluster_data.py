"""A cluster's training examples, for the process of its control unit."""

# Alone: a control unit's process has no need of Flower's client.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from client_pipeline.runtime.round_order import TrainingData
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task
from flower_app.tasks.partition import weighted_partition


def load_cluster_data(
    flat: dict[str, Any], tokenizer_json: str, cluster: int, num_clusters: int, data_shares: Sequence[float]
) -> TrainingData:
    """Load one cluster's training examples.

    Parameters
    ----------
    flat : the run's configuration
    tokenizer_json : the run's tokenizer
    cluster : its number
    num_clusters : N
    data_shares : weight of each cluster in the split of the data
    """
    config = RunConfig.as_sent(flat)
    data = weighted_partition(config.data, data_shares)
    return task(config.task).cluster_data(data, tokenizer_json, cluster, num_clusters, config.seed)
