"""Not in the paper: whether Gamma tells how well a run learns whose uploads arrive as distorted as it assumes.

Each upload carries an error of mean square epsilon(p) / phi^2 of its update's own: the share of the sampling error that
Eq. (28) sets beside it. The rest of a round is planned and trained as ever, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from client_pipeline.system.scenario import load_scenario
from flower_app.compare.trained import seeded
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.experiments.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from flower_app.experiments.finished_runs import finished_rows
from flower_app.experiments.one_process import OneProcessRounds
from flower_app.experiments.planning import mean_spread
from flower_app.experiments.rank_correlation import rank_correlation
from flower_app.tasks.base import Score, task
from flower_app.tasks.labelled_task import labels_of
from flower_app.training.network import training_scenario
from strategies.planning.dry_run import PlannedRound, plan_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"gamma_segments": "S²", "gamma_distortion": "ε of uploads", "gamma_waiting": "clusters that wait"}
"""Columns of what Gamma is made of, beside its constant phi^2."""

_SEEDS_TRIED = 200
_NO_EXAMPLE = "gets none of"
"""Of the message of :func:`flower_app.tasks.partition.partition` where a cluster would get no example."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round of each run; ``[figure]`` has ``panel`` and ``distortion``, a factor of epsilon.

    A curve's seeds are the first from its own on with which each cluster has as many examples as a batch. A run is kept
    when it has finished, so the experiment may be interrupted.
    """
    wanted = []
    for curve in curves:
        wanted += [(order, curve, seed) for order, seed in enumerate(_seeds(curve))]
    rows: list[Row] = []
    # All curves of the first seed first: whoever stops early has whole seeds.
    for _, curve, seed in sorted(wanted, key=lambda entry: entry[0]):
        config = seeded(curve.config, seed)
        file = folder / "runs" / f"{curve.name}-seed{seed}.json"
        rows += finished_rows(file, curve, config, partial(_train, curve, config, seed), say)
    yield from rows


def _seeds(curve: Curve) -> list[int]:
    """Return the curve's seeds: the first that give each cluster as many examples as a batch."""
    seeds: list[int] = []
    for i in range(_SEEDS_TRIED):
        config = seeded(curve.config, i)
        # All that decides the shares, and nothing else: they are the same for every policy.
        shared = replace(
            RunConfig(), task=config.task, data=config.data, model=config.model, seed=config.seed,
            scenario=config.scenario, batch_size=config.batch_size,
        )  # fmt: skip
        if _fits(shared):
            seeds.append(i)
        if len(seeds) == curve.seeds:
            return seeds
    raise ValueError(
        f"{curve.name}: expected {curve.seeds} seeds with which each cluster has batch-size = "
        f"{curve.config.batch_size} examples, found {len(seeds)} of {_SEEDS_TRIED}; raise data.dirichlet-alpha"
    )


@cache
def _fits(config: RunConfig) -> bool:
    """Whether each cluster has as many examples as a batch."""
    if config.data.partition == "iid":
        return True
    num_clusters = load_scenario(config.scenario).num_clusters
    try:
        sizes = task(config.task).prepare(config.data, config.model, config.seed, num_clusters).cluster_sizes
    except ValueError as error:
        if _NO_EXAMPLE in str(error):
            return False
        raise
    return min(sizes) >= config.batch_size


def _train(curve: Curve, config: RunConfig, seed: int) -> Iterator[Row]:
    """Plan and train one run."""
    torch.set_num_threads(config.runtime.threads)
    scenario = training_scenario(config)
    planner = make_planner(config, scenario)
    if planner is None:
        raise ValueError(f"{curve.name}: run.strategy: expected a strategy that plans, found {config.strategy}")
    rounds = OneProcessRounds(config, scenario.num_clusters)
    labels = labels_of(rounds.parts.spec)
    classes = [data.collate(range(len(data)))["labels"].numpy() for data in rounds.data]
    shares = np.array([np.bincount(c, minlength=len(labels)) / len(c) for c in classes])
    gammas, parts, losses, selected = [], [], [], []
    virtual_s = 0.0
    for planned in plan_rounds(planner.scenario, planner.policy, config.num_rounds, drift=planner.drift):
        members = [n for n, chosen in enumerate(planned.selected) if chosen]
        ratios = noise_ratios(planned, float(curve.figure["distortion"]), scenario.planner.phi)
        losses.append(rounds.train_round(planned.number, members, ratios))
        virtual_s += planned.costs.latency_s
        gammas.append(planned.gamma)
        parts.append(gamma_parts(planned, scenario.planner.g0, scenario.planner.phi))
        selected.append(planned.selected)
        if planned.number % config.evaluate_every and planned.number != config.num_rounds:
            continue
        score = rounds.evaluate()[0]
        yield {
            "curve": curve.name,
            "label": curve.label,
            "panel": curve.figure["panel"],
            "seed": seed,
            "round": planned.number,
            "virtual_h": virtual_s / 3600,
            "train_loss": float(np.nanmean(losses[-config.evaluate_every :])),
            "loss": score.metrics["loss"],
            "accuracy": 100 * score.metrics["accuracy"],
            "worst_accuracy": 100 * float(np.min(shares @ recalls(score, labels))),
            "gamma": float(np.mean(gammas)),
            "gamma_largest": float(np.max(np.mean(gammas, axis=0))),
            **{name: float(value) for name, value in zip(PARTS, np.mean(parts, axis=0), strict=True)},
            "least_selected": float(np.min(np.mean(selected, axis=0))),
        }


def noise_ratios(planned: PlannedRound, distortion: float, phi: float) -> dict[int, float]:
    """Return of each selected cluster the mean square of its upload's error, as a share of its update's own.

    Parameters
    ----------
    planned : a round, with channels and powers
    distortion : factor of epsilon(p) of Eq. (25); 0: uploads arrive as they were sent
    phi : root mean square of a stochastic gradient's error, for which the update's own size stands
    """
    ratios = {}
    for n, part in enumerate(planned.answer.clusters):
        if part.selected and part.power_w is not None:
            epsilon = float(planned.instance.distortion(n, part.power_w, part.channel))
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


def recalls(score: Score, labels: Sequence[str]) -> np.ndarray:
    """Share of each label's examples that were found, (C,); 0 of a label that does not occur."""
    return np.array(
        [
            np.mean(
                [p == label for p, r in zip(score.predictions, score.references, strict=True) if r == label] or [False]
            )
            for label in labels
        ]
    )


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
        for column in ("gamma", "gamma_largest", *PARTS)
    }
    groups = []
    for seed in seeds:
        # What the fastest of them had time for.
        hours = min(ends[name, seed]["virtual_h"] for name in names)
        groups.append(([ends[n, seed]["gamma"] for n in names], [_loss_at(runs[n, seed], hours) for n in names]))
    return by_column, rank_correlation(groups)


def draw(rows: Sequence[Row]) -> Figure:
    """Loss over virtual time above, last loss over Gamma below, one column for each panel."""
    from flower_app.experiments import style

    panels = distinct(rows, "panel")
    figure, axes = style.figure(4.4 * len(panels), 6.5, 2, len(panels))
    for column, panel in enumerate(panels):
        above, below = axes[column], axes[len(panels) + column]
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
        style.label(above, "virtual time [h]", "validation loss [nat]", panel)
        style.label(below, "mean Γ of all rounds", "validation loss at the end [nat]")
    axes[0].legend(fontsize=7)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Rank correlation of Gamma and the loss for each panel, then what each policy reached."""
    paper_findings = []
    for panel in distinct(rows, "panel"):
        panel_rows = select(rows, panel=panel)
        by_column, at_equal_time = _correlations(panel_rows)
        num_seeds = len(distinct(panel_rows, "seed"))
        parts = [f"{text} {_coefficient(by_column[column])}" for column, text in PARTS.items()]
        paper_findings.append(
            PaperFinding(
                what=f"{panel}: rank correlation of Γ and the loss after {panel_rows[-1]['round']} rounds",
                paper="Γ bounds the loss's distance from its optimum",
                ours=f"{_coefficient(by_column['gamma'])}, {num_seeds} seeds of {len(distinct(panel_rows, 'curve'))} "
                f"policies; at equal virtual time {_coefficient(at_equal_time)}",
                why=f"of Γ's parts: {'; '.join(parts)}; Γ of the cluster that has most "
                f"{_coefficient(by_column['gamma_largest'])}",
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


def _coefficient(found: tuple[float, float]) -> str:
    coefficient, p = found
    return "none, all alike" if np.isnan(coefficient) else f"{coefficient:+.2f} (p = {p:.2g})"


def _spread(ends: Sequence[Row], column: str, digits: int) -> str:
    mean, spread = mean_spread([row[column] for row in ends])
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


EXPERIMENT = Experiment(
    name="gamma", shows="whether the bound Gamma tells how well a run learns", run=run, draw=draw, findings=findings,
    trains=True,
)  # fmt: skip
