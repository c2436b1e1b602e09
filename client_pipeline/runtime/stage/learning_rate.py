"""Optimizers of the parts of a model, and learning-rate schedules: table ``[optimizer]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer of every part of the model. Equal on all clusters and on the server."""

    name: str = "adamw"
    """``sgd`` or ``adamw``."""
    lr: float = 1e-3
    """Peak learning rate."""
    momentum: float = 0.0
    """SGD only."""
    weight_decay: float = 0.0
    """Decoupled for AdamW; matrices only, never norms or what is named bias."""
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    schedule: str = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear growth from 0."""
    total_steps: int = 0
    """Steps of the run; ``linear`` and ``cosine`` would reach 0 one step later. 0: not known."""
    clip_norm: float = 0.0
    """Largest norm of the whole model's gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        """Refuse values that cannot train."""
        if self.name not in ("sgd", "adamw"):
            raise ValueError(f"optimizer.name: expected sgd or adamw, found {self.name!r}")
        if self.schedule not in LEARNING_RATE_SCHEDULES:
            raise ValueError(
                f"optimizer.schedule: expected one of {', '.join(LEARNING_RATE_SCHEDULES)}, found {self.schedule!r}"
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer.lr: expected a number above 0, found {self.lr}")
        for name in ("momentum", "weight_decay", "eps", "warmup_steps", "clip_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(
                    f"optimizer.{name.replace('_', '-')}: expected at least 0, found {getattr(self, name)}"
                )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}: expected a number in [0, 1), found {getattr(self, name)}")

    def learning_rate(self, step: int) -> float:
        """Learning rate of global step ``step``, counted from 1: (round - 1) * local-steps + local step."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "inverse-sqrt":
            return self.lr * math.sqrt(max(self.warmup_steps, 1) / step)
        # The last step is one that trains, so the rate is 0 only after it.
        left = max(self.total_steps - self.warmup_steps + 1, 1)
        done = min((step - self.warmup_steps) / left, 1.0)
        if self.schedule == "linear":
            return self.lr * (1 - done)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * done))
        return self.lr
