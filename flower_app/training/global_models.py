"""What the server scores and saves: the global model, or every cluster's own where nothing is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from client_pipeline.partition.base_weights import FrozenBase
from flower_app.saved_model import load_model, save_model
from flower_app.tasks.base import Prepared
from strategies.records import to_tensors
from strategies.separate_models import cluster_arrays


class GlobalModels:
    """The newest weights of the run, and the one model that they are scored with.

    Scoring has a model of its own, because the decoder's service trains the run's.

    Parameters
    ----------
    prepared : the run's task, prepared
    seed : the run's; decides what no weights are given for
    frozen : weights that are never trained, by global name
    num_own : clusters with a model each; 0: one model for all
    """

    def __init__(self, prepared: Prepared, seed: int, frozen: Mapping[str, Tensor], num_own: int) -> None:
        self._prepared = prepared
        self._frozen = frozen
        self._num_own = num_own
        self._scored = prepared.build(seed)
        self._models: list[Mapping[str, Tensor]] = []

    def take(self, arrays: ArrayRecord) -> None:
        """Let these be the newest weights."""
        if self._num_own:
            self._models = [to_tensors(cluster_arrays(arrays, n)) for n in range(self._num_own)]
        else:
            self._models = [to_tensors(arrays)]

    def take_saved(self, run_dir: Path) -> None:
        """Let the weights of the run's model folder be the newest."""
        self._models = [load_model(run_dir, self._prepared.spec.family).parts.weights()]

    def score(self, split: str) -> tuple[dict[str, float], str]:
        """Metrics on a split, the mean over the models; and the metric's signature."""
        scores = []
        for weights in self._models:
            self._scored.load(dict(weights))
            scores.append(self._prepared.evaluator.evaluate(self._scored, split))
        names = scores[0].metrics
        return {name: sum(s.metrics[name] for s in scores) / len(scores) for name in names}, scores[0].signature

    def save(self, run_dir: Path, task: Mapping[str, Any], round_: int) -> None:
        """Write the run's model folder; where every cluster has a model of its own, cluster 0's stands for them."""
        base = self._frozen if isinstance(self._frozen, FrozenBase) else None
        weights = dict(self._models[0]) | ({} if base else dict(self._frozen))
        save_model(run_dir, self._prepared.spec, weights, self._prepared.tokenizer_json, task, round_, base)
