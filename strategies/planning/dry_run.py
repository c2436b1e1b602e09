"""Rounds of planning without training: a network that changes, a policy, and queues that evolve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario
from strategies.dssda.evaluation import violations
from strategies.planning.costs import RoundCosts, Work, pipeline_work, round_costs
from strategies.planning.plan_demands import memory_violations
from strategies.planning.planner import Decision, RoundPlanner
from strategies.planning.policy import RoundPolicy


@dataclass(frozen=True, kw_only=True)
class PlannedRound(Decision):
    """Plan of one round, and its outcome."""

    costs: RoundCosts
    gamma: Array
    """Convergence bound of each cluster, Eq. (28), (N,)."""
    violations: list[str]
    """Constraints that the plan breaks."""

    @property
    def latency_s(self) -> float:
        """Round latency, Eq. (26), with the pipelines' time by Eq. (15) [s]; NaN if nobody is selected."""
        return self.costs.latency_eq15_s

    @property
    def latency_event_s(self) -> float:
        """The same with event-simulated pipelines: fused chunks of the real micro-batch sizes [s]."""
        return self.costs.latency_fused_s

    @property
    def pipeline_s(self) -> Array:
        """One step of each selected cluster's pipeline by Eq. (15), NaN for the others, (N,) [s]."""
        return np.array([c.work.pipeline_eq15_s if c else math.nan for c in self.costs.clusters])

    @property
    def pipeline_event_s(self) -> Array:
        """The same, event-simulated with fused chunks, (N,) [s]."""
        return np.array([c.work.pipeline_fused_s if c else math.nan for c in self.costs.clusters])

    @property
    def energy_j(self) -> float:
        """Joules of all devices over the local steps and of all uploads [J]."""
        return self.costs.energy_j


def plan_rounds(
    scenario: Scenario,
    policy: RoundPolicy,
    num_rounds: int,
    *,
    drift: str = "true",
    work: Work = pipeline_work,
    power_control: str = "exact",
    schedule: str = "",
    token_slices: int = 1,
) -> Iterator[PlannedRound]:
    """Plan round after round; each round's true Gamma moves the queues once, Eq. (29).

    Parameters
    ----------
    scenario : the network; its seed gives every policy the same rounds
    policy : decides
    num_rounds : T
    drift : ``true``; or ``printed``, for ``dssda-paper`` alone
    work : function for the work of a step
    power_control : ``exact``, which needs no convex programs; or ``sca``, as in a run
    schedule, token_slices : of the pipelines, see :class:`RoundPlanner`
    """
    planner = RoundPlanner(
        scenario,
        policy,
        drift=drift,
        power_control=power_control,
        schedule=schedule,
        token_slices=token_slices,
    )
    losses = LossTrace(scenario.num_clusters, scenario.seed)
    for number in range(1, num_rounds + 1):
        decision = planner.plan(number, losses.round(number))
        gamma = planner.settle(decision)
        yield PlannedRound(
            **vars(decision),
            costs=round_costs(decision.as_declared(), work),
            gamma=gamma,
            violations=_violations(decision),
        )


def _violations(decision: Decision) -> list[str]:
    matches = [part.match for part in decision.answer.clusters]
    if not any(matches):
        return []
    # The memory of the segments depends on the schedule, which an instance's own C7 ignores.
    broken = violations(replace(decision.instance, gamma0=0.0, gamma_act=0.0), matches)
    for n, match in enumerate(matches):
        if match is not None:
            broken += [f"cluster {n}: {text}" for text in memory_violations(decision.instance, n, decision.plans[n])]
    return broken


class LossTrace:
    """Synthetic training losses: each cluster's level, a slow fall, noise; for ``loss-only``."""

    def __init__(self, num_clusters: int, seed: int) -> None:
        self._seed = seed
        self._level = np.random.default_rng([seed, 0]).uniform(1.0, 3.0, num_clusters)

    def round(self, number: int) -> list[float]:
        """Return the losses of a round, (N,)."""
        noise = np.random.default_rng([self._seed, number]).lognormal(0.0, 0.3, len(self._level))
        return [float(v) for v in self._level * noise / math.sqrt(number)]
