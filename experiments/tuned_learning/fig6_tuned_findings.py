"""Findings and picture of Fig. 6 with tuned learning rates: differences by seed, costs to a common loss, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from experiments.base.training import SCORES
from flower_app.compare.paired_interval import paired_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VALIDATION, FRESH = "validation", "fresh"
"""Parts of the rows: runs that choose a learning rate, and runs of other seeds with the one that was chosen."""
_PANELS = ("translation", "entities", "classes")
_GAINS = {"translation": "BLEU +19.5 % at most", "entities": "accuracy +2.76 % at most", "classes": ""}
_EARLY = {"translation": "no significant difference", "entities": "faster early on"}
"""By task: what the paper says of the training loss."""
_CLASS_GAINS = {"pipeline": "accuracy +1.82 %", "vanilla-fl": "accuracy +0.15 % over TITANIC"}
_WHAT = {
    "vanilla-fl": "whole models, averaged after each round: how CollaPipe with decoder-sync = round, VanillaFL and "
    "TITANIC learn, all three alike",
    "pipeline": "each cluster alone on its share, until its model has seen as many examples as the joint one; the "
    "first cluster's stands for all",
    "FedAdam": "whole models, the server takes FedAdam's step from their mean; both learning rates tuned",
}
"""By strategy: how it learns."""
_COSTS = {"hours": "time", "kilojoules": "energy", "megabytes": "uplink bytes"}
"""Columns of what a round costs."""


def panels_of(rows: Sequence[Row]) -> list[str]:
    """Tasks in the paper's order, then others."""
    names = distinct(rows, "panel")
    return sorted(names, key=lambda panel: _PANELS.index(panel) if panel in _PANELS else len(_PANELS))


def last_test_scores(curve_rows: Sequence[Row]) -> dict[int, float]:
    """Scores on the test set by seed."""
    return {row["seed"]: row["test_score"] for row in select(curve_rows, part=FRESH) if row["test_score"] is not None}


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """For each task the rates, CollaPipe's score against each other way to learn, and the costs to a common loss."""
    paper_findings = []
    for panel in panels_of(rows):
        panel_rows = select(rows, panel=panel)
        names = distinct(panel_rows, "curve")
        paper_findings.append(_rates(panel, panel_rows, names))
        first_rows = select(panel_rows, curve=names[0])
        paper_findings += [_difference(panel, first_rows, select(panel_rows, curve=name)) for name in names[1:]]
        paper_findings += [_on_the_way(panel, first_rows, select(panel_rows, curve=name)) for name in names[1:2]]
        paper_findings += _costs(panel, select(panel_rows, part=FRESH))
    return paper_findings


def _rates(panel: str, panel_rows: Sequence[Row], names: Sequence[str]) -> PaperFinding:
    """Return the learning rates that were chosen, and CollaPipe's score with its own."""
    parts, tried = [], []
    for name in names:
        tuning_rows = select(panel_rows, curve=name, part=VALIDATION)
        [best] = select(tuning_rows, chosen=1)
        server = "" if best["server_lr"] is None else f", server {best['server_lr']:.3g}"
        parts.append(f"{best['label']} {best['lr']:.3g}{server}")
        scores = "; ".join(f"{_rate_text(row)}: {_score_text(row['score'])}" for row in tuning_rows)
        tried.append(f"{best['label']} {scores}")
    first_rows = select(panel_rows, curve=names[0])
    mean, spread = mean_spread(list(last_test_scores(first_rows).values()))
    metric = SCORES.get(first_rows[0]["metric"], first_rows[0]["metric"])
    return PaperFinding(
        what=f"{panel}: tuned learning rates; {metric} of {first_rows[0]['label']}",
        paper="one run each, no rates printed",
        ours=f"{'; '.join(parts)}. {mean:.1f} ± {spread:.1f} after {max(r['examples'] for r in first_rows)} examples "
        f"of each cluster, {len(last_test_scores(first_rows))} seeds",
        why=f"{metric} on the validation seed: {', '.join(tried)}",
    )


def _rate_text(row: Row) -> str:
    return f"{row['lr']:.3g}" + ("" if row["server_lr"] is None else f" with {row['server_lr']:.3g}")


def _score_text(score: float | None) -> str:
    return "diverged" if score is None else f"{score:.1f}"


def _difference(panel: str, first_rows: Sequence[Row], other_rows: Sequence[Row]) -> PaperFinding:
    """Score of CollaPipe against another way to learn: fresh seeds in pairs, and what tuning did to it."""
    scores = last_test_scores(other_rows)
    interval = paired_interval(last_test_scores(first_rows), scores)
    base = float(np.mean(list(scores.values()))) if scores else float("nan")
    verdict = ("ahead" if interval.mean > 0 else "behind") if interval.leaves_out_zero else "within the noise"
    what = other_rows[0]["what"]
    gain = _CLASS_GAINS.get(what, "-") if panel == "classes" else _GAINS.get(panel, "-")
    return PaperFinding(
        what=f"{panel}: {first_rows[0]['label']} against {other_rows[0]['label']}",
        paper=gain if what != "FedAdam" else "-",
        ours=f"{interval.mean:+.1f} points of {base:.1f}, 95 % interval {interval.low:+.1f} to {interval.high:+.1f}, "
        f"{interval.num_pairs} seeds: {verdict}",
        why=f"{_WHAT.get(what, 'not in the paper')}; {_before_tuning(first_rows, other_rows)}",
    )


def _on_the_way(panel: str, first_rows: Sequence[Row], other_rows: Sequence[Row]) -> PaperFinding:
    """Validation loss of CollaPipe and of another way to learn by round, over the seeds that both have."""
    means: list[dict[int, float]] = []
    seeds = last_test_scores(first_rows).keys() & last_test_scores(other_rows).keys()
    for curve_rows in (first_rows, other_rows):
        # One method stands for a way to learn where rounds are counted.
        fresh_rows = [row for row in select(curve_rows, part=FRESH) if row["seed"] in seeds]
        learned = select(fresh_rows, method=fresh_rows[0]["method"]) if fresh_rows else []
        by_round = {number: select(learned, round=number) for number in distinct(learned, "round")}
        means.append({t: float(np.mean([row["loss"] for row in scored])) for t, scored in by_round.items()})
    pairs = ", ".join(f"{ours:.3f} / {means[1][t]:.3f} nat at round {t}" for t, ours in means[0].items())
    return PaperFinding(
        what=f"{panel}: validation loss, {first_rows[0]['label']} / {other_rows[0]['label']}",
        paper=_EARLY.get(panel, "-"),
        ours=pairs or "no seed in common",
        why=f"each at its own rate, means of {len(seeds)} seeds",
    )


def _before_tuning(first_rows: Sequence[Row], other_rows: Sequence[Row]) -> str:
    """The difference on the validation seed with the base rates of both, and with the chosen ones."""
    differences = []
    for place in ("base", "chosen"):
        pair = []
        for curve_rows in (first_rows, other_rows):
            tuning_rows = select(curve_rows, part=VALIDATION)
            # The search begins with the base.
            row = tuning_rows[0] if place == "base" else select(tuning_rows, chosen=1)[0]
            pair.append(float("nan") if row["score"] is None else row["score"])
        differences.append(pair[0] - pair[1])
    return (
        f"on the validation seed {differences[0]:+.1f} with the base rates, {differences[1]:+.1f} with the tuned ones"
    )


def _costs(panel: str, fresh_rows: Sequence[Row]) -> list[PaperFinding]:
    """Return CollaPipe's costs against each other method's, up to the validation loss that both reach."""
    paper_findings = []
    methods = distinct(fresh_rows, "method")
    first_runs = _runs(select(fresh_rows, method=methods[0]))
    for method in methods[1:]:
        other_runs = _runs(select(fresh_rows, method=method))
        losses: list[float] = []
        changes: dict[str, list[float]] = {column: [] for column in _COSTS}
        for seed in first_runs.keys() & other_runs.keys():
            pair = first_runs[seed], other_runs[seed]
            common = max(min(row["loss"] for row in run_rows) for run_rows in pair)
            losses.append(common)
            for column in _COSTS:
                ours, theirs = (spent_to_reach(run_rows, column, common) for run_rows in pair)
                if theirs:
                    changes[column].append(100 * (ours / theirs - 1))
        texts = []
        for column, name in _COSTS.items():
            mean, spread = mean_spread(changes[column])
            texts.append(f"{name} {mean:+.0f} ± {spread:.0f} %" if changes[column] else f"{name}: theirs are none")
        paper_findings.append(
            PaperFinding(
                what=f"{panel}: {methods[0]} against {method}, to a common validation loss",
                paper="-",
                ours=", ".join(texts) if losses else "no seed in common",
                why=f"the loss that both reach, {np.mean(losses):.2f} nat" if losses else "",
            )
        )
    return paper_findings


def _runs(method_rows: Sequence[Row]) -> Mapping[int, list[Row]]:
    """Scored rounds of a method by seed; runs that diverged are left out."""
    runs = {seed: select(method_rows, seed=seed) for seed in distinct(method_rows, "seed")}
    return {seed: run_rows for seed, run_rows in runs.items() if all(row["loss"] is not None for row in run_rows)}


def spent_to_reach(run_rows: Sequence[Row], column: str, loss: float) -> float:
    """Return a run's costs when its lowest validation loss so far is ``loss``, interpolated between two scores.

    If the first score is already at or below ``loss``, its costs count.
    """
    lowest = np.minimum.accumulate([row["loss"] for row in run_rows])
    spent = [float(row[column]) for row in run_rows]
    after = int(np.argmax(lowest <= loss + 1e-9))
    if after == 0:
        return spent[0]
    share = (lowest[after - 1] - loss) / (lowest[after - 1] - lowest[after])
    return spent[after - 1] + float(share) * (spent[after] - spent[after - 1])


def draw(rows: Sequence[Row]) -> Figure:
    """Score and validation loss over the rounds, then that loss over time, joules and bytes; a column a task."""
    panels = panels_of(rows)
    figure, axes = style.figure(4.4 * len(panels), 14, 5, len(panels))
    grid = np.array(axes).reshape(5, len(panels))
    for column, panel in enumerate(panels):
        fresh_rows = select(rows, panel=panel, part=FRESH)
        metric = SCORES.get(fresh_rows[0]["metric"], fresh_rows[0]["metric"])
        # One method stands for a way to learn where rounds are counted.
        first_methods = {name: select(fresh_rows, curve=name)[0]["method"] for name in distinct(fresh_rows, "curve")}
        for i, (name, method) in enumerate(first_methods.items()):
            learned = select(fresh_rows, curve=name, method=method)
            _draw_mean(grid[0, column], i, learned, "round", "score", learned[0]["label"])
            _draw_mean(grid[1, column], i, learned, "round", "loss", learned[0]["label"])
        for i, method in enumerate(distinct(fresh_rows, "method")):
            for row, cost in enumerate(_COSTS, 2):
                method_rows = select(fresh_rows, method=method)
                if method_rows[-1][cost]:
                    _draw_mean(grid[row, column], i, method_rows, cost, "loss", method)
        style.label(grid[0, column], "round", f"{metric}, validation set", panel)
        for row, text in enumerate(("round", "virtual time [h]", "energy [kJ]", "uplink [MB]"), 1):
            style.label(grid[row, column], text, "validation loss [nat]")
    for row in (0, 2):
        grid[row, 0].legend(fontsize=7)
    return figure


def _draw_mean(axes: Axes, i: int, rows: Sequence[Row], x: str, y: str, label: str) -> None:
    """Draw the mean of a column over another's, both over the seeds."""
    runs = [run_rows for run_rows in _runs(rows).values()]
    if not runs:
        return
    abscissae, values = (np.array([[row[key] for row in run_rows] for run_rows in runs], float) for key in (x, y))
    spread = values.std(axis=0, ddof=1).tolist() if len(runs) > 1 else ()
    style.curve(axes, i, abscissae.mean(axis=0).tolist(), values.mean(axis=0).tolist(), label, spread)
