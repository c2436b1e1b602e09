"""Table ``[selection]``: which evaluated model a run keeps, and when its patience ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Table ``[selection]``: what the evaluations on the validation set decide."""

    metric: str = "loss"
    """By which models are compared: one of the task's metrics."""
    load_best_at_end: bool = False
    """Keep the best model so far in ``model/`` and score it on the test set; otherwise the last one."""
    patience: int = 0
    """Evaluations in a row without a better model after which training ends; 0: never."""
    min_delta: float = 0.0
    """By how much a model has to be better to count as better."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if self.patience < 0:
            raise ValueError(f"selection.patience: expected at least 0, found {self.patience}")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(f"selection.min-delta: expected at least 0, found {self.min_delta}")

    def check_metric(self, known: Sequence[str]) -> None:
        """Raise ``ValueError`` where ``metric`` is none of the task's."""
        if self.metric not in known:
            raise ValueError(f"selection.metric: expected one of {', '.join(known)}, found {self.metric!r}")
