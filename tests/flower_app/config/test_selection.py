"""The best of the evaluated models, and the end of patience."""

import math

import pytest

from flower_app.config.run_config import RunConfig
from flower_app.config.selection import SelectionConfig
from flower_app.tasks.base import TASKS, TaskConfig, task
from flower_app.training.early_stopping import ModelSelection


def follow(values, **config):
    selection = ModelSelection(SelectionConfig(**config))
    metric = selection.config.metric
    better = [selection.update(i, {metric: value}) for i, value in enumerate(values, start=1)]
    return selection, better


def test_a_gain_within_min_delta_is_none():
    selection, better = follow([1.0, 0.95, 0.89], min_delta=0.1)
    assert better == [True, False, True] and selection.best == 0.89


@pytest.mark.parametrize("values", [[1.0, 2.0, 0.1 + 0.2], [math.nan]])
def test_a_continued_run_knows_what_was_best(values):
    selection, _ = follow(values, patience=3)
    resumed = ModelSelection(selection.config)
    resumed.restore(selection.state())
    for value in (0.3, 0.2, math.nan, 9.0, 9.0):
        assert selection.update(7, {"loss": value}) == resumed.update(7, {"loss": value})
        assert selection.stops == resumed.stops
    assert resumed.stops


def test_every_task_names_the_metrics_that_models_are_compared_by():
    for name in TASKS:
        scores = task(TaskConfig(name=name)).scores
        assert scores[0] == "loss" and len(scores) > 1
    with pytest.raises(ValueError, match="selection.metric: expected one of loss, bleu, chrf, found 'accuracy'"):
        SelectionConfig(metric="accuracy").check_metric(task(TaskConfig()).scores)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"selection.patience": -1}, "selection.patience: expected at least 0, found -1"),
        ({"selection.min-delta": -0.5}, "selection.min-delta: expected at least 0, found -0.5"),
        (
            {"selection.load-best-at-end": True, "strategy": "pipeline"},
            "selection.load-best-at-end: with strategy = pipeline every cluster has a model of its own",
        ),
    ],
)
def test_what_cannot_be_selected_is_refused(flat, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_flat(flat)
