"""Baselines that plan nothing: Flower's strategies by class name, and a user's by ``module:Class``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import Bulyan, FedAvg, FedTrimmedAvg, MultiKrum, Strategy

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


def check_enough_clusters(strategy: Strategy, num_clusters: int) -> None:
    """Refuse a stock strategy that cannot aggregate the updates of so few clusters, or waits for ever for more.

    Parameters
    ----------
    strategy : of :func:`make_stock`; methods that a class overrides are not checked
    num_clusters : N

    Raises
    ------
    ValueError
        With the number of clusters that it needs.
    """
    if not isinstance(strategy, FedAvg) or not type(strategy).configure_train.__module__.startswith("flwr."):
        return
    name = type(strategy).__name__
    for key in ("min_train_nodes", "min_available_nodes"):
        if (number := getattr(strategy, key)) > num_clusters:
            raise ValueError(
                f"strategy-options: {name}: {key}: expected at most {num_clusters} clusters, found {number}"
            )
    if not 0 < strategy.fraction_train <= 1:
        raise ValueError(
            f"strategy-options: {name}: fraction_train: expected a number above 0 and at most 1, found "
            f"{strategy.fraction_train}"
        )
    in_a_round = max(int(num_clusters * strategy.fraction_train), strategy.min_train_nodes)
    needed, setting = _fewest(strategy)
    if in_a_round < needed:
        raise ValueError(
            f"strategy: {name}{setting} needs {needed} clusters in a round, found {in_a_round}; use more clusters, "
            "change strategy-options, or take another strategy"
        )


def _fewest(strategy: Strategy) -> tuple[int, str]:
    """Return the fewest updates that a strategy of Flower's aggregates as it promises, and the setting that says so."""
    aggregate = type(strategy).aggregate_train
    if isinstance(strategy, Bulyan) and aggregate is Bulyan.aggregate_train:
        malicious = strategy.num_malicious_nodes
        return 4 * malicious + 3, f" with num_malicious_nodes = {malicious}"
    if isinstance(strategy, MultiKrum) and aggregate is MultiKrum.aggregate_train:
        malicious, selected = strategy.num_malicious_nodes, strategy.num_nodes_to_select
        setting = f" with num_malicious_nodes = {malicious} and num_nodes_to_select = {selected}"
        return max(2 * malicious + 3, selected + malicious), setting
    if isinstance(strategy, FedTrimmedAvg) and aggregate is FedTrimmedAvg.aggregate_train and strategy.beta:
        # It leaves out the whole part of this share at each end.
        return math.ceil(1 / strategy.beta), f" with beta = {strategy.beta}"
    return 1, ""
