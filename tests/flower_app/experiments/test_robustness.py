"""Clusters that fail in a round, or are away for many."""

from dataclasses import replace

import pytest

from flower_app.compare.trained import seeded
from flower_app.experiments import robustness
from flower_app.experiments.bags_of_words import BagsOfWords
from flower_app.experiments.curves import load_curves
from flower_app.experiments.robustness import absent_clusters


@pytest.fixture(scope="module")
def setting():
    [curve] = load_curves("robustness", smoke=True, only="1-n3")
    config = replace(seeded(curve.config, 0), num_rounds=6)
    return config, BagsOfWords(config, 3, 1.0, 1e-3)


def test_some_clusters_are_away_in_the_middle_third():
    assert [list(absent_clusters(8, 0.25, t, 9)) for t in range(1, 10)] == [[]] * 3 + [[0, 1]] * 3 + [[]] * 3
    assert list(absent_clusters(3, 0.1, 2, 3)) == [0]
    assert not any(absent_clusters(8, 0.0, t, 9) for t in range(1, 10))


def test_who_fails_always_teaches_nobody_and_is_charged_as_one_that_waits(setting):
    config, problem = setting
    last = list(robustness._train(problem, config, 1.0, 1.0, 0.0))[-1]
    none = list(robustness._train(problem, config, 1.0, 0.0, 0.0))[-1]
    assert (last["idle_rounds"], none["idle_rounds"]) == (6, 0)
    assert last["loss"] == pytest.approx(problem.objective(problem.start())) and none["loss"] < last["loss"] - 0.02
    assert last["gamma"] > none["gamma"]
    # What is planned is waited for.
    assert last["virtual_h"] > 0


def test_a_cluster_that_is_away_is_not_planned(setting):
    config, problem = setting
    away = list(robustness._train(problem, config, 1.0, 0.0, 0.3))[-1]
    none = list(robustness._train(problem, config, 1.0, 0.0, 0.0))[-1]
    assert away["idle_rounds"] == 0 and away["loss"] != none["loss"] and away["largest_gap"] <= 1e-6


def rows_with(losses_by_case):
    return [
        {"curve": "1-n3", "label": "3 clusters", "case": case, "seed": seed, "round": t, "clusters": 3}
        | {"virtual_h": 1.0, "loss": loss + seed, "accuracy": 50.0, "gamma": 3.0, "gamma_largest": 3.1}
        | {"gamma_max": 3.4, "largest_gap": 1e-8, "idle_rounds": 1}
        for case, loss in losses_by_case.items()
        for seed in (0, 1)
        for t in (3, 6)
    ]


def test_findings_hold_each_case_against_none_seed_by_seed():
    rows = rows_with({"0 % fail": 0.5, "10 % fail": 0.6})
    none, ten = robustness.findings(rows)
    assert none.ours == "1.000 ± 0.707 nat; 1.00 ± 0.00 virtual hours"
    assert ten.what == "3 clusters, 10 % fail: loss after 6 rounds"
    assert ten.ours.startswith("1.100 ± 0.707 nat, +0.1000 ± 0.0000 against none")
    assert "of 2 seeds; largest gap of a plan 1e-08; rounds that taught nobody: 2" in ten.why
    robustness.draw(rows)
