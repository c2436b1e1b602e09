"""Table ``[planner]`` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, get_args

from client_pipeline.system.scenario import Bandwidth
from strategies.dssda.power_control import check_power_control
from strategies.dssda.queues import DRIFTS
from strategies.planning.pipeline_choices import PipelineChoices


@dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Table ``[planner]``: what overrides the scenario's own settings."""

    v: float = 0.0
    """V, weight of the latency against the queues [1/s]; 0: the scenario's."""
    gamma_max: float = 0.0
    """Threshold of the convergence bound; 0: the scenario's."""
    energy_price: float = 0.0
    """Cost of a joule in the plan's objective, beside V of a second [1/J]; 0: the scenario's."""
    bandwidth: str = ""
    """``channels``, or ``split``: the matched clusters divide a band; empty: the scenario's."""
    drift: str = "true"
    """``true``; or for ``dssda-paper`` alone ``printed``, the paper's P2, or ``mixed``, only the power's part of it."""
    c11: bool = False
    """``dssda-paper`` alone: hold the bound in every round, as printed."""
    schedule: str = ""
    """Of the pipelines: ``gpipe``, ``1f1b``, ``zb-h1``; or ``auto``, the event simulator's choice for each cluster;
    empty: as the plans say, ``gpipe`` unless a plan file has another."""
    token_slices: int = 1
    """Of causal models: slices of each micro-batch along the sequence, which enter the pipeline one after the other; 0:
    the event simulator's choice of 1, 2, 4 and 8 for each cluster; 1: as the plans say, none unless a plan file has."""
    lookahead: int = 1
    """Rounds whose networks a plan looks at, its own among them (model-predictive, receding horizon); 1: its own."""
    length: int = 0
    """Tokens of the sample that ``costs = "model"`` counts; 0: ``data.max-length``."""
    power_control: str = "sca"
    """How ``dssda`` and ``uniform`` find a round's powers: ``sca``, Algorithm 3's convex programs; or ``exact``."""

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        check_power_control(self.power_control, "planner.power-control")
        for name in ("v", "gamma_max", "energy_price", "length"):
            if getattr(self, name) < 0:
                raise ValueError(f"planner.{name.replace('_', '-')}: expected at least 0, found {getattr(self, name)}")
        if self.bandwidth and self.bandwidth not in get_args(Bandwidth):
            raise ValueError(
                f"planner.bandwidth: expected {', '.join(get_args(Bandwidth))} or an empty text for the scenario's, "
                f"found {self.bandwidth!r}"
            )
        if self.lookahead < 1:
            raise ValueError(f"planner.lookahead: expected at least 1 round, found {self.lookahead}")
        PipelineChoices.of(self.schedule, self.token_slices)
        if self.drift not in DRIFTS:
            raise ValueError(f"planner.drift: expected one of {', '.join(DRIFTS)}, found {self.drift!r}")

    def bandwidth_of(self, of_scenario: Bandwidth) -> Bandwidth:
        """Return what the run sets, or else its scenario."""
        return cast(Bandwidth, self.bandwidth) if self.bandwidth else of_scenario
