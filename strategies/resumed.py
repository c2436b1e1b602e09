"""Resuming a run: what a strategy keeps, and its rounds, which Flower's ``start`` always counts from 1."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from strategies.aggregation.server_optimizers import memory_of, remember
from strategies.planned_strategy import PlannedStrategy
from strategies.registry import STOCK_KEEPS, strategy_class, traits_of


class ResumedStrategy(Strategy):
    """Any strategy, with the rounds that are done already added to every round's number.

    Parameters
    ----------
    strategy : the strategy
    completed : rounds that are done
    """

    def __init__(self, strategy: Strategy, completed: int) -> None:
        self.strategy = strategy
        self.completed = completed

    def start(self, *arguments: Any, **named: Any) -> Result:
        """See Strategy; its log counts the rounds of the whole run."""
        numbers, logger = _RunNumbers(self.completed), logging.getLogger("flwr")
        logger.addFilter(numbers)
        try:
            return super().start(*arguments, **named)
        finally:
            logger.removeFilter(numbers)

    def summary(self) -> None:
        """Log the strategy's configuration."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See Strategy."""
        return self.strategy.configure_train(server_round + self.completed, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See Strategy."""
        return self.strategy.aggregate_train(server_round + self.completed, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """See Strategy."""
        return self.strategy.configure_evaluate(server_round + self.completed, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """See Strategy."""
        return self.strategy.aggregate_evaluate(server_round + self.completed, replies)


class _RunNumbers(logging.Filter):
    """Adds the rounds that are done already to those in Flower's headings, ``[ROUND 1/3]``."""

    def __init__(self, completed: int) -> None:
        super().__init__()
        self._completed = completed

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == "[ROUND %s/%s]" and isinstance(record.args, tuple):
            record.args = tuple(number + self._completed for number in record.args if isinstance(number, int))
        return True


def check_unchanged(old_values: Mapping[str, object], new_values: Mapping[str, object], free: Collection[str]) -> None:
    """Refuse to go on with a run under another configuration than it began with.

    Parameters
    ----------
    old_values : flat configuration of the checkpoint
    new_values : of the run that goes on
    free : keys that do not change what is computed; those with a dot at the end are tables

    Raises
    ------
    ValueError
        Naming the keys that differ, or those by which the run is another release's.
    """
    if unknown := sorted(old_values.keys() ^ new_values.keys()):
        # Keys come and go with what they decide, so their defaults need not be what the run was computed with.
        raise ValueError(
            f"resume: another release of CollaPipe began this run: {', '.join(unknown)} differ between the two; go on "
            "with that release, or start a new run with model.from set to this one's model"
        )
    changed = sorted(
        k
        for k in old_values.keys() | new_values.keys()
        if not is_free(k, free) and old_values.get(k) != new_values.get(k)
    )
    if changed:
        changes = ", ".join(f"{key} (it was {old_values.get(key)!r}, is {new_values.get(key)!r})" for key in changed)
        raise ValueError(f"resume: the configuration has changed: {changes}; restore it, or start a new run")


def is_free(key: str, free: Collection[str]) -> bool:
    """Return whether a key is one of ``free``, or in one of its tables."""
    return key in free or key.rpartition(".")[0] + "." in free


def check_resumable(name: str, options: Mapping[str, object]) -> None:
    """Refuse to go on with a strategy that keeps something from round to round that no checkpoint has.

    Raises
    ------
    ValueError
        Saying why, and what to do.
    """
    if traits_of(strategy_class(name)).keeps == "unknown":
        raise ValueError(
            f"resume: {name} keeps state of its own from round to round (thresholds or samples), which Flower gives no "
            f"way to save; start the run anew, or use one of {', '.join(STOCK_KEEPS)}"
        )
    if options.get("fraction_train", 1.0) != 1.0:
        raise ValueError(
            f"resume: {name} with fraction_train = {options['fraction_train']} draws its clients without a seed, so a "
            "resumed run would not be the same run; start it anew"
        )


def kept_memory(strategy: Strategy) -> dict[str, Tensor]:
    """Return the memory of the strategy that averages, itself or its aggregator, for a checkpoint.

    See :func:`strategies.aggregation.server_optimizers.memory_of`.
    """
    return memory_of(_averaging(strategy))


def kept_state(strategy: Strategy) -> dict[str, Any] | None:
    """Return the other state of a strategy, as JSON values; None without any."""
    return strategy.state() if isinstance(strategy, PlannedStrategy) else None


def restore_kept(strategy: Strategy, state: Mapping[str, Any] | None, memory: Mapping[str, Tensor]) -> None:
    """Give a strategy back what :func:`kept_state` and :func:`kept_memory` took from it."""
    if isinstance(strategy, PlannedStrategy):
        assert state is not None
        strategy.restore(dict(state))
    remember(_averaging(strategy), memory)


def _averaging(strategy: Strategy) -> Strategy:
    return strategy.aggregator if isinstance(strategy, PlannedStrategy) else strategy
