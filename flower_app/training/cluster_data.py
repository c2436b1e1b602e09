"""A cluster's training examples, for the process of its control unit."""

# Alone: a control unit's process has no need of Flower's client.

from __future__ import annotations

from typing import Any

from client_pipeline.runtime.round_order import TrainingData
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task


def load_cluster_data(flat: dict[str, Any], tokenizer_json: str, cluster: int, num_clusters: int) -> TrainingData:
    """Load one cluster's training examples.

    Parameters
    ----------
    flat : the run's configuration
    tokenizer_json : the run's tokenizer
    cluster : its number
    num_clusters : N
    """
    config = RunConfig.as_sent(flat)
    return task(config.task).cluster_data(config.data, tokenizer_json, cluster, num_clusters, config.seed)
