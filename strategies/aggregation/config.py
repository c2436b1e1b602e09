"""Configuration of the encoders' average: tables ``[aggregator]`` and ``[server-optimizer]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from client_pipeline.least_values import check_least
from client_pipeline.near_names import did_you_mean

AGGREGATORS = ("mean", "krum", "multi-krum", "trimmed-mean", "median", "bulyan")
SERVER_OPTIMIZERS = ("none", "fedavgm", "fedadagrad", "fedadam", "fedyogi")


@dataclass(frozen=True, kw_only=True)
class AggregatorConfig:
    """Table ``[aggregator]``: the rule that joins the clusters' encoders. The decoder is trained, not averaged."""

    name: str = "mean"
    """``mean``, weighted by targets; ``krum`` takes the update that is nearest to most others, ``multi-krum`` the mean
    of some of those; ``median`` and ``trimmed-mean`` go weight by weight; ``bulyan`` is both in turn. All but the mean
    and the Krums count every cluster alike. Or ``module:Class``, a class of
    :class:`~strategies.aggregation.update_rule.UpdateRule`."""
    malicious: int = 1
    """f: clusters of a round that may send arbitrary updates. Unused by ``mean``."""
    keep: int = 0
    """``multi-krum``: updates that are averaged; 0: all but f."""
    trim: float = 0.2
    """``trimmed-mean``: share of the clusters that is left out at each end."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if self.name not in AGGREGATORS and ":" not in self.name:
            raise ValueError(
                f"aggregator.name: expected one of {', '.join(AGGREGATORS)}, or module:Class, found {self.name!r}"
                f"{did_you_mean(self.name, AGGREGATORS)}"
            )
        check_least("aggregator.", self, malicious=1, keep=0)
        if not 0 < self.trim < 0.5:
            raise ValueError(f"aggregator.trim: expected a number between 0 and 0.5, found {self.trim}")


@dataclass(frozen=True, kw_only=True)
class ServerOptimizerConfig:
    """Table ``[server-optimizer]``: the server's step to the encoders' average. The decoder has its own optimizer."""

    name: str = "none"
    """``none``: the average itself. ``fedavgm``, ``fedadagrad``, ``fedadam``, ``fedyogi``: as Flower's strategies."""
    lr: float = 0.01
    """Server's learning rate: with ``fedavgm``, 1 keeps the average as it is; with the others it is about the largest
    change of a weight in a round."""
    momentum: float = 0.9
    """``fedavgm``."""
    beta1: float = 0.9
    """``fedadam``, ``fedyogi``."""
    beta2: float = 0.99
    """``fedadam``, ``fedyogi``."""
    tau: float = 1e-3
    """Added to the root of the second moment: a large value is less adaptive. Unused by ``fedavgm``."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot train."""
        if self.name not in SERVER_OPTIMIZERS:
            raise ValueError(
                f"server-optimizer.name: expected one of {', '.join(SERVER_OPTIMIZERS)}, found {self.name!r}"
            )
        for name in ("lr", "tau"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"server-optimizer.{name}: expected a number above 0, found {getattr(self, name)}")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"server-optimizer.{name}: expected a number in [0, 1), found {getattr(self, name)}")
