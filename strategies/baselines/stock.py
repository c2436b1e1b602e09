"""Flower's own strategies as baselines, by class name, and anybody's by ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Strategy

from client_pipeline.plugins import class_named
from strategies.records import LOSS_KEY, WEIGHT_KEY


def stock_strategies() -> list[str]:
    """Names that ``strategy`` accepts beside ``collapipe``.

    Left out are those that average no arrays (XGBoost) and the wrappers that take another strategy as an argument.
    """
    return sorted(
        name
        for name, value in vars(flower_strategies).items()
        if inspect.isclass(value)
        and issubclass(value, Strategy)
        and not inspect.isabstract(value)
        and not name.startswith("FedXgb")
        and "strategy" not in inspect.signature(value).parameters
    )


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
    cls = _imported(name) if ":" in name else getattr(flower_strategies, name, None)
    if cls is None or (":" not in name and name not in stock_strategies()):
        raise ValueError(
            f"strategy: expected collapipe, vanilla-fl, pipeline, titanic, one of {', '.join(stock_strategies())}, or "
            f"module:Class, found {name!r}"
        )
    accepted = set(inspect.signature(cls).parameters)
    if unknown := sorted(options.keys() - accepted):
        raise ValueError(
            f"strategy-options: {name} takes no argument {unknown[0]!r}; expected some of {', '.join(sorted(accepted))}"
        )
    if options.get("proximal_mu"):
        raise ValueError(
            f"strategy-options: {name}: proximal_mu = {options['proximal_mu']}, but the control units add no proximal "
            "term; leave it out"
        )
    ours = {
        "fraction_evaluate": 0.0,
        "min_train_nodes": num_clusters,
        "min_available_nodes": num_clusters,
        "weighted_by_key": WEIGHT_KEY,
        "train_loss_key": LOSS_KEY,
    }
    arguments = {key: value for key, value in ours.items() if key in accepted} | dict(options)
    try:
        strategy: Strategy = cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategy-options: {name} cannot be built with {dict(options)}: {error}") from error
    return strategy


def _imported(name: str) -> type[Strategy]:
    """Return the class that ``module:Class`` names."""
    found = class_named("strategy", name)
    if not issubclass(found, Strategy) or inspect.isabstract(found):
        raise ValueError(f"strategy: {name!r}: expected a class of flwr.serverapp.strategy.Strategy, found {found!r}")
    return found
