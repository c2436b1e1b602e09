"""What ``benchmarks/adaptation.py`` holds the rounds to, and what its page says of them."""

import itertools
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan
from helpers.repository import ROOT
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA

sys.path.insert(0, str(Path(ROOT) / "benchmarks"))

from adaptation_stories import STORIES, Story, Truth, scenario, slower_links, steady, true_network
from adapting_rounds import Line, false_replans, scatter, summary, table
from best_plans import batch_seconds, best_plans

DECLARED = RoundPlanner(scenario(), DSSDA(), adaptation=Adaptation(MeasuredNetwork(1))).plan(1, [1.0]).declared
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results" / "adaptation"


def plan_of(delta, order, m):
    return ClusterPlan(delta=tuple(delta), order=tuple(order), m=m)


@pytest.mark.parametrize("time_scale", [None, 0.1], ids=["as fast as they go", "paced"])
@pytest.mark.parametrize("m", [1, 3, 16])
def test_many_plans_at_once_take_what_the_event_simulator_says_of_each(m, time_scale):
    draw = random.Random(m)
    network = true_network(DECLARED, slower_links(31), time_scale)
    instance = network.instance(DECLARED)
    for num_segments in (1, 2, 5):
        orders = [draw.sample(range(5), num_segments) for _ in range(4)]
        deltas = [np.diff([0, *sorted(draw.sample(range(1, 12), num_segments - 1)), 12]).tolist() for _ in orders]
        seconds = batch_seconds(instance, network, m, np.array(deltas), np.array(orders))
        for parts, order, batch_s in zip(deltas, orders, seconds, strict=True):
            delta = [0] * 5
            for k, blocks in zip(order, parts, strict=True):
                delta[k] = blocks
            assert batch_s == pytest.approx(network.predict(instance, 0, plan_of(delta, order, m)).pipeline_s)


def test_no_plan_of_a_small_cluster_is_faster_than_the_best():
    small = replace(DECLARED, L=3, m_set=(1, 2, 4), b=4)
    network = true_network(small, Truth(away=frozenset({1, 3})))
    instance = network.instance(small)
    [best] = best_plans(instance, network, 1)
    least = min(
        network.predict(instance, 0, plan_of(delta, order, m)).pipeline_s
        for m in small.m_set
        for delta in itertools.product(range(4), repeat=5)
        if sum(delta) == 3 and not delta[1] and not delta[3]
        for order in itertools.permutations(k for k in range(5) if delta[k])
    )
    assert network.predict(instance, 0, best).pipeline_s == pytest.approx(least)


@pytest.mark.slow
@pytest.mark.parametrize("story", [story for story in STORIES if story.steps], ids=lambda story: story.name)
def test_a_planner_that_knows_the_true_numbers_is_close_to_the_best_of_all_plans(story):
    """Links that fall to a sixth, and 16 micro-batches instead of 11, were out of reach of single steps."""
    network = true_network(DECLARED, story.truth(31))
    instance = network.instance(DECLARED)
    planned = RoundPlanner(scenario(), DSSDA(), adaptation=Adaptation(network)).plan(1, [1.0]).plans[0]
    [best] = best_plans(instance, network, 1)
    seconds = [network.predict(instance, 0, plan).train_s for plan in (planned, best)]
    assert seconds[0] < 1.02 * seconds[1]


ONE, OTHER = plan_of((12, 0), (0,), 4), plan_of((6, 6), (0, 1), 4)


def line(number, seconds, plan=ONE, *, changed=False, predicted_s=1.0, regret=0.0):
    return Line(
        round=number,
        plan=plan,
        declared=DECLARED,
        truth=Truth(),
        changed=changed,
        trial=False,
        reasons=[],
        predicted_s=predicted_s,
        measured_s=seconds,
        seconds=seconds,
        wall_s=seconds,
        plan_s=0.0,
        regret=regret,
    )


def test_a_new_plan_is_false_unless_its_rounds_are_a_hundredth_shorter():
    for after, false in ((1.2, 1), (0.995, 1), (0.98, 0)):
        lines = [line(n, 1.0) for n in (1, 2, 3)]
        lines += [line(n, after, OTHER, changed=n == 4) for n in (4, 5, 6)]
        assert false_replans(lines) == false


def test_the_scatter_is_of_rounds_with_one_plan():
    lines = [line(n, 1.0 + 0.1 * (n % 2)) for n in range(10)] + [line(n, 5.0, OTHER) for n in range(10, 13)]
    assert scatter(lines) == pytest.approx(0.05 / 1.05)
    assert scatter(lines[-3:]) is None


def test_a_summary_counts_rounds_and_seconds_until_a_change_is_found():
    story = Story(name="a step", truth=steady, rounds=12, steps=(6,))
    lines = [line(n, 1.0) for n in range(1, 7)]
    lines += [line(n, 2.0, regret=1.0, predicted_s=1.0) for n in (7, 8)]
    lines += [line(9, 1.01, OTHER, changed=True, regret=0.01)]
    lines += [line(n, 1.02, OTHER, regret=0.02) for n in (10, 11, 12)]
    row = summary(story, lines)
    assert (row["rounds_until_found"], row["seconds_until_found"]) == (2, 4.0)
    assert row["regret_mean"] == pytest.approx(0.0175) and row["regret_worst"] == 0.02
    # What the rounds after the step add is in the error of all rounds alone.
    assert row["prediction_error"] < 0.02 < 0.08 < row["prediction_error_all"]
    assert row["replans"] == 1 and row["false_replans"] == 0
    lines = [line(n, 1.0, regret=0.0 if n <= 6 else 0.2) for n in range(1, 13)]
    assert summary(story, lines)["rounds_until_found"] == 6


@pytest.mark.parametrize("name", ["shaped", "synthetic"])
def test_the_page_has_the_table_of_the_kept_rows(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert table(rows) in PAGE


def test_each_shaped_story_comes_from_one_run_of_the_named_command():
    from shaped_adaptation import STORIES as SHAPED

    run = json.loads((RESULTS / "shaped.json").read_text(encoding="utf-8"))
    assert run["command"].startswith("python benchmarks/adaptation.py --shaped")
    assert [(row["story"], row["rounds"]) for row in run["rows"]] == [(story.name, story.rounds) for story in SHAPED]
    for row in run["rows"]:
        assert len(row["lines"]) == row["rounds"] and row["load"]["least"] >= 0
        assert all(line["regret"] is not None for line in row["lines"])
