"""Strategies that plan nothing as baselines: Flower's own, by class name, and anybody's by ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import Strategy

from strategies.records import LOSS_KEY, WEIGHT_KEY
from strategies.registry import strategy_class


def make_stock(name: str, options: Mapping[str, Any], num_clusters: int) -> Strategy:
    """Build a stock strategy that trains on all clusters and leaves evaluation to the server.

    Parameters
    ----------
    name : class of ``flwr.serverapp.strategy``, or ``module:Class``
    options : further constructor arguments
    num_clusters : N

    Raises
    ------
    ValueError
        For an unknown class, or arguments that its constructor does not take.
    """
    cls = strategy_class(name)
    argument_names = set(inspect.signature(cls).parameters)
    if unknown := sorted(options.keys() - argument_names):
        raise ValueError(
            f"strategy-options: {name} takes no argument {unknown[0]!r}; expected some of "
            f"{', '.join(sorted(argument_names))}"
        )
    if options.get("proximal_mu"):
        raise ValueError(
            f"strategy-options: {name}: proximal_mu = {options['proximal_mu']}, but the control units add no proximal "
            "term; leave it out"
        )
    defaults = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": num_clusters,
        "min_available_nodes": num_clusters,
        "weighted_by_key": WEIGHT_KEY,
        "train_loss_key": LOSS_KEY,
    }
    arguments = {key: value for key, value in defaults.items() if key in argument_names} | dict(options)
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategy-options: {name} cannot be built with {dict(options)}: {error}") from error
