"""Early stopping: choice of the evaluated model that is kept, and end of the training before its last round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flower_app.config.selection import SelectionConfig

LOWER_IS_BETTER = frozenset({"loss", "perplexity"})
"""Metrics that are to fall; all others are to rise."""


class ModelSelection:
    """Record of the evaluations of one run."""

    def __init__(self, config: SelectionConfig) -> None:
        self.config = config
        self.best_round = 0
        """Round of the best model; 0 before the first evaluation."""
        self.best = math.nan
        """Its metric."""
        self.stale = 0
        """Evaluations since then."""

    @property
    def stops(self) -> bool:
        """True once patience has ended."""
        return 0 < self.config.patience <= self.stale

    def update(self, round_: int, metrics: Mapping[str, float]) -> bool:
        """Take an evaluation; returns whether its model is the best so far. The first one is, whatever it scores."""
        value = metrics[self.config.metric]
        gain = self.best - value if self.config.metric in LOWER_IS_BETTER else value - self.best
        # Of a diverged model the metric is NaN: it is never better, and anything is better than it.
        better = not self.best_round or gain > self.config.min_delta or (math.isnan(self.best) and value == value)
        if better:
            self.best_round, self.best, self.stale = round_, value, 0
        else:
            self.stale += 1
        return better

    def state(self) -> dict[str, Any]:
        """Return the state for a continued run, as JSON values."""
        return {
            "best-round": self.best_round,
            "best": None if math.isnan(self.best) else self.best,
            "stale": self.stale,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.best_round, self.stale = int(state["best-round"]), int(state["stale"])
        self.best = math.nan if state["best"] is None else float(state["best"])
