"""Figs. 9 and 10: score over S and m at equal seeds, beside what another seed changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.partition.plan import PLAN_FORMAT, even_parts
from client_pipeline.system.channels import NetworkTrace
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from experiments.base.training import SCORES, Training, history, placed, train_all
from flower_app.training.network import training_scenario
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.segment_rules import plan_on_fastest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOOR = 1e-9
"""Position of differences of exactly 0 on a logarithmic axis [nat]."""
_KINDS = ("other S, same m", "other m, same S", "other seed")


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each round of each run.

    ``[figure]`` has ``segments``, one number, ``micro-batches``, a list, and ``score``, a metric of the task. The first
    curve's first run is what the others are held to.
    """
    grid_points = [
        (curve.figure["segments"], m, _training(curve, seed, m, folder))
        for curve in curves
        for seed in range(curve.config.seed, curve.config.seed + curve.seeds)
        for m in curve.figure["micro-batches"]
    ]
    train_all([training for _, _, training in grid_points], folder, say)
    for segments, m, training in grid_points:
        for row in history(training, every_round=True):
            yield {"segments": segments, "m": m, "dropout": training.config.model.dropout} | row


def _training(curve: Curve, seed: int, m: int, folder: Path) -> Training:
    """A run with S segments, even and on the fastest devices of every cluster, and m micro-batches, in every round."""
    config = replace(curve.config, seed=seed)
    scenario = training_scenario(config)
    instance = round_instance(scenario, NetworkTrace(scenario).round(1), Queues.empty(scenario.num_clusters))
    parts = even_parts(instance.L, curve.figure["segments"])
    plans = [plan_on_fastest(instance, n, parts, m).to_dict() for n in range(instance.num_clusters)]
    path = (folder / "plans" / f"{curve.name}-m{m}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": PLAN_FORMAT, "clusters": plans}, indent=1) + "\n", encoding="utf-8")
    named = f"{curve.name}-m{m}-seed{seed}"
    return Training(curve=curve, seed=seed, config=placed(replace(config, plan=str(path)), folder, named))


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by run."""
    rows_by_run: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        rows_by_run.setdefault((row["segments"], row["m"], row["seed"]), []).append(row)
    return list(rows_by_run.values())


def _kind(run_: Sequence[Row], held_to: Sequence[Row]) -> str | None:
    """Return the kind of the only difference from the reference run; None for no difference, or for several."""
    differing_keys = [key for key in ("segments", "m", "seed") if run_[0][key] != held_to[0][key]]
    return (
        dict(zip(("segments", "m", "seed"), _KINDS, strict=True))[differing_keys[0]]
        if len(differing_keys) == 1
        else None
    )


def _middle(rows: Sequence[Row]) -> list[Row]:
    """Return the reference run: the S and m that were trained with most seeds, with their first seed."""
    runs = _runs(rows)
    counts = [sum((r[0]["segments"], r[0]["m"]) == (o[0]["segments"], o[0]["m"]) for o in runs) for r in runs]
    return runs[int(np.argmax(counts))]


def _losses_apart(run_: Sequence[Row], held_to: Sequence[Row]) -> list[float]:
    """By how much the training losses of two runs differ in each round [nat per target]."""
    return [abs(a["train_loss"] - b["train_loss"]) for a, b in zip(run_, held_to, strict=False)]


def draw(rows: Sequence[Row]) -> Figure:
    """Score over m for each S with the spread over seeds, and how far training losses come apart."""
    figure, (score, loss_axes) = style.figure(11, 4.4, columns=2)
    held_to = _middle(rows)
    tested = [row for row in rows if row["test_score"] is not None]
    same_seed = select(tested, seed=held_to[0]["seed"])
    for i, size in enumerate(sorted(distinct(same_seed, "segments"))):
        size_rows = sorted(select(same_seed, segments=size), key=lambda row: row["m"])
        style.curve(score, i, [r["m"] for r in size_rows], [r["test_score"] for r in size_rows], f"S = {size}")
    mean, spread = mean_spread([row["test_score"] for row in _seeds(tested, held_to)])
    score.axhspan(mean - spread, mean + spread, color="0.85", label="mean ± spread over seeds", zorder=0)
    score.set_xscale("log", base=2)
    counts = sorted(distinct(same_seed, "m"))
    score.set_xticks(counts, [str(m) for m in counts])
    metric = SCORES.get(rows[0]["metric"], rows[0]["metric"])
    style.label(score, "micro-batches m", f"{metric}, test set", "equal seeds")
    score.legend(fontsize=8)
    for i, kind in enumerate(_KINDS):
        gaps = [_losses_apart(run_, held_to) for run_ in _runs(rows) if _kind(run_, held_to) == kind]
        if gaps:
            largest = np.maximum(np.max(gaps, axis=0), _FLOOR)
            style.curve(loss_axes, i, range(1, len(largest) + 1), largest.tolist(), kind)
    loss_axes.set_yscale("log")
    held = f"S = {held_to[0]['segments']}, m = {held_to[0]['m']}, seed {held_to[0]['seed']}"
    style.label(
        loss_axes, "round", "largest difference of training losses [nat]", f"against {held}; 0 drawn at {_FLOOR:g}"
    )
    loss_axes.legend(fontsize=8)
    return figure


def _seeds(tested: Sequence[Row], held_to: Sequence[Row]) -> list[Row]:
    return select(tested, segments=held_to[0]["segments"], m=held_to[0]["m"])


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Return the changes of score and loss that S, m and the seed each make."""
    held_to = _middle(rows)
    tested = [row for row in rows if row["test_score"] is not None]
    metric = SCORES.get(rows[0]["metric"], rows[0]["metric"])
    masks = ", and draw other masks of dropout" if rows[0]["dropout"] else ""
    whys = {
        _KINDS[0]: "a synchronous pipeline gives the same gradient for every S, to the last bit where m is the same",
        _KINDS[1]: f"other micro-batches add up in another order{masks}",
        _KINDS[2]: "another start, data order and share of the data",
    }
    papers = {
        _KINDS[0]: "the score changes with S",
        _KINDS[1]: "the score changes with m",
        _KINDS[2]: "not given: one run each",
    }
    reference_score = held_to[-1]["test_score"]
    paper_findings = []
    for kind in _KINDS:
        kind_runs = [run_ for run_ in _runs(rows) if _kind(run_, held_to) == kind]
        if not kind_runs:
            continue
        scores = [abs(run_[-1]["test_score"] - reference_score) for run_ in kind_runs]
        losses = [max(_losses_apart(run_, held_to)) for run_ in kind_runs]
        paper_findings.append(
            PaperFinding(
                what=f"{kind}: largest difference from S = {held_to[0]['segments']}, m = {held_to[0]['m']}",
                paper=papers[kind],
                ours=f"{metric} {max(scores):.2g}, training loss {max(losses):.1e} nat, {len(kind_runs)} runs",
                why=whys[kind],
            )
        )
    mean, spread = mean_spread([row["test_score"] for row in _seeds(tested, held_to)])
    grid = [row["test_score"] for row in select(tested, seed=held_to[0]["seed"])]
    paper_findings.append(
        PaperFinding(
            what=f"{metric} over the whole grid at one seed, and over seeds at one S and m",
            paper="there is a best S and m",
            ours=f"grid {min(grid):.1f} to {max(grid):.1f}; seeds {mean:.1f} ± {spread:.1f}",
            why="what remains of a difference between S and m is no larger than that between seeds"
            if max(grid) - min(grid) <= 2 * spread
            else "the grid spreads wider than two standard deviations of the seeds: other micro-batches "
            f"add up in another order{masks}",
        )
    )
    return paper_findings


FIG9 = Experiment(
    name="fig9", shows="score over S and m, Transformer", run=run, draw=draw, findings=findings, trains=True
)
FIG10 = Experiment(name="fig10", shows="score over S and m, BERT", run=run, draw=draw, findings=findings, trains=True)
