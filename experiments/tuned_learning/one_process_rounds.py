"""A run's rounds in one process: what Ray's pipelines compute, without Ray, for experiments of many small runs.

A pipeline's gradient is the whole model's for every S and m, so a plan decides here who trains, and nothing else.
Models, data and their order, optimizers, schedules and averages are those of a run; dropout draws one mask for each
batch, as with m = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.control_unit.round_order import TrainingData
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale
from client_pipeline.runtime.stage.whole import whole_step
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import ModelConfig, Prepared, TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.data.data_split import weighted_split
from strategies.aggregation.config import ServerOptimizerConfig

Joining = Literal["step", "round", "never"]
"""Time at which clusters join their weights. ``step``: one decoder learns from all clusters in every step, and encoders
are averaged after the round. ``round``: whole models are averaged after the round. ``never``: each cluster keeps its
own model."""
_FED_ADAM = "FedAdam"


class TrainingDiverged(Exception):
    """The loss is no finite number."""


def joining_of(config: RunConfig) -> Joining:
    """Return the time at which the clusters of a run join their weights, if all of them train at the same time.

    With ``decoder-sync = "round"`` each cluster trains its own copy of the decoder. CollaPipe then averages whole
    models, as VanillaFL and TITANIC do.
    """
    if not config.traits.averages:
        return "never"
    return "step" if config.traits.decoder_on_server and config.decoder_sync != "round" else "round"


class FedAdamStep:
    """Flower's FedAdam step from the weights w to the new ones, by the clusters' mean; it keeps its moments m and v.

    Delta = mean - w        m <- beta1 m + (1 - beta1) Delta        v <- beta2 v + (1 - beta2) Delta^2
    w <- w + lr sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)) m / (sqrt(v) + tau)
    """

    def __init__(self, config: ServerOptimizerConfig) -> None:
        self.config = config
        self._m_P: Tensor | None = None
        self._v_P: Tensor | None = None

    def take(self, number: int, weights_P: Tensor, mean_P: Tensor) -> Tensor:
        """Return the weights after round ``number`` t, (P,), from those before it and the mean of those trained."""
        config, delta_P = self.config, mean_P - weights_P
        zero_P = torch.zeros_like(delta_P)
        self._m_P = config.beta1 * (zero_P if self._m_P is None else self._m_P) + (1 - config.beta1) * delta_P
        self._v_P = config.beta2 * (zero_P if self._v_P is None else self._v_P) + (1 - config.beta2) * delta_P**2
        rate = config.lr * math.sqrt(1 - config.beta2 ** (number + 1)) / (1 - config.beta1 ** (number + 1))
        return weights_P + rate * self._m_P / (self._v_P.sqrt() + config.tau)


def server_step_of(config: RunConfig) -> FedAdamStep | None:
    """Return the FedAdam step of a run's server, or None where the server takes the mean.

    Raises
    ------
    ValueError
        For another optimizer of the server.
    """
    if config.strategy == _FED_ADAM:
        # Flower's own defaults are its constructor's.
        names = {"eta": "lr", "beta_1": "beta1", "beta_2": "beta2", "tau": "tau"}
        options = {"eta": 0.1} | config.strategy_arguments()
        if unknown := sorted(options.keys() - names.keys()):
            raise ValueError(f"strategy-options: expected some of {', '.join(names)}, found {unknown[0]!r}")
        settings = {names[key]: float(value) for key, value in options.items()}
        return FedAdamStep(ServerOptimizerConfig(name="fedadam", **settings))
    if config.server_optimizer.name == "none":
        return None
    if config.server_optimizer.name != "fedadam":
        raise ValueError(
            f"server-optimizer.name: expected none or fedadam in one process, found {config.server_optimizer.name!r}"
        )
    return FedAdamStep(config.server_optimizer)


class OneProcessRounds:
    """The clusters of a run, their data, and one process that trains them in turn.

    Parameters
    ----------
    config : a run's. Adapters, compression, privacy and robust rules do not count.
    data_shares : weight of each cluster in the split of the data, (N,)

    Raises
    ------
    ValueError
        For data that cannot be shared out, a cluster with fewer examples than a batch, or another server optimizer
        than FedAdam.
    """

    def __init__(self, config: RunConfig, data_shares: Sequence[float]) -> None:
        data = weighted_split(config.data, data_shares)
        self.config = config
        self.joining = joining_of(config)
        self.num_clusters = len(data_shares)
        self.prepared, self._data = prepared_clusters(config.task, data, config.model, config.seed, self.num_clusters)
        self._parts = self.prepared.build(config.seed)
        self._orders = [DataOrder(len(d), config.batch_size, config.seed, n) for n, d in enumerate(self._data)]
        parameters = dict(self._parts.named_parameters())
        self._shared_head = {n: p for n, p in parameters.items() if self.joining == "step" and n.startswith("head.")}
        self._cluster_parameters = {name: p for name, p in parameters.items() if name not in self._shared_head}
        self._optimizers = [PartOptimizer(self._cluster_parameters, config.optimizer) for _ in self._data]
        self._head_optimizer = PartOptimizer(self._shared_head, config.optimizer)
        self._server_step = server_step_of(config)
        self._weights = [self._held()] * self.num_clusters
        """Weights of each cluster at the start of its next round, (P,) each: one vector for all if they join."""

    def train_round(self, number: int, members: Sequence[int]) -> float:
        """Train some clusters for the local steps of a round, and join them.

        Parameters
        ----------
        number : of the round, from 1: the learning rate and the masks of dropout go by it
        members : clusters that train, at least one

        Returns
        -------
        Mean loss per target [nat].

        Raises
        ------
        TrainingDiverged
            If the loss is no finite number.
        """
        trained, weights = {n: self._weights[n] for n in members}, dict.fromkeys(members, 0)
        loss_sum = 0.0
        for step in range(1, self.config.local_steps + 1):
            global_step = (number - 1) * self.config.local_steps + step
            head_sums = {name: torch.zeros_like(p) for name, p in self._shared_head.items()}
            step_weight = 0
            for n in members:
                self._hold(trained[n])
                step_id = StepId(seed=self.config.seed, round=number, step=step, cluster=n)
                batch = self._data[n].collate(self._orders[n].next_batch(), step_id.data_seed)
                result = whole_step(self._parts, step_id, batch, 1)
                if not math.isfinite(result.loss_sum):
                    raise TrainingDiverged(f"round {number}, cluster {n}: the loss is {result.loss_sum}")
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
        self._join(number, trained, weights)
        return loss_sum / sum(weights.values())

    def score(self, split: str = "validation", models: Sequence[int] | None = None) -> dict[str, float]:
        """Metrics of the model, or where clusters never join the mean of their models'.

        Parameters
        ----------
        split : ``validation`` or ``test``
        models : clusters whose models count; None: all
        """
        counted = [0] if self.joining != "never" else range(self.num_clusters) if models is None else models
        scores = []
        for n in counted:
            self._hold(self._weights[n])
            scores.append(self.prepared.evaluator.evaluate(self._parts, split).metrics)
        return {name: sum(metrics[name] for metrics in scores) / len(scores) for name in scores[0]}

    def _hold(self, weights_P: Tensor) -> None:
        """Give the model a cluster's weights."""
        # A copy: parameters become views of the vector, and optimizers step in place.
        vector_to_parameters(weights_P.clone(), self._cluster_parameters.values())

    def _held(self) -> Tensor:
        """Weights of a cluster as the model has them, (P,)."""
        return parameters_to_vector(self._cluster_parameters.values()).detach().clone()

    def _join(self, number: int, trained: Mapping[int, Tensor], weights: Mapping[int, int]) -> None:
        """Average what was trained by the targets that each cluster trained on."""
        if self.joining == "never":
            self._weights = [trained.get(n, vector) for n, vector in enumerate(self._weights)]
            return
        total = sum(weights.values())
        mean_P = torch.stack([trained[n] * (weights[n] / total) for n in trained]).sum(dim=0)
        if self._server_step is not None:
            mean_P = self._server_step.take(number, self._weights[0], mean_P)
        self._weights = [mean_P] * self.num_clusters


@lru_cache(maxsize=4)
def prepared_clusters(
    settings: TaskConfig, data: DataConfig, model: ModelConfig, seed: int, num_clusters: int
) -> tuple[Prepared, list[TrainingData]]:
    """Load and encode the text of all clusters, once for the runs of a seed that differ in other things."""
    chosen = task(settings)
    prepared = chosen.prepare(data, model, seed, num_clusters)
    shares = range(num_clusters)
    return prepared, [chosen.cluster_data(data, prepared.tokenizer_json, n, num_clusters, seed) for n in shares]
