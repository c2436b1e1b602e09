"""Server's step on the clusters' average: Flower's adaptive strategies on the encoder, and their memory.

The step from the round's weights to the average serves as a gradient (Reddi et al., Adaptive Federated Optimization,
arXiv:2003.00295); momentum and second moments are those of ``flwr.serverapp.strategy``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi, Strategy
from torch import Tensor

from strategies.aggregation.config import ServerOptimizerConfig
from strategies.aggregation.weighted_mean import WeightedMean
from strategies.records import WEIGHT_KEY

ADAPTIVE = (FedAdagrad, FedAdam, FedYogi)
"""Flower's strategies with two moments of the step, ``m_t`` and ``v_t``."""
_WITH_BETAS: dict[str, type[FedAdam | FedYogi]] = {"fedadam": FedAdam, "fedyogi": FedYogi}


def averaging_strategy(config: ServerOptimizerConfig) -> Strategy:
    """Build the strategy whose ``aggregate_train`` averages the encoders and takes the server's step."""
    if config.name == "none":
        return WeightedMean(weighted_by_key=WEIGHT_KEY)
    if config.name == "fedavgm":
        return FedAvgM(weighted_by_key=WEIGHT_KEY, server_learning_rate=config.lr, server_momentum=config.momentum)
    if config.name == "fedadagrad":
        return FedAdagrad(weighted_by_key=WEIGHT_KEY, eta=config.lr, tau=config.tau)
    return _WITH_BETAS[config.name](
        weighted_by_key=WEIGHT_KEY, eta=config.lr, tau=config.tau, beta_1=config.beta1, beta_2=config.beta2
    )


def memory_of(strategy: Strategy) -> dict[str, Tensor]:
    """Return the state that a Flower strategy keeps from round to round, for a checkpoint: ``m_t/NAME``, ...

    Empty for strategies without a state, and before the first round.
    """
    if isinstance(strategy, ADAPTIVE):
        return {
            # numpy turns a weight without dimensions into a scalar.
            f"{kind}/{name}": torch.from_numpy(np.asarray(value))
            for kind in ("m_t", "v_t")
            for name, value in (getattr(strategy, kind) or {}).items()
        }
    if isinstance(strategy, FedAvgM):
        # Flower keeps them in the order of the arrays.
        return {
            f"momentum/{i:06d}": torch.from_numpy(np.asarray(v)) for i, v in enumerate(strategy.momentum_vector or ())
        }
    return {}


def remember(strategy: Strategy, memory: Mapping[str, Tensor]) -> None:
    """Restore the state that :func:`memory_of` returned."""
    values_by_kind: dict[str, dict[str, Tensor]] = {}
    for key, value in memory.items():
        kind, _, name = key.partition("/")
        values_by_kind.setdefault(kind, {})[name] = value
    if isinstance(strategy, ADAPTIVE):
        for kind, values in values_by_kind.items():
            setattr(strategy, kind, {name: value.numpy() for name, value in values.items()})
    elif isinstance(strategy, FedAvgM) and values_by_kind:
        strategy.momentum_vector = [value.numpy() for _, value in sorted(values_by_kind["momentum"].items())]
