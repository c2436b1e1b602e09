"""Not in the paper: more clusters, clusters that fail in a round, and clusters that are away for many.

Rounds are planned, and trained as those of :mod:`flower_app.experiments.gamma`. A cluster that fails has been planned
and is waited for, but its gradient is in no mean, and its queue is that of a cluster without a channel. One that is
away is known to be, and not planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.experiments.bags_of_words import BagsOfWords, averaged_gradient
from flower_app.experiments.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from flower_app.experiments.finished_runs import rows_seed_by_seed
from flower_app.experiments.gamma import noise_ratios
from flower_app.experiments.planning import mean_spread
from flower_app.training.network import training_scenario
from strategies.planning.costs import pipeline_work, round_costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AWAY = "away"


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round of each run.

    ``[figure]``: ``seeds``; ``alpha``, ``ridge`` and ``step`` as for gamma; ``dropouts``, chances that a selected
    cluster fails in a round; ``away``, share of the clusters that are away in the middle third of the rounds, in a run
    of its own. A run is kept when it has finished, so the experiment may be interrupted.
    """
    yield from rows_seed_by_seed(curves, folder, _cases, say)


def _cases(curve: Curve, config: RunConfig, seed: int) -> Iterator[Row]:
    """Every case of a network and a seed."""
    torch.set_num_threads(config.runtime.threads)
    figure = curve.figure
    num_clusters = training_scenario(config).num_clusters
    problem = BagsOfWords(config, num_clusters, float(figure["alpha"]), float(figure["ridge"]))
    for chance in figure["dropouts"]:
        case = f"{100 * chance:g} % fail"
        for row in _train(problem, config, float(figure["step"]), float(chance), 0.0):
            yield {"curve": curve.name, "label": curve.label, "case": case, "seed": seed, **row}
    case = f"{100 * figure['away']:g} % {_AWAY}"
    for row in _train(problem, config, float(figure["step"]), 0.0, float(figure["away"])):
        yield {"curve": curve.name, "label": curve.label, "case": case, "seed": seed, **row}


def _train(problem: BagsOfWords, config: RunConfig, step: float, chance: float, away: float) -> Iterator[Row]:
    """Plan and train one case."""
    scenario = training_scenario(config)
    planner = make_planner(config, scenario)
    if planner is None:
        raise ValueError(f"run.strategy: expected a strategy that plans, found {config.strategy}")
    settings, num_clusters, num_rounds = scenario.planner, scenario.num_clusters, config.num_rounds
    w_DC = problem.start()
    eta, sampling = step / problem.smoothness, problem.sampling_error(w_DC)
    gammas, gaps, idle, virtual_s = [], [], 0, 0.0
    for number in range(1, num_rounds + 1):
        absent = dict.fromkeys(absent_clusters(num_clusters, away, number, num_rounds), _AWAY)
        decision = planner.plan(number, [0.0] * num_clusters, absent)
        draws = np.random.default_rng([config.seed, number]).random(num_clusters)
        trained = [n for n, chosen in enumerate(decision.selected) if chosen and draws[n] >= chance]
        gammas.append(planner.settle(decision, trained))
        gaps.append(decision.answer.gap or 0.0)
        # Whoever fails is waited for.
        virtual_s += round_costs(decision, pipeline_work).latency_s
        ratios = noise_ratios(decision.instance, decision.answer, 1.0, settings.phi)
        if trained:
            errors = {n: ratios[n] * sampling for n in trained}
            w_DC = w_DC - eta * averaged_gradient(problem, w_DC, errors, config.seed, number)
        else:
            idle += 1
        if number % config.evaluate_every == 0:
            accuracies = [100 * accuracy for accuracy in problem.accuracies(w_DC)]
            yield {
                "round": number,
                "clusters": num_clusters,
                "virtual_h": virtual_s / 3600,
                "loss": problem.objective(w_DC),
                "accuracy": float(np.mean(accuracies)),
                "gamma": float(np.mean(gammas)),
                "gamma_largest": float(np.max(np.mean(gammas, axis=0))),
                "gamma_max": settings.gamma_max,
                "largest_gap": max(gaps),
                "idle_rounds": idle,
            }


def absent_clusters(num_clusters: int, away: float, number: int, num_rounds: int) -> range:
    """Clusters that are away in a round: in the middle third of the rounds the first of them, at least one."""
    if not away or not num_rounds < 3 * number <= 2 * num_rounds:
        return range(0)
    return range(max(1, round(away * num_clusters)))


def draw(rows: Sequence[Row]) -> Figure:
    """Loss over the rounds, one panel for each number of clusters."""
    from flower_app.experiments import style

    names = distinct(rows, "curve")
    figure, axes = style.figure(4 * len(names), 3.8, columns=len(names))
    for axis, name in zip(axes, names, strict=True):
        curve_rows = select(rows, curve=name)
        for i, case in enumerate(distinct(curve_rows, "case")):
            case_rows = select(curve_rows, case=case)
            table = np.array([[r["loss"] for r in select(case_rows, seed=s)] for s in distinct(case_rows, "seed")])
            spread = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else ()
            style.curve(axis, i, distinct(case_rows, "round"), table.mean(axis=0).tolist(), case, spread)
        style.label(axis, "round", "F(w) [nat]", curve_rows[0]["label"])
    axes[0].legend(fontsize=8)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Each case against the same network without any failure, seed by seed."""
    paper_findings = []
    for name in distinct(rows, "curve"):
        ends = select(rows, curve=name, round=max(row["round"] for row in select(rows, curve=name)))
        cases = distinct(ends, "case")
        undisturbed = {row["seed"]: row for row in select(ends, case=cases[0])}
        for case in cases:
            case_rows = select(ends, case=case)
            loss, spread = mean_spread([row["loss"] for row in case_rows])
            more, more_spread = mean_spread([row["loss"] - undisturbed[row["seed"]]["loss"] for row in case_rows])
            against = "" if case == cases[0] else f", {more:+.4f} ± {more_spread:.4f} against none"
            gamma, gamma_spread = mean_spread([row["gamma_largest"] for row in case_rows])
            over = sum(row["gamma_largest"] > row["gamma_max"] for row in case_rows)
            hours, hours_spread = mean_spread([row["virtual_h"] for row in case_rows])
            paper_findings.append(
                PaperFinding(
                    what=f"{ends[0]['label']}, {case}: loss after {ends[0]['round']} rounds",
                    paper="-",
                    ours=f"{loss:.3f} ± {spread:.3f} nat{against}; {hours:.2f} ± {hours_spread:.2f} virtual hours",
                    why=f"Γ of the cluster that has most {gamma:.2f} ± {gamma_spread:.2f}, threshold "
                    f"{ends[0]['gamma_max']:g}, over it with {over} of {len(case_rows)} seeds; largest gap of a plan "
                    f"{max(row['largest_gap'] for row in case_rows):.0e}; rounds that taught nobody: "
                    f"{sum(row['idle_rounds'] for row in case_rows)}",
                )
            )
    return paper_findings


EXPERIMENT = Experiment(
    name="robustness", shows="more clusters, and clusters that fail or are away", run=run, draw=draw,
    findings=findings, trains=True,
)  # fmt: skip
