"""What the server scores and saves: the global model, or every cluster's own where nothing is averaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from client_pipeline.partition.base_weights import FrozenBase
from client_pipeline.partition.parts import ModelParts, own_parameters
from client_pipeline.runtime.memory import give_freed_memory_back
from flower_app.saved_model import save_model, saved_weights
from flower_app.tasks.base import Prepared
from strategies.records import shared_tensors
from strategies.separate_models import cluster_arrays


class GlobalModels:
    """The newest weights of the run, and the one model that they are scored with: the run's.

    The weights are the arrays' own memory, not copies of it: what they are loaded into and written to has its own. The
    head is the one that the decoder's service trains, where that does; nobody trains while a model is scored.

    Parameters
    ----------
    prepared : the run's task, prepared
    parts : the run's model
    frozen : weights that are never trained, by global name
    num_own : clusters with a model each; 0: one model for all
    """

    def __init__(self, prepared: Prepared, parts: ModelParts, frozen: Mapping[str, Tensor], num_own: int) -> None:
        self._prepared = prepared
        self._frozen = frozen
        self._num_own = num_own
        self._parts = parts
        self._models: list[Mapping[str, Tensor]] = []

    def take(self, arrays: ArrayRecord) -> None:
        """Let these be the newest weights."""
        if self._num_own:
            self._models = [shared_tensors(cluster_arrays(arrays, n)) for n in range(self._num_own)]
        else:
            self._models = [self.whole(arrays)]

    def forget(self) -> None:
        """Have no weights until some are taken: those of an earlier round would be one model more."""
        self._models = []

    def whole(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Return a round's weights by global name, to be read alone; a head that they lack is the trained one's own."""
        weights = shared_tensors(arrays)
        # Models of their own have heads of their own.
        if self._num_own or any(name.startswith("head.") for name in weights):
            return weights
        return weights | {f"head.{name}": p.detach() for name, p in own_parameters(self._parts.head).items()}

    def take_saved(self, run_dir: Path) -> None:
        """Let the weights of the run's model folder be the newest."""
        self._models = []
        weights = saved_weights(run_dir)
        self._models = [{name: weights[name] for name, _ in self._parts.named_parameters()}]

    def score(self, split: str) -> tuple[dict[str, float], str]:
        """Metrics on a split, the mean over the models; and the metric's signature."""
        # What the round has left free would stand beside the scores of a vocabulary, which are as large as the head.
        give_freed_memory_back()
        scores = []
        for weights in self._models:
            self._parts.load(dict(weights))
            scores.append(self._prepared.evaluator.evaluate(self._parts, split))
        names = scores[0].metrics
        return {name: sum(s.metrics[name] for s in scores) / len(scores) for name in names}, scores[0].signature

    def save(self, run_dir: Path, task: Mapping[str, Any], round_: int) -> None:
        """Write the run's model folder; where every cluster has a model of its own, cluster 0's stands for them."""
        base = self._frozen if isinstance(self._frozen, FrozenBase) else None
        weights = dict(self._models[0]) | ({} if base else dict(self._frozen))
        save_model(run_dir, self._prepared.spec, weights, self._prepared.tokenizer_json, task, round_, base)
