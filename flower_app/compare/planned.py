"""Policies beside each other, on planning alone: the same networks, rounds and seeds for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from client_pipeline.system.scenario import Scenario
from flower_app.compare.columns import four_digits
from strategies.dssda.planner import plan_round
from strategies.planning.dry_run import PlannedRound, plan_rounds
from strategies.planning.policies import make_policy
from strategies.planning.policy import RoundPolicy

_MOST_CLUSTERS = 12
"""Clusters whose shares stand in a table one by one."""
FIGURES_LEGEND = {
    "policy": "who plans; means over networks and rounds without the first quarter, ± their deviation over networks",
    "latency s": "of a round, pipelines by Eq. (15) [s]",
    "90 %": "90th percentile of it [s]",
    "event s": "latency of a round, pipelines simulated event by event [s]",
    "step s": "one step of a selected cluster's pipeline, Eq. (15) [s]",
    "Γ": "convergence bound, mean over the clusters",
    "largest Γ": "bound of the cluster that has most; ! where it exceeds the threshold of C10",
    "energy J": "devices and uploads of a round [J]",
    "gap": "cost above the certified optimum of the same round's problem",
    "broken": "share of the rounds with a broken constraint",
    "no plan": "share of the rounds without any plan",
    "selected %": "share of the rounds in which each cluster trained",
}
"""Column of the table of figures -> its meaning."""


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
    """Largest Γ of a cluster, mean over the networks: C10 holds each cluster to the threshold."""
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
    """Share of the rounds in which no cluster had a plan."""
    networks: tuple[PolicyFigures, ...] = ()
    """The same of each network, which has none of its own."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; NaN becomes null."""
        means = {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in vars(self).items()}
        return means | {"networks": [network.to_dict() for network in self.networks]}

    def with_spread(self, name: str) -> str:
        """A figure, with its standard deviation over the networks where there are several."""
        text = four_digits(getattr(self, name))
        if len(self.networks) < 2:
            return text
        spread = np.std([getattr(network, name) for network in self.networks], ddof=1)
        return f"{text} ± {four_digits(float(spread))}"


def named_policies(names: str, plan_file: str = "") -> list[Callable[[int], RoundPolicy]]:
    """Makers of the policies of a list with commas; ``random+optimal`` is ``random`` with optimal segments.

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name, or ``fixed`` without a plan file; before anything is planned.
    """
    makers: list[Callable[[int], RoundPolicy]] = []
    for entry in names.split(","):

        def make(seed: int, name: str = entry.strip()) -> RoundPolicy:
            return make_policy(name, plan_file=plan_file, seed=seed)

        make(0)
        makers.append(make)
    return makers


def compare_policies(
    scenarios: Sequence[Scenario],
    policies: Sequence[Callable[[int], RoundPolicy]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PolicyFigures]:
    """Run every policy over the same rounds."""
    figures = []
    for make in policies:
        networks: list[list[tuple[PlannedRound, float]]] = []
        for scenario in scenarios:
            policy = make(scenario.seed)
            progress(f"{policy.name}, seed {scenario.seed}")
            counted = list(plan_rounds(scenario, policy, num_rounds))[num_rounds // 4 :]
            networks.append([(r, _gap(r) if any(r.selected) else float("nan")) for r in counted])
        gamma_max = scenarios[0].planner.threshold
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
    """Return a decision's gap to the certified optimum of its round, queues included; NaN without one."""
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
    """One row a policy; :data:`FIGURES_LEGEND` says what the columns are."""
    table = Table(box=None)
    for name in FIGURES_LEGEND:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for f in figures:
        over = "" if f.largest_gamma <= f.gamma_max else " !"
        table.add_row(
            f.name,
            f.with_spread("latency_s"),
            four_digits(f.latency_p90_s),
            f.with_spread("latency_event_s"),
            four_digits(f.pipeline_s),
            four_digits(f.gamma),
            f"{f.with_spread('largest_gamma')}{over}",
            f.with_spread("energy_j"),
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
