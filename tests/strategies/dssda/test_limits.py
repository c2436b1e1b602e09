"""Largest number of TEBs of a device, by hand: the network of round numbers of test_evaluation."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.round_numbers import by_hand
from strategies.dssda.limits import Limits
from strategies.dssda.segments import segment_table


def caps(device, **top):
    limits = Limits.of(by_hand(device, **top), 0)
    return limits.memory_cap[0], limits.cap[:, 0].tolist(), limits.last_cap[:, 0].tolist()


def test_memory_holds_whole_tebs_and_no_more_than_there_are():
    for memory, holds in ((0.99e9, 0), (1e9, 1), (1.99e9, 1), (2e9 * (1 - 1e-12), 2), (9e9, 3)):
        assert caps({"mem": memory}) == (holds, [holds] * 2, [holds] * 2)
    assert caps({"mem": 0.0}, gamma0=0.0)[0] == 3


def test_energy_allows_what_the_chunks_take_together():
    # m = 1: work 6 GFLOP, 0.6 J a TEB; m = 2: 0.4 J. A link takes 0.1 J, which the last device does not.
    for mode, chunks in (("exact", (1, 2)), ("c9", (2, 4)), ("c9p", (1, 1))):
        for budget in (0.05, 0.5, 1.3, 1.8, 2.6, 4.0, 1e3):
            expected = [
                [
                    min(3, max(0, int((budget / count - sends) / teb + 1e-6)))
                    for count, teb in zip(chunks, (0.6, 0.4), strict=True)
                ]
                for sends in (0.1, 0.0)
            ]
            assert list(caps({"Emax": budget}, energy=mode)[1:]) == expected, (mode, budget)
            # Under Eq. (15) all send.
            assert list(caps({"Emax": budget}, energy=mode, latency="eq15")[1:]) == [expected[0]] * 2
    assert caps({"Emax": 0.0}, energy="none")[1:] == ([3, 3], [3, 3])


def test_a_budget_that_is_met_exactly_is_met():
    # Two TEBs and a link, twice: 1.8 J.
    assert caps({"Emax": 1.8})[1][1] == 2
    assert caps({"Emax": 1.8 * (1 - 1e-6)})[1][1] == 1


def test_times_are_those_of_the_micro_batches():
    limits = Limits.of(by_hand(), 0)
    assert limits.teb_s == pytest.approx(np.array([[6.0] * 3, [4.0] * 3]))
    assert limits.link_s == pytest.approx(np.ones((2, 3)))
    sampled = Limits.of(
        by_hand(
            act={"z_bits": 0.4e6, "g_bits": 0.6e6, "scaling": "sample", "lat": 0.5},
            work={"o_f": 1e9, "o_b": 2e9, "o_b_scaling": "sample", "t0": 0.25},
        ),
        0,
    )
    assert sampled.teb_s == pytest.approx(np.array([[12.25] * 3, [6.25] * 3]))
    assert sampled.link_s == pytest.approx(np.array([[4.5] * 3, [2.5] * 3]))


@pytest.mark.parametrize(
    ("top", "devices", "constraint", "needs", "has", "text"),
    [
        ({"S_min": 4, "S_max": None}, {}, "C2", 4, 3, "lower S_min, or bring more devices or TEBs"),
        ({"S_min": 3, "S_max": 2}, {}, "C2", 3, 2, "S_min is above S_max"),
        ({}, {"mem": 1e9, "others": 0.5e9}, "C7", 3, 1, "1 TEBs fit"),
        ({"S_min": 2}, {"mem": 3e9, "others": 0.5e9}, "C7", 2, 1, "1 devices hold a TEB; lower S_min"),
        ({}, {"Emax": 0.9, "all": True}, "C9", 3, 1, "1 TEBs on 1 devices stay within"),
    ],
)
def test_what_leaves_no_segments_is_named_by_how_much(top, devices, constraint, needs, has, text):
    raw = dict(devices)
    others, everywhere = raw.pop("others", None), raw.pop("all", False)
    instance = by_hand(raw, **top)
    cluster = instance.clusters[0]
    first, rest = cluster.devices[0], cluster.devices[1:]
    if others is not None:
        rest = tuple(replace(device, mem=others) for device in rest)
    if everywhere:
        rest = tuple(replace(device, Emax=0.1) for device in rest)
    instance = replace(instance, clusters=(replace(cluster, devices=(first, *rest)), instance.clusters[1]))
    table = segment_table(instance, 0)
    assert table.choices == {}
    fault = table.infeasible
    assert (fault.cluster, fault.constraint, fault.needs, fault.has) == (0, constraint, needs, has)
    assert text in fault.remedy
