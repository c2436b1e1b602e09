"""Not in the paper: whether Gamma tells how well a run learns whose uploads arrive as distorted as it assumes.

Rounds are planned as for Fig. 11 and trained as Theorem 1 has it: one step of SGD, w <- w - eta mean (g_n + e_n) over
the clusters that have a channel. The error e_n of an upload has the mean square that Eq. (28) sets beside the sampling
error: epsilon(p) phi_w^2 / phi^2, with phi_w that of the gradients at the start, and phi the scenario's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from experiments.bags_of_words import BagsOfWords, averaged_gradient
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.finished_runs import rows_seed_by_seed
from experiments.base.planning import mean_spread
from experiments.rank_correlation import rank_correlation
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.training.network import training_scenario
from strategies.dssda.answer import Answer
from strategies.dssda.instance import Instance
from strategies.planning.dry_run import PlannedRound, plan_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"gamma_segments": "S²", "gamma_distortion": "ε of uploads", "gamma_waiting": "clusters that wait"}
"""Columns of what Gamma is made of, beside its constant phi^2."""
_COLUMNS = 3
"""Panels of the picture beside each other."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round of each run.

    ``[figure]``: ``seeds``; ``alphas`` of the data's Dirichlet partition, 0 for IID; ``distortions``, factors of
    epsilon(p); ``step``, eta times beta; ``ridge``. What a policy plans for a seed is trained with each alpha and
    distortion, and kept: so the experiment may be interrupted.
    """
    yield from rows_seed_by_seed(curves, folder, _planned_and_trained, say)


def _planned_and_trained(curve: Curve, config: RunConfig, seed: int) -> Iterator[Row]:
    """Plan a policy's rounds, and train them in every way."""
    torch.set_num_threads(config.runtime.threads)
    scenario = training_scenario(config)
    planner = make_planner(config, scenario)
    if planner is None:
        raise ValueError(f"{curve.name}: run.strategy: expected a strategy that plans, found {config.strategy}")
    settings = scenario.planner
    rounds = list(plan_rounds(planner.scenario, planner.policy, config.num_rounds, drift=planner.drift))
    plan_rows = list(_plan_rows(rounds, settings.g0, settings.phi, config.evaluate_every))
    for alpha in curve.figure["alphas"]:
        problem = BagsOfWords(config, scenario.num_clusters, float(alpha), float(curve.figure["ridge"]))
        for distortion in curve.figure["distortions"]:
            panel = f"{f'Dirichlet {alpha:g}' if alpha else 'IID'}, {distortion:g} ε"
            errors = [noise_ratios(r.instance, r.answer, float(distortion), settings.phi) for r in rounds]
            trained = _train(problem, errors, float(curve.figure["step"]), config.evaluate_every, config.seed)
            for plan_row, learned in zip(plan_rows, trained, strict=True):
                yield {"curve": curve.name, "label": curve.label, "panel": panel, "seed": seed, **plan_row, **learned}


def _plan_rows(rounds: Sequence[PlannedRound], g0: float, phi: float, every: int) -> Iterator[Row]:
    """Yield the plan's figures at each scored round; Gamma is the mean of all rounds so far."""
    parts = np.array([gamma_parts(planned, g0, phi) for planned in rounds])
    gammas = np.array([planned.gamma for planned in rounds])
    selected = np.array([planned.selected for planned in rounds])
    hours = np.cumsum([planned.costs.latency_s for planned in rounds]) / 3600
    for t in range(every, len(rounds) + 1, every):
        yield {
            "round": t,
            "virtual_h": float(hours[t - 1]),
            "gamma": float(gammas[:t].mean()),
            "gamma_largest": float(gammas[:t].mean(axis=0).max()),
            **{name: float(value) for name, value in zip(PARTS, parts[:t].mean(axis=0), strict=True)},
            "least_selected": float(selected[:t].mean(axis=0).min()),
        }


def _train(
    problem: BagsOfWords, errors: Sequence[dict[int, float]], step: float, every: int, seed: int
) -> Iterator[Row]:
    """Train round after round; ``errors`` has of each round the clusters that train, and their uploads' ratios."""
    w_DC = problem.start()
    eta, sampling = step / problem.smoothness, problem.sampling_error(w_DC)
    for number, ratios in enumerate(errors, 1):
        squares = {n: ratio * sampling for n, ratio in ratios.items()}
        w_DC = w_DC - eta * averaged_gradient(problem, w_DC, squares, seed, number)
        if number % every == 0:
            accuracies = [100 * accuracy for accuracy in problem.accuracies(w_DC)]
            yield {
                "loss": problem.objective(w_DC),
                "accuracy": float(np.mean(accuracies)),
                "worst_accuracy": min(accuracies),
            }


def noise_ratios(instance: Instance, answer: Answer, distortion: float, phi: float) -> dict[int, float]:
    """Return of each selected cluster the mean square of its upload's error, as a share of the sampling error's.

    Parameters
    ----------
    instance, answer : a round's problem, and its channels and powers
    distortion : factor of epsilon(p) of Eq. (25); 0: uploads arrive as they were sent
    phi : root mean square of a stochastic gradient's error, the scenario's
    """
    ratios = {}
    for n, part in enumerate(answer.clusters):
        if part.selected and part.power_w is not None:
            epsilon = float(instance.distortion(n, part.power_w, part.channel))
            ratios[n] = distortion * epsilon / phi**2
    return ratios


def gamma_parts(planned: PlannedRound, g0: float, phi: float) -> tuple[float, float, float]:
    """Split the mean of Gamma over the clusters, without phi^2, into the parts of :data:`PARTS`."""
    parts = np.zeros((len(planned.gamma), 3))
    num_blocks = planned.instance.L
    for n, part in enumerate(planned.answer.clusters):
        rest = float(planned.gamma[n]) - g0 * phi**2
        if part.selected and part.choice is not None:
            parts[n, 0] = g0 * phi**2 * part.choice.num_segments**2 / num_blocks
            parts[n, 1] = rest - parts[n, 0]
        else:
            parts[n, 2] = rest
    segments, uploads, waiting = parts.mean(axis=0)
    return float(segments), float(uploads), float(waiting)


def _last(rows: Sequence[Row]) -> list[Row]:
    """Rows after the last round."""
    return select(rows, round=max(row["round"] for row in rows))


def _loss_at(run_rows: Sequence[Row], hours: float) -> float:
    """Loss of a run at a virtual time, between two scores in proportion [nat]."""
    return float(np.interp(hours, [row["virtual_h"] for row in run_rows], [row["loss"] for row in run_rows]))


def _correlations(panel_rows: Sequence[Row]) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Rank correlation of the columns of Gamma with the last loss, and of Gamma with the loss at equal virtual time."""
    names, seeds = distinct(panel_rows, "curve"), distinct(panel_rows, "seed")
    runs = {(name, seed): select(panel_rows, curve=name, seed=seed) for name in names for seed in seeds}
    ends = {key: run_rows[-1] for key, run_rows in runs.items()}
    by_column = {
        column: rank_correlation(
            [([ends[n, s][column] for n in names], [ends[n, s]["loss"] for n in names]) for s in seeds]
        )
        for column in ("gamma", "gamma_largest", "least_selected", *PARTS)
    }
    groups = []
    for seed in seeds:
        # What the fastest of them had time for.
        hours = min(ends[name, seed]["virtual_h"] for name in names)
        groups.append(([ends[n, seed]["gamma"] for n in names], [_loss_at(runs[n, seed], hours) for n in names]))
    return by_column, rank_correlation(groups)


def draw(rows: Sequence[Row]) -> Figure:
    """Loss over virtual time above, last loss over Gamma below, one column for each panel."""
    panels = distinct(rows, "panel")
    figure, pairs = style.pairs_of_axes(len(panels), height=6.5, abreast=_COLUMNS)
    for panel, (above, below) in zip(panels, pairs, strict=True):
        panel_rows = select(rows, panel=panel)
        for i, name in enumerate(distinct(panel_rows, "curve")):
            curve_rows = select(panel_rows, curve=name)
            ends = _last(curve_rows)
            for seed in distinct(curve_rows, "seed"):
                run_rows = select(curve_rows, seed=seed)
                text = run_rows[0]["label"] if seed == curve_rows[0]["seed"] else ""
                hours, losses = ([row[key] for row in run_rows] for key in ("virtual_h", "loss"))
                style.curve(above, i, hours, losses, text)
            gammas, losses = ([row[key] for row in ends] for key in ("gamma", "loss"))
            below.plot(gammas, losses, style.MARKERS[i], color=f"C{i}")
        style.label(above, "virtual time [h]", "F(w) [nat]", panel)
        style.label(below, "mean Γ of all rounds", "F(w) at the end [nat]")
    pairs[0][0].legend(fontsize=7)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Rank correlation of Gamma and the loss for each panel, then what each policy reached."""
    paper_findings = []
    for panel in distinct(rows, "panel"):
        panel_rows = select(rows, panel=panel)
        by_column, at_equal_time = _correlations(panel_rows)
        num_seeds = len(distinct(panel_rows, "seed"))
        parts = [f"{text} {_coefficient(by_column[column])}" for column, text in PARTS.items()]
        ends = _last(panel_rows)
        apart = [np.ptp([row["loss"] for row in select(ends, seed=seed)]) for seed in distinct(ends, "seed")]
        paper_findings.append(
            PaperFinding(
                what=f"{panel}: rank correlation of Γ and the loss after {panel_rows[-1]['round']} rounds",
                paper="Γ bounds the loss's distance from its optimum",
                ours=f"{_coefficient(by_column['gamma'])}, {num_seeds} seeds of {len(distinct(panel_rows, 'curve'))} "
                f"policies whose losses are {np.mean(apart):.4f} nat apart; at equal virtual time "
                f"{_coefficient(at_equal_time)}",
                why=f"of Γ's parts: {'; '.join(parts)}; Γ of the cluster that has most "
                f"{_coefficient(by_column['gamma_largest'])}; how often the cluster that trains least does "
                f"{_coefficient(by_column['least_selected'])}",
            )
        )
        for name in distinct(panel_rows, "curve"):
            ends = _last(select(panel_rows, curve=name))
            paper_findings.append(
                PaperFinding(
                    what=f"{panel}: {ends[0]['label']}",
                    paper="-",
                    ours=f"loss {_spread(ends, 'loss', 3)} nat, accuracy {_spread(ends, 'accuracy', 1)} %, of the "
                    f"worst cluster {_spread(ends, 'worst_accuracy', 1)} %",
                    why=f"Γ {_spread(ends, 'gamma', 2)}, of the cluster that has most "
                    f"{_spread(ends, 'gamma_largest', 2)}; {_spread(ends, 'virtual_h', 2)} virtual hours; the cluster "
                    f"that trains least is in {100 * float(np.mean([r['least_selected'] for r in ends])):.0f} % of the "
                    "rounds",
                )
            )
    return paper_findings


def _coefficient(with_p: tuple[float, float]) -> str:
    coefficient, p = with_p
    return "none, all alike" if np.isnan(coefficient) else f"{coefficient:+.2f} (p = {p:.2g})"


def _spread(ends: Sequence[Row], column: str, digits: int) -> str:
    mean, spread = mean_spread([row[column] for row in ends])
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


EXPERIMENT = Experiment(
    name="gamma", shows="whether the bound Gamma tells how well a run learns", run=run, draw=draw, findings=findings,
    trains=True,
)  # fmt: skip
