"""Policies beside each other, on planning alone: the same networks, rounds and seeds for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

from client_pipeline.system.scenario import Scenario
from strategies.dssda.planner import plan_round
from strategies.planning.dry_run import PlannedRound, plan_rounds
from strategies.planning.policies import make_policy
from strategies.planning.policy import RoundPolicy

_MOST_CLUSTERS = 12
"""Clusters whose shares stand in a table one by one."""


@dataclass(frozen=True, kw_only=True)
class PolicyFigures:
    """Means over seeds and rounds; the first quarter of the rounds, while the queues fill, does not count."""

    name: str
    latency_s: float
    """Round latency, pipelines by Eq. (15) [s]."""
    latency_p90_s: float
    """90th percentile of it [s]."""
    latency_event_s: float
    """Round latency, pipelines event-simulated [s]."""
    pipeline_s: float
    """One step of a selected cluster's pipeline, Eq. (15) [s]."""
    pipeline_event_s: float
    """The same, event-simulated [s]."""
    gamma: float
    """Convergence bound, mean over the clusters."""
    largest_gamma: float
    """Of the cluster that has most, mean over the networks: C10 holds each cluster to the threshold."""
    gamma_max: float
    """The threshold."""
    energy_j: float
    """Devices and uploads of a round [J]."""
    selected_share: list[float]
    """Share of the rounds in which each cluster was selected."""
    gap: float
    """Cost above the certified optimum of the same round's problem, relative to it."""
    violated_share: float
    """Share of the rounds with a broken constraint."""
    infeasible_share: float
    """Share of the rounds in which nobody had a plan."""
    networks: tuple[PolicyFigures, ...] = ()
    """The same of each network, which has none of its own."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; NaN becomes null."""
        means = {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in vars(self).items()}
        return means | {"networks": [network.to_dict() for network in self.networks]}

    def with_spread(self, name: str, digits: int) -> str:
        """A figure, with its standard deviation over the networks where there are several."""
        text = f"{getattr(self, name):.{digits}f}"
        if len(self.networks) < 2:
            return text
        return f"{text} ± {np.std([getattr(network, name) for network in self.networks], ddof=1):.{digits}f}"


def named_policies(names: str, plan_file: str = "") -> list[Callable[[int], RoundPolicy]]:
    """Makers of the policies of a list with commas; ``random+optimal`` is ``random`` with optimal segments.

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name, or ``fixed`` without a plan file; before anything is planned.
    """
    makers: list[Callable[[int], RoundPolicy]] = []
    for entry in names.split(","):
        make = partial(_make, entry.strip(), plan_file)
        make(0)
        makers.append(make)
    return makers


def _make(name: str, plan_file: str, seed: int) -> RoundPolicy:
    return make_policy(name, plan_file=plan_file, seed=seed)


def compare_policies(
    scenarios: Sequence[Scenario],
    policies: Sequence[Callable[[int], RoundPolicy]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PolicyFigures]:
    """Run every policy over the same rounds.

    Parameters
    ----------
    scenarios : one network with different seeds
    policies : each makes a policy from a seed
    num_rounds : T of each network
    progress : told what is being planned
    """
    figures = []
    for make in policies:
        networks: list[list[tuple[PlannedRound, float]]] = []
        for scenario in scenarios:
            policy = make(scenario.seed)
            progress(f"{policy.name}, seed {scenario.seed}")
            counted = list(plan_rounds(scenario, policy, num_rounds))[num_rounds // 4 :]
            networks.append([(r, _gap(r) if any(r.selected) else float("nan")) for r in counted])
        gamma_max = scenarios[0].planner.gamma_max
        by_network = tuple(_figures(policy.name, [network], gamma_max) for network in networks)
        figures.append(replace(_figures(policy.name, networks, gamma_max), networks=by_network))
    return figures


def _figures(name: str, networks: list[list[tuple[PlannedRound, float]]], gamma_max: float) -> PolicyFigures:
    """Means over the rounds of some networks; beside each round its gap."""
    rounds = [r for network in networks for r, _ in network]
    rounds_with_clusters = [r for r in rounds if any(r.selected)]

    def mean(values: list[float]) -> float:
        return float(np.mean(values)) if values else float("nan")

    latency = [r.latency_s for r in rounds_with_clusters]
    return PolicyFigures(
        name=name,
        latency_s=mean(latency),
        latency_p90_s=float(np.percentile(latency, 90)) if latency else float("nan"),
        latency_event_s=mean([r.latency_event_s for r in rounds_with_clusters]),
        pipeline_s=mean([float(np.nanmean(r.pipeline_s)) for r in rounds_with_clusters]),
        pipeline_event_s=mean([float(np.nanmean(r.pipeline_event_s)) for r in rounds_with_clusters]),
        gamma=mean([float(np.mean(r.gamma)) for r in rounds]),
        largest_gamma=mean([float(np.mean([r.gamma for r, _ in network], axis=0).max()) for network in networks]),
        gamma_max=gamma_max,
        energy_j=mean([r.energy_j for r in rounds_with_clusters]),
        selected_share=[float(v) for v in np.mean([r.selected for r in rounds], axis=0)],
        gap=mean([gap for network in networks for r, gap in network if any(r.selected)]),
        violated_share=mean([float(bool(r.violations)) for r in rounds_with_clusters]),
        infeasible_share=1 - len(rounds_with_clusters) / len(rounds),
    )


def _gap(planned_round: PlannedRound) -> float:
    """Of a decision to the certified optimum of its own round, queues included; NaN where there is none."""
    cost = planned_round.answer.objective
    if cost is None:
        return float("nan")
    answer = planned_round.answer
    divides = any(part.band_hz is not None for part in answer.clusters)
    best = answer if divides or answer.status == "optimal" else plan_round(planned_round.instance)
    if best.lower_bound is None:
        return float("nan")
    return (cost - best.lower_bound) / max(abs(best.lower_bound), 1e-12)


def figures_table(figures: Sequence[PolicyFigures]) -> Table:
    """One row a policy."""
    table = Table(box=None)
    table.add_column("policy")
    names = (
        "latency s",
        "90 %",
        "event s",
        "step s",
        "Γ",
        "largest Γ",
        "energy J",
        "gap",
        "broken",
        "no plan",
        "selected %",
    )
    for name in names:
        table.add_column(name, justify="right")
    for f in figures:
        over = "" if f.largest_gamma <= f.gamma_max else " !"
        table.add_row(
            f.name,
            f.with_spread("latency_s", 1),
            f"{f.latency_p90_s:.1f}",
            f.with_spread("latency_event_s", 1),
            f"{f.pipeline_s:.1f}",
            f"{f.gamma:.3f}",
            f"{f.with_spread('largest_gamma', 3)}{over}",
            f.with_spread("energy_j", 0),
            f"{f.gap:.1%}",
            f"{f.violated_share:.0%}",
            f"{f.infeasible_share:.0%}",
            shares_text(f.selected_share),
        )
    return table


def shares_text(shares: Sequence[float]) -> str:
    """Percent of the rounds in which each cluster trained; of many clusters the least, the mean and the most."""
    if len(shares) > _MOST_CLUSTERS:
        return f"{100 * min(shares):.0f} to {100 * max(shares):.0f}, mean {100 * float(np.mean(shares)):.0f}"
    return " ".join(f"{100 * share:.0f}" for share in shares)
