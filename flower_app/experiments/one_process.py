"""A run's rounds in one process: what Ray's pipelines compute, without Ray, for experiments of many small runs.

A pipeline's gradient is that of the whole model for every S and m, so a plan decides here who trains, and nothing else.
Models, data, their order, optimizers and averages are those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from client_pipeline.partition.micro_batches import StepId
from client_pipeline.runtime.data_order import DataOrder
from client_pipeline.runtime.optimizer import PartOptimizer, clip_scale
from client_pipeline.runtime.whole import whole_step
from flower_app.config.run_config import ModelConfig, RunConfig
from flower_app.tasks.base import ClusterData, Prepared, Score, TaskConfig, task
from flower_app.tasks.corpus import DataConfig

Joining = Literal["step", "round", "never"]
"""When clusters join the decoder: ``step``: one decoder learns from all in every step, and encoders are averaged after
the round (CollaPipe). ``round``: whole models are averaged after the round. ``never``: each cluster keeps its own."""


class OneProcessRounds:
    """Clusters, their data, and one process that trains them in turn.

    Parameters
    ----------
    config : a run's: task, data, model, optimizer, batch and local steps count
    num_clusters : N
    joining : when clusters join what they learned

    Raises
    ------
    ValueError
        For data that cannot be shared out, or a cluster with fewer examples than a batch.
    """

    def __init__(self, config: RunConfig, num_clusters: int, joining: Joining = "step") -> None:
        prepared, data = _prepared(config.task, config.data, config.model, config.seed, num_clusters)
        self.config = config
        self.joining = joining
        self.parts = prepared.build(config.seed)
        self.data = data
        self._orders = [DataOrder(len(d), config.batch_size, config.seed, n) for n, d in enumerate(self.data)]
        self._evaluator = prepared.evaluator
        parameters = dict(self.parts.named_parameters())
        self._shared_head = {n: p for n, p in parameters.items() if joining == "step" and n.startswith("head.")}
        self._cluster_parameters = {name: p for name, p in parameters.items() if name not in self._shared_head}
        self._optimizers = [PartOptimizer(self._cluster_parameters, config.optimizer) for _ in range(num_clusters)]
        self._head_optimizer = PartOptimizer(self._shared_head, config.optimizer)
        self._weights = [self._held()] * num_clusters
        """What each cluster starts its next round with, (P,) each: one vector for all, unless they never join."""

    def train_round(self, number: int, members: Sequence[int], noise: Mapping[int, float] | None = None) -> float:
        """Train some clusters for the local steps of a round, and join them.

        Parameters
        ----------
        number : of the round, from 1: the learning rate goes by it
        members : clusters that train
        noise : of each cluster the mean square of its upload's error, as a share of its update's own; none: 0

        Returns
        -------
        Mean loss per target [nat]; NaN where nobody trains.
        """
        if not members:
            return float("nan")
        start = {n: self._weights[n] for n in members}
        trained, weights = dict(start), dict.fromkeys(members, 0)
        loss_sum = 0.0
        for step in range(1, self.config.local_steps + 1):
            global_step = (number - 1) * self.config.local_steps + step
            head_sums = {name: torch.zeros_like(p) for name, p in self._shared_head.items()}
            step_weight = 0
            for n in members:
                vector_to_parameters(trained[n], self._cluster_parameters.values())
                step_id = StepId(seed=self.config.seed, round=number, step=step, cluster=n)
                batch = self.data[n].collate(self._orders[n].next_batch(), step_id.data_seed)
                result = whole_step(self.parts, step_id, batch, 1)
                norm_sq = sum(float(g.square().sum()) for g in result.gradients.values())
                scale = clip_scale(self.config.optimizer.clip_norm, norm_sq)
                for name, total in head_sums.items():
                    total += result.weight * scale * result.gradients[name]
                self._optimizers[n].apply(global_step, scale)
                trained[n] = self._held()
                weights[n] += result.weight
                step_weight += result.weight
                loss_sum += result.loss_sum
            for name, parameter in self._shared_head.items():
                parameter.grad = head_sums[name] / step_weight
            self._head_optimizer.apply(global_step)
        for n, ratio in (noise or {}).items():
            generator = np.random.default_rng([self.config.seed, number, n])
            trained[n] = start[n] + distorted(trained[n] - start[n], ratio, generator)
        self._join(trained, weights)
        return loss_sum / sum(weights.values())

    def evaluate(self, split: str = "validation") -> list[Score]:
        """Score the model, or each cluster's own where they never join."""
        vectors = self._weights if self.joining == "never" else self._weights[:1]
        scores = []
        for vector in vectors:
            vector_to_parameters(vector, self._cluster_parameters.values())
            scores.append(self._evaluator.evaluate(self.parts, split))
        return scores

    def _held(self) -> Tensor:
        """Weights of a cluster as the model has them, (P,)."""
        return parameters_to_vector(self._cluster_parameters.values()).detach().clone()

    def _join(self, trained: Mapping[int, Tensor], weights: Mapping[int, int]) -> None:
        """Average what was trained by the targets that each cluster trained on."""
        if self.joining == "never":
            self._weights = [trained.get(n, vector) for n, vector in enumerate(self._weights)]
            return
        total = sum(weights.values())
        mean = torch.stack([trained[n] * (weights[n] / total) for n in trained]).sum(dim=0)
        self._weights = [mean] * len(self._weights)


@lru_cache(maxsize=4)
def _prepared(
    settings: TaskConfig, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int
) -> tuple[Prepared, list[ClusterData]]:
    """Load and encode the text of all clusters: once for runs that differ in plans alone."""
    chosen = task(settings)
    prepared = chosen.prepare(data, model, seed, num_clusters)
    shares = range(num_clusters)
    return prepared, [chosen.cluster_data(data, prepared.tokenizer_json, n, num_clusters, seed) for n in shares]


def distorted(update: Tensor, ratio: float, generator: np.random.Generator) -> Tensor:
    """Add a channel's error to an update: Gaussian, E|e|^2 = ratio |u|^2, spread evenly over the weights.

    Parameters
    ----------
    update : u, (P,)
    ratio : of the error's mean square to the update's, epsilon / phi^2 for a channel of Eq. (25)
    generator : draws the error
    """
    if ratio == 0:
        return update
    deviation = float(update.double().norm()) * (ratio / update.numel()) ** 0.5
    error = torch.from_numpy(generator.standard_normal(update.numel())) * deviation
    return (update.double() + error).to(update.dtype)
