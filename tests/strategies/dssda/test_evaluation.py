"""Cost and violations of a decision, worked out by hand on a network of round numbers.

A TEB takes 4 s and 0.4 J for one of two micro-batches, a link 1 s and 0.1 J. At 0.1 W an upload has 1 Mbit/s: it takes
2 s and 0.1 J, with a distortion of 1.
"""

import json
import math
import re

import pytest

from helpers.round_numbers import BY_HAND, by_hand
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import Match, binding, device_energy, exceeds, round_joules, score, violations
from strategies.dssda.instance_file import parse_instance

TWO_SEGMENTS = SegmentChoice((2, 1, 0), 2, 1, 0.0)


def decision(choice=TWO_SEGMENTS, power_w=0.1, channels=(0, 1)):
    return [None if j is None else Match(choice, j, power_w) for j in channels]


def test_a_decision_costs_what_its_formulas_say():
    # Stages of 2 * 4 + 1 and 4 s: (9 + 4) + (2 - 1) * 9 = 22 s a step.
    answer = score(by_hand(), decision(), "feasible", 5.0)
    assert [c.choice.pipeline_s for c in answer.clusters] == [pytest.approx(22.0)] * 2
    assert [(c.uplink_s, c.uplink_energy_j) for c in answer.clusters] == [(pytest.approx(2.0), pytest.approx(0.1))] * 2
    assert answer.latency_s == pytest.approx(2 * 22.0 + 2.0)
    # Each: S + 10 S^2 + 2 p + 3 E + 5 eps.
    assert [c.cost for c in answer.clusters] == [pytest.approx(2 + 40 + 0.2 + 0.3 + 5.0)] * 2
    assert answer.objective == pytest.approx(100 * 46 + 2 * 47.5)
    assert (answer.status, answer.lower_bound) == ("feasible", 5.0)
    assert answer.gap == pytest.approx((4695 - 5) / 4695) and answer.to_dict()["lower_bound"] == 5.0
    unbounded = score(by_hand(), decision(), "feasible", -math.inf).to_dict()
    assert unbounded["gap"] is unbounded["lower_bound"] is None
    priced = score(by_hand(wJ=2.0), decision(), "feasible").clusters[0].cost
    assert priced == pytest.approx(47.5 + 2.0 * (0.1 + round_joules(by_hand(), 0, TWO_SEGMENTS)))
    one = score(by_hand(), decision(channels=(None, 1)), "feasible")
    assert one.objective == pytest.approx(4600 + 7 + 47.5)
    assert (one.clusters[0].selected, one.clusters[0].cost, one.clusters[0].choice) == (False, 7.0, None)


def test_eq_15_charges_every_device_its_link_and_the_longest_stage_throughout():
    # (2 + 2 - 1) * 9 = 27; with the tail, less the largest link.
    for tail, seconds in (("none", 27.0), ("last", 26.0)):
        answer = score(by_hand(latency="eq15", tail=tail), decision(), "feasible")
        assert answer.clusters[0].choice.pipeline_s == pytest.approx(seconds)


@pytest.mark.parametrize(("mode", "chunks"), [("c9p", 1), ("c9", 4), ("exact", 2), ("none", 0)])
def test_only_the_last_device_of_a_flow_shop_sends_nothing(mode, chunks):
    """Under Eq. (15) all pay their link; the condition on the flow shop once went unnoticed."""
    flow_shop, eq15 = by_hand(energy=mode), by_hand(energy=mode, latency="eq15")
    assert device_energy(flow_shop, 0, (2, 1, 0), 2, 1) == pytest.approx([0.9 * chunks, 0.4 * chunks, 0.0])
    assert device_energy(flow_shop, 0, (2, 1, 0), 2, 0) == pytest.approx([0.8 * chunks, 0.5 * chunks, 0.0])
    for last in (None, 1):
        assert device_energy(eq15, 0, (2, 1, 0), 2, last) == pytest.approx([0.9 * chunks, 0.5 * chunks, 0.0])


@pytest.mark.parametrize(
    ("instance", "found", "text"),
    [
        ({}, {"channels": (1, 1)}, r"^C4: channels \[1, 1\] are not distinct$"),
        ({}, {"channels": (0, None)}, r"^C5: 1 clusters are matched, expected min\(N, J\) = 2$"),
        ({}, {"choice": SegmentChoice((1, 1, 0), 2, 1, 0.0)}, "C1: segments hold 2 TEBs, expected 3"),
        ({}, {"choice": SegmentChoice((1, 1, 1), 2, 1, 0.0)}, r"C2: S = 3 is outside range\(1, 3\)"),
        ({"S_min": 2}, {"choice": SegmentChoice((3, 0, 0), 2, 0, 0.0)}, r"C2: S = 1 is outside range\(2, 3\)"),
        ({}, {"choice": SegmentChoice((2, 1, 0), 4, 1, 0.0)}, r"m_set: m = 4 is not among \[1, 2\]"),
        ({"device": {"mem": 1.99e9}}, {}, "cluster 0: C7: device 0 needs 2e.09 byte, has 1.99e.09"),
        ({"device": {"Emax": 1.79}}, {}, "cluster 0: C9: device 0 needs 1.8 J, has 1.79"),
        ({}, {"power_w": 0.401}, "C6: power 0.401 W is outside 0 to 0.4"),
        ({"up": {"Emax": 0.099}}, {}, "cluster 0: C8: the upload needs 0.1 J, has 0.099"),
        ({"up": {"eps_max": 0.99}}, {}, "cluster 0: eps_max: distortion 1 is above 0.99"),
    ],
)
def test_each_constraint_that_a_decision_breaks_is_named(instance, found, text):
    broken = violations(by_hand(**instance), decision(**found))
    # Nothing else is broken, but by the other cluster in the same way.
    assert broken and all(re.search(text, line.replace("cluster 1", "cluster 0")) for line in broken), broken
    assert len(broken) == 1 or not instance.keys() & {"device", "up"}


def test_what_is_met_with_equality_is_met():
    exact = by_hand(device={"mem": 2e9, "Emax": 1.8}, up={"Pmax": 0.1, "Emax": 0.1, "eps_max": 1.0}, S_min=2, m_set=[2])
    assert violations(exact, decision()) == []
    assert violations(by_hand(device={"Emax": 1e-9}, energy="none"), decision()) == []
    assert not exceeds(1.0 + 1e-10, 1.0) and exceeds(1.0 + 1e-8, 1.0)
    assert not exceeds(0.0, 0.0) and exceeds(1e-20, 0.0) and exceeds(-0.9, -1.0)


@pytest.mark.parametrize(
    ("device", "named"),
    [
        ({"mem": 2e9}, ["C7 memory of device 0"]),  # just full
        ({"mem": 2.99e9}, ["C7 memory of device 0"]),
        ({"mem": 3e9}, []),  # room for just one more
        ({"Emax": 1.8}, ["C9 energy of device 0"]),
        ({"Emax": 2.59}, ["C9 energy of device 0"]),
        ({"Emax": 2.6}, []),
        ({"mem": 2e9, "Emax": 1.8}, ["C7 memory of device 0", "C9 energy of device 0"]),
    ],
)
def test_a_device_that_could_hold_no_teb_more_is_named_as_what_binds(device, named):
    # Two TEBs take 2 GB and 1.8 J, three 3 GB and 2.6 J.
    instance = by_hand(device=device)
    answer = score(instance, decision(), "feasible")
    assert binding(instance, answer, 0) == ["the round waits for it", *named]


def test_power_and_upload_energy_bind_at_their_limits_and_idle_devices_never():
    for up, named in (({"Pmax": 0.1}, "C6 power"), ({"Emax": 0.1}, "C8 upload energy")):
        instance = by_hand(up=up)
        assert binding(instance, score(instance, decision(), "feasible"), 0) == ["the round waits for it", named]
    idle = by_hand()
    assert binding(idle, score(idle, decision(channels=(None, 1)), "feasible"), 0) == []
    # Device 2 holds nothing, however small it is; a faster cluster is not waited for.
    raw = json.loads(json.dumps(BY_HAND))
    raw["clusters"][0]["devices"][2].update(mem=0.0, Emax=0.0)
    for device in raw["clusters"][0]["devices"]:
        device["f"] = 2e8
        device["kappa"] = 1e-26
    quick = parse_instance(raw, "quick")
    answer = score(quick, decision(), "feasible")
    assert binding(quick, answer, 0) == []
    assert binding(quick, answer, 1) == ["the round waits for it"]
