"""Segments of TEBs that cost differently against all compositions in all orders, and when each TEB is counted."""

import dataclasses
import itertools

import numpy as np
import pytest

from helpers.instances import checked_round, matches_of, random_instance
from helpers.oracles import best_pipelines
from strategies.dssda.evaluation import score
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import segment_table, solve_segments
from strategies.dssda.unequal_tebs import MOST_DEVICES, counted_tebs

SHARES = (1.0, 0.7, 0.3, 0.05)


def draw(generator, **overrides):
    """A problem under Eq. (15) whose TEBs are of a few kinds."""
    raw = random_instance(generator, latency="eq15", L=int(generator.integers(2, 7)), **overrides)
    raw["tail_energy"] = str(generator.choice(["link", "none"]))
    kinds = generator.choice(SHARES, size=int(generator.integers(2, 4)), replace=False)
    raw["work"]["teb_shares"] = [float(share) for share in generator.choice(kinds, raw["L"])]
    return raw


def check_segments(generator, count):
    seen = {True: 0, False: 0}
    for _ in range(count):
        raw = draw(generator, num_clusters=1)
        expected, table = best_pipelines(raw, 0), segment_table(parse_instance(raw, "drawn"), 0)
        seen[bool(expected)] += 1
        if raw["work"]["teb_shares"].count(1.0) == raw["L"]:
            continue
        assert {size: choice.pipeline_s for size, choice in table.choices.items()} == pytest.approx(expected, rel=1e-9)
        assert all(choice.num_segments == size for size, choice in table.choices.items())
        assert (table.infeasible is None) == bool(expected)
    assert min(seen.values()) > count / 20


def test_every_size_has_the_least_pipeline_time_of_all_compositions_in_all_orders():
    check_segments(np.random.default_rng(70), 60)


@pytest.mark.slow
def test_every_size_has_the_least_pipeline_time_in_many_problems():
    check_segments(np.random.default_rng(71), 1000)


def check_rounds(generator, count):
    planned = 0
    for number in range(count):
        raw = draw(generator, num_devices=int(generator.integers(2, 4)), num_clusters=int(generator.integers(1, 3)))
        if number % 3 == 0:
            raw["act"]["z_enc_bits"] = float(10 ** generator.uniform(5, 7))
        outcome = checked_round(raw)
        if outcome is not None:
            instance, answer = outcome
            planned += 1
            assert score(instance, matches_of(answer), "optimal", answer.lower_bound) == answer
    assert planned > count / 3


def test_a_round_is_certified_against_an_enumeration():
    check_rounds(np.random.default_rng(72), 6)


@pytest.mark.slow
def test_many_rounds_are_certified_against_an_enumeration():
    check_rounds(np.random.default_rng(73), 150)


def test_shares_of_one_are_the_plan_of_equal_tebs():
    generator = np.random.default_rng(74)
    for _ in range(30):
        raw = draw(generator, num_clusters=1)
        del raw["work"]["teb_shares"]
        equal = parse_instance(raw, "drawn")
        ones = dataclasses.replace(equal, teb_shares=(1.0,) * equal.L)
        expected, table = segment_table(equal, 0), segment_table(ones, 0)
        for size, choice in expected.choices.items():
            assert table.choices[size].pipeline_s == pytest.approx(choice.pipeline_s, rel=1e-12)


def two_devices(**changes):
    """A fast device and one of a quarter of its speed, links that take no time."""
    raw = random_instance(np.random.default_rng(75), num_clusters=1, num_devices=2, latency="eq15", L=4)
    raw |= {"energy": "none", "tail": "none", "m_set": [4], "S_min": 2, "S_max": None, "b": 4, "steps": 1}
    raw["act"] |= {"z_bits": 0.0, "g_bits": 0.0, "lat": 0.0}
    raw["work"] |= {"t0": 0.0, "teb_shares": [0.25, 1.0, 1.0, 1.0]}
    for device, frequency in zip(raw["clusters"][0]["devices"], (0.8e9, 0.2e9), strict=True):
        device |= {"phi": 10.0, "f": frequency, "mem": 4e9}
    return raw | changes


def test_the_slow_device_comes_first_where_the_cheap_tebs_are():
    choice = segment_table(parse_instance(two_devices(), "case"), 0).choices[2]
    assert (choice.delta, choice.sequence) == ((3, 1), (1, 0))
    backwards = two_devices()
    backwards["work"]["teb_shares"].reverse()
    choice = segment_table(parse_instance(backwards, "case"), 0).choices[2]
    assert (choice.delta, choice.sequence) == ((3, 1), (0, 1))


def test_an_answer_names_the_order_where_it_counts():
    answer = solve_segments(parse_instance(two_devices(), "case")).to_dict()
    assert answer["clusters"][0]["order"] == [1, 0]
    equal = two_devices()
    del equal["work"]["teb_shares"]
    assert "order" not in solve_segments(parse_instance(equal, "case")).to_dict()["clusters"][0]


@pytest.mark.parametrize(
    ("changes", "devices", "reason"),
    [
        ({"latency": "flowshop"}, 2, 'the exact method for latency = "flowshop" needs equal TEBs'),
        ({"wJ": 0.1}, 2, "the exact method for a price of energy needs equal TEBs"),
        ({}, MOST_DEVICES + 1, "a cluster has 9 devices, and TEBs are told apart on at most 8"),
    ],
)
def test_where_the_method_needs_equal_tebs_each_counts_as_the_costliest_and_words_say_so(changes, devices, reason):
    raw = two_devices(**changes)
    raw["clusters"][0]["devices"] = list(itertools.islice(itertools.cycle(raw["clusters"][0]["devices"]), devices))
    instance = parse_instance(raw, "case")
    planned, words = counted_tebs(instance)
    assert planned == dataclasses.replace(instance, teb_shares=())
    assert words == (
        f"TEBs cost from 25% of the costliest to all of it; the plan counts each as the costliest: {reason}"
    )
    with pytest.raises(ValueError, match="plan the problem that counted_tebs returns"):
        plan_round(instance)


def test_where_each_teb_is_counted_words_say_so():
    instance = parse_instance(two_devices(), "case")
    assert counted_tebs(instance) == (
        instance,
        "TEBs cost from 25% of the costliest to all of it; the plan counts each by itself",
    )
    assert counted_tebs(instance, "policy own needs equal TEBs")[1].endswith(": policy own needs equal TEBs")
    assert counted_tebs(dataclasses.replace(instance, teb_shares=()))[1] == ""
