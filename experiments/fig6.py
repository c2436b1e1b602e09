"""Fig. 6: loss and score over rounds, CollaPipe and its baselines, on translation, named entities and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from experiments.base.training import SCORES, history, train_all, trainings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAPER = {
    ("translation", "vanilla-fl"): "BLEU +19.5 % at most",
    ("translation", "pipeline"): "BLEU +19.5 % at most",
    ("translation", "titanic"): "BLEU +19.5 % at most",
    ("entities", "vanilla-fl"): "accuracy +2.76 % at most",
    ("entities", "pipeline"): "accuracy +2.76 % at most",
    ("entities", "titanic"): "accuracy +2.76 % at most",
    ("classes", "pipeline"): "accuracy +1.82 %",
    ("classes", "titanic"): "accuracy +0.15 %",
    ("classes", "vanilla-fl"): "accuracy +2.76 % at most",
}
"""By panel and strategy: what the paper says of CollaPipe against it."""
_SPEED = {"classes": "converges typically within 15 rounds"}
"""By panel: what the paper says of how fast it learns."""
_OTHER_METRIC = {"entities": "; ours is span F1, the paper's accuracy, which counts the many words outside any name"}
"""By panel: where the metrics differ."""
_WHAT = {
    "vanilla-fl": "every device trains the whole model on its share of the batch; whole models are averaged",
    "pipeline": "every cluster trains a model on its own data alone, nothing is averaged; the mean of their scores",
    "titanic": "pipelines by device speed, whole models are averaged: it learns as VanillaFL does, only "
    "rounding and the masks of dropout differ",
}
"""By strategy: what it is here. The paper prints no more of its baselines than their names."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round of each run; ``[figure]`` has ``panel`` and ``score``, a metric of the task."""
    wanted = trainings(curves, folder)
    train_all(wanted, folder, say)
    for training in wanted:
        config = training.config
        for row in history(training):
            yield {"panel": training.curve.figure["panel"], "what": config.strategy} | row


def _panels(rows: Sequence[Row]) -> list[str]:
    """The paper's order, then others; parts of the figure may have been made in any."""
    known = ("translation", "entities", "classes")
    return sorted(distinct(rows, "panel"), key=lambda panel: known.index(panel) if panel in known else len(known))


def draw(rows: Sequence[Row]) -> Figure:
    """Training loss above, score below, one column for each task."""
    panels = _panels(rows)
    figure, axes = style.figure(4.4 * len(panels), 6.5, 2, len(panels))
    for column, panel in enumerate(panels):
        loss, score = axes[column], axes[len(panels) + column]
        panel_rows = select(rows, panel=panel)
        for i, name in enumerate(distinct(panel_rows, "curve")):
            curve = select(panel_rows, curve=name)
            for axis, key in ((loss, "train_loss"), (score, "score")):
                table = np.array([[row[key] for row in select(curve, seed=s)] for s in distinct(curve, "seed")])
                spread = table.std(axis=0, ddof=1).tolist() if len(table) > 1 else ()
                rounds = [row["round"] for row in select(curve, seed=curve[0]["seed"])]
                style.curve(axis, i, rounds, table.mean(axis=0).tolist(), curve[0]["label"], spread)
        style.label(loss, "round", "training loss [nat per target]", panel)
        style.label(score, "round", f"{SCORES.get(panel_rows[0]['metric'], panel_rows[0]['metric'])}, validation set")
    axes[0].legend(fontsize=8)
    return figure


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """CollaPipe's score on the test set against each baseline's, seed by seed."""
    paper_findings = []
    for panel in _panels(rows):
        tested = [row for row in select(rows, panel=panel) if row["test_score"] is not None]
        names = distinct(tested, "curve")
        first_rows = select(tested, curve=names[0])
        mean, spread = mean_spread([row["test_score"] for row in first_rows])
        score = SCORES.get(first_rows[0]["metric"], first_rows[0]["metric"])
        paper_findings.append(
            PaperFinding(
                what=f"{panel}: {first_rows[0]['label']}, {score}",
                paper="-",
                ours=f"{mean:.1f} ± {spread:.1f} after {first_rows[0]['samples']} examples, {len(first_rows)} seeds",
                why="the paper's own scores are of other data and sizes; only differences can be compared",
            )
        )
        scored = [row for row in select(rows, curve=names[0]) if row["score"] is not None]
        by_round = {number: select(scored, round=number) for number in distinct(scored, "round")}
        means = {number: np.mean([row["score"] for row in of_seeds]) for number, of_seeds in by_round.items()}
        paper_findings.append(
            PaperFinding(
                what=f"{panel}: {first_rows[0]['label']}, {score} of the validation set by round",
                paper=_SPEED.get(panel, "-"),
                ours=", ".join(f"{mean:.1f} at {number}" for number, mean in means.items()),
                why="from random weights" + ("; the paper's BERT is pre-trained" if panel in _SPEED else ""),
            )
        )
        for name in names[1:]:
            their_rows = select(tested, curve=name)
            method = their_rows[0]["what"]
            paper_findings.append(
                PaperFinding(
                    what=f"{panel}: {first_rows[0]['label']} against {their_rows[0]['label']}",
                    paper=_PAPER.get((panel, method), "-"),
                    ours=_difference(first_rows, their_rows),
                    why=_WHAT.get(method, "not in the paper") + _OTHER_METRIC.get(panel, ""),
                )
            )
    return paper_findings


def _difference(our_rows: Sequence[Row], their_rows: Sequence[Row]) -> str:
    """Difference in points, paired by seed, and relative to the other's mean."""
    their_scores = {row["seed"]: row["test_score"] for row in their_rows}
    pairs = [(row["test_score"], their_scores[row["seed"]]) for row in our_rows if row["seed"] in their_scores]
    if not pairs:
        return "no seed in common"
    mean, spread = mean_spread([a - b for a, b in pairs])
    base = float(np.mean([b for _, b in pairs]))
    relative = f" ({100 * mean / base:+.1f} % of {base:.1f})" if base > 0 else f" (of {base:.1f})"
    return f"{mean:+.1f} ± {spread:.1f} points{relative}"


EXPERIMENT = Experiment(
    name="fig6", shows="loss and score over rounds of CollaPipe and its baselines", run=run, draw=draw,
    findings=findings, trains=True,
)  # fmt: skip
