"""Models that the server scores and saves: the global one, or every cluster's own where nothing is averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from client_pipeline.partition.parts import ModelParts, own_parameters
from client_pipeline.runtime.ray.machine import usable_cores
from client_pipeline.runtime.stage.memory import give_freed_memory_back, return_freed_memory
from client_pipeline.weights.base_weights import FrozenBase
from flower_app.saved_model import save_model, saved_weights
from flower_app.tasks.base import AnswersQuestions, Prepared
from strategies.records import shared_tensors
from strategies.separate_models import cluster_arrays

LARGE_BYTES = 1 << 20
"""Tensors of this size and more go back to the system when they are freed [byte]."""
_KEPT_BYTES = 32 << 20
"""The same in an evaluation: above a piece of scores over a vocabulary, below a large model's matrices [byte]."""


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
        self.mistakes: dict[str, Any] = {}
        """Mistakes of the newest score, as JSON values; of cluster 0's model where every cluster has its own."""

    def take(self, arrays: ArrayRecord) -> None:
        """Set the newest weights."""
        if self._num_own:
            self._models = [shared_tensors(cluster_arrays(arrays, n)) for n in range(self._num_own)]
        else:
            self._models = [self.whole(arrays)]

    def forget(self) -> None:
        """Drop the weights: those of an earlier round would be one model more in memory."""
        self._models = []

    def whole(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Return a round's weights by global name, to be read alone; a head that they lack is the trained one's own."""
        weights = shared_tensors(arrays)
        # Models of their own have heads of their own.
        if self._num_own or any(name.startswith("head.") for name in weights):
            return weights
        return weights | {f"head.{name}": p.detach() for name, p in own_parameters(self._parts.head).items()}

    def take_saved(self, run_dir: Path) -> None:
        """Set the newest weights to those of the run's model folder."""
        self._models = []
        names = [name for name, _ in self._parts.named_parameters()]
        self._models = [{name: weights[name] for name in names} for weights in saved_weights(run_dir)]

    def score(self, split: str) -> tuple[dict[str, float], str]:
        """Return the metrics on a split, the mean over the models, and the metric's signature."""
        # What the round has left free would stand beside the scores of a vocabulary, which are as large as the head.
        give_freed_memory_back()
        scores = []
        for weights in self._models:
            self._parts.load(dict(weights))
            with _all_cores(), _kept_memory():
                scores.append(self._prepared.evaluator.evaluate(self._parts, split))
        names, self.mistakes = scores[0].metrics, scores[0].mistakes
        return {name: sum(s.metrics[name] for s in scores) / len(scores) for name in names}, scores[0].signature

    def answers(self) -> list[dict[str, str]]:
        """Return answers of the newest weights to questions of the test set; none where the task writes none."""
        if not isinstance(self._prepared.evaluator, AnswersQuestions):
            return []
        self._parts.load(dict(self._models[0]))
        with _all_cores():
            return self._prepared.evaluator.examples(self._parts)

    def save(self, run_dir: Path, task: Mapping[str, Any], round_: int) -> None:
        """Write the run's model folder; where every cluster has a model of its own, all of them."""
        base = self._frozen if isinstance(self._frozen, FrozenBase) else None
        weights, *others = (dict(model) | ({} if base else dict(self._frozen)) for model in self._models)
        spec, tokenizer_json = self._prepared.spec, self._prepared.tokenizer_json
        save_model(run_dir, spec, weights, tokenizer_json, task, round_, base, others)


@contextmanager
def _kept_memory() -> Iterator[None]:
    """Keep freed tensors below :data:`_KEPT_BYTES` in the process: new pages for each take as long as arithmetic."""
    return_freed_memory(_KEPT_BYTES)
    try:
        yield
    finally:
        return_freed_memory(LARGE_BYTES)
        give_freed_memory_back()


@contextmanager
def _all_cores() -> Iterator[None]:
    """Compute with all cores that this process may use: nobody trains meanwhile."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(threads_before, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
