"""Fig. 6 with tuned learning rates: the search, the seeds that are added, costs to a common loss, findings."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_rel

from experiments.base.results import read_rows
from experiments.reproduce import ReproduceOptions, reproduce
from experiments.tuned_learning import fig6_tuned
from experiments.tuned_learning.fig6_tuned_findings import draw, findings, spent_to_reach
from experiments.tuned_learning.rate_search import best_rate
from flower_app.compare.paired_interval import paired_interval


def quiet(_):
    pass


@pytest.mark.parametrize(
    ("optimum", "expected", "tried"),
    [
        (1.0, 1.0, [1, 1 / 3, 3]),
        (9.0, 9.0, [1, 1 / 3, 3, 9, 27]),
        (0.1, 1 / 9, [1, 1 / 3, 3, 1 / 9, 1 / 27]),
        (1e9, 27.0, [1, 1 / 3, 3, 9, 27]),
    ],
)
def test_the_search_goes_on_while_the_best_lies_at_an_edge(optimum, expected, tried):
    rates = []

    def score_of(rate):
        rates.append(rate)
        return -abs(np.log(rate / optimum))

    assert best_rate(1.0, 3, score_of) == pytest.approx(expected)
    assert rates == pytest.approx(tried)


def test_the_interval_is_that_of_students_paired_test():
    ours, theirs = {3: 50.0, 4: 53.0, 5: 51.5, 9: 1.0}, {5: 50.0, 4: 50.5, 3: 49.0}
    interval = paired_interval(ours, theirs)
    expected = ttest_rel([ours[s] for s in theirs], list(theirs.values())).confidence_interval()
    assert interval == pytest.approx((np.mean([1.0, 2.5, 1.5]), expected.low, expected.high, 3))
    assert not interval.leaves_out_zero and paired_interval({1: 1.0, 2: 1.1}, {1: 0.0, 2: 0.1}).leaves_out_zero
    assert not paired_interval({1: 1.0}, {1: 0.0}).leaves_out_zero


def test_what_is_spent_to_a_loss_lies_between_two_scores():
    losses, hours = (3.0, 2.0, 2.5, 1.0), (1.0, 2.0, 3.0, 4.0)
    rows = [{"loss": loss, "hours": h} for loss, h in zip(losses, hours, strict=True)]
    assert [spent_to_reach(rows, "hours", loss) for loss in (4.0, 3.0, 2.5, 2.0, 1.5, 1.0)] == pytest.approx(
        [1.0, 1.0, 1.5, 2.0, 3.5, 4.0]
    )


SCORES = {"collapipe": 60.0, "vanilla-fl": 59.9, "pipeline": 40.0, "FedAdam": 70.0}


def trained(curve, config, rates, part, seed):
    """Return the result of a training: best at three times the base's rate, FedAdam's server at a third."""
    power = np.log(rates.lr / curve.config.optimizer.lr) / np.log(3)
    score = SCORES[config.strategy] - abs(power - 1) + 0.3 * np.sin(seed * len(config.strategy))
    if rates.server_lr is not None:
        score -= abs(np.log(3 * rates.server_lr / 0.01))
    row = {"panel": curve.figure["panel"], "curve": curve.name, "label": curve.label, "what": config.strategy}
    row |= {"metric": "accuracy", "part": part, "seed": seed, "lr": rates.lr, "server_lr": rates.server_lr}
    row |= {"chosen": 1, "examples": 100, "train_loss": 1.0, "score": score, "round": 1, "test_score": None}
    for method in curve.figure["methods"] if part == "fresh" else ("",):
        costs = {"hours": 2.0, "kilojoules": 3.0, "megabytes": 0.0 if config.strategy == "pipeline" else 4.0}
        yield row | {"method": method, "loss": 3.0} | costs
        yield (
            row
            | {"method": method, "loss": 2.0, "round": 2, "test_score": score}
            | {k: 2 * v for k, v in costs.items()}
        )


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setattr(fig6_tuned, "_trained", trained)
    options = ReproduceOptions(out=tmp_path, only="classes")
    reproduce("fig6-tuned", options, quiet)
    return read_rows(tmp_path / "fig6-tuned")


def test_each_way_to_learn_gets_its_rate_and_seeds_are_added_where_nothing_is_decided(rows):
    chosen = {row["what"]: row for row in rows if row["part"] == "validation" and row["chosen"]}
    assert [row["lr"] for row in chosen.values()] == pytest.approx([9e-3] * 4)
    assert chosen["FedAdam"]["server_lr"] == pytest.approx(0.01 / 3)
    seeds = {what: sorted({r["seed"] for r in rows if r["what"] == what and r["part"] == "fresh"}) for what in SCORES}
    assert seeds == {
        "collapipe": [3, 4, 5, 6, 7], "vanilla-fl": [3, 4, 5, 6, 7], "pipeline": [3, 4, 5], "FedAdam": [3, 4, 5],
    }  # fmt: skip


def test_a_run_that_diverges_is_told_and_counts_for_nobody(rows):
    broken = [
        row | {"score": None, "test_score": None, "loss": None}
        if (row["what"], row["seed"]) == ("pipeline", 4)
        else row
        for row in rows
    ]
    told = {finding.what: finding for finding in findings(broken)}
    assert "2 seeds" in told["classes: CollaPipe against PipeLine, equal examples"].ours
    draw(broken)


@pytest.mark.slow
def test_the_smoke_run_trains_and_is_not_trained_again(tmp_path, monkeypatch):
    options = ReproduceOptions(out=tmp_path, smoke=True, only="classes")
    found = reproduce("fig6-tuned", options, quiet)
    assert len(found["fig6-tuned"]) == 1 + 3 + 1 + 5
    rows = read_rows(tmp_path / "fig6-tuned")
    [last] = {row["examples"] for row in rows if row["round"] == 2 and row["what"] == "collapipe"}
    # Each model of those that never join has seen as many examples as the joint one of both clusters.
    assert {row["examples"] for row in rows if row["round"] == 2 and row["what"] == "pipeline"} == {2 * last}
    monkeypatch.setattr(fig6_tuned, "_trained", None)
    assert reproduce("fig6-tuned", options, quiet) == found
    assert reproduce("fig6-tuned", replace(options, plot_only=True), quiet) == found
