"""The certified round planner against enumeration, and its certificate."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import strategies.dssda.branching as branching
from helpers import oracles
from helpers.instances import matches_of, random_instance
from helpers.repository import ROOT
from strategies.dssda.evaluation import Match, score, violations
from strategies.dssda.instance_file import parse_instance, read_instance
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks
from strategies.dssda.segments import segment_tables


def draw(generator):
    """A small problem with the odd values that planners trip over."""
    raw = random_instance(generator, num_devices=int(generator.integers(1, 4)), L=int(generator.integers(1, 5)))
    raw["V"] = float(generator.choice([0.0, raw["V"], 10 ** generator.uniform(-4, 2)]))
    for cluster in raw["clusters"]:
        cluster["skip"] = float(generator.choice([cluster["skip"], 0.0, 1e6, -1e6]))
        cluster["wS"] = float(generator.choice([cluster["wS"], -1.0]))
        for name in ("wP", "wE", "wG"):
            cluster[name] *= float(generator.choice([0.0, 1.0, 30.0]))
        up = cluster["up"]
        up["Emax"] = float(generator.choice([2.0, 10.0, 50.0]))
        up["t_bits"] *= float(generator.choice([1.0, 1.0, 1.0, 0.0]))
        up["e_bits"] *= float(generator.choice([1.0, 1.0, 1.0, 0.0]))
    if generator.random() < 0.2:
        # Clusters that run forward alone.
        raw["work"]["o_b"] = raw["act"]["g_bits"] = 0.0
    return raw


@pytest.mark.slow
def test_the_planned_round_costs_as_little_as_the_best_of_an_enumeration():
    generator = np.random.default_rng(21)
    seen = {"optimal": 0, "infeasible": 0}
    for number in range(400):
        raw = draw(generator) if number % 2 else random_instance(generator, num_devices=2)
        best = oracles.cheapest_round(raw)
        instance = parse_instance(raw, "drawn")
        answer = plan_round(instance)
        seen[answer.status] += 1
        if best is None:
            assert answer.status == "infeasible"
            assert answer.infeasible
            continue
        assert answer.status == "optimal"
        # The tolerance of the certificate is no excuse: the best assignment's own deadline is exact.
        assert answer.objective == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert answer.lower_bound <= best + 1e-9 * abs(best)
        assert answer.gap <= 1e-6
        matches = matches_of(answer)
        assert violations(instance, matches) == []
        assert score(instance, matches, "optimal", answer.lower_bound) == answer
    assert min(seen.values()) > 50


def test_clusters_that_cost_less_than_nothing_cut_no_deadline_off():
    """A deadline is worth a look as long as what a round saves without one can pay for it."""
    generator = np.random.default_rng(6)
    negative = 0
    for _ in range(25):
        raw = random_instance(generator, num_clusters=3, num_channels=2, num_devices=1, L=2)
        for cluster in raw["clusters"]:
            cluster["skip"] = float(generator.choice([-50.0, -5.0, 3.0]))
        best, answer = oracles.cheapest_round(raw), plan_round(parse_instance(raw, "drawn"))
        assert answer.objective == (None if best is None else pytest.approx(best, rel=1e-6, abs=1e-9))
        negative += best is not None and best < 0
    assert negative > 3


@pytest.mark.slow
@pytest.mark.promise
def test_no_random_decision_costs_less_than_the_lower_bound():
    generator = np.random.default_rng(22)
    compared = 0
    for _ in range(12):
        raw = random_instance(generator, num_clusters=7, num_channels=int(generator.integers(3, 10)), num_devices=4)
        instance = parse_instance(raw, "drawn")
        tables = segment_tables(instance)
        answer = plan_round(instance, tables=tables)
        if answer.status == "infeasible":
            continue
        uplinks = Uplinks.of(instance)
        for _ in range(200):
            matches = [None] * instance.num_clusters
            clusters = generator.permutation(instance.num_clusters)[: instance.num_matched]
            for n, j in zip(clusters, generator.permutation(instance.num_channels), strict=False):
                if tables[n].choices and uplinks.feasible[n, j]:
                    low, high = uplinks.low[n, j], uplinks.high[n, j]
                    power = uplinks.select(n, j).power(np.asarray(generator.uniform(low, high)))
                    choice = tables[n].choices[generator.choice(list(tables[n].choices))]
                    matches[n] = Match(choice, int(j), float(power))
            if violations(instance, matches) == []:
                assert score(instance, matches, "feasible").objective >= answer.lower_bound
                compared += 1
    assert compared > 300


def test_clusters_alike_in_everything_are_no_trouble():
    raw = random_instance(np.random.default_rng(23), num_clusters=1, num_channels=1, num_devices=3, V=0.5, S_max=None)
    cluster = raw["clusters"][0]
    cluster["up"].update(Emax=1e3, eps_max=None)
    for name in ("h", "I", "B"):
        cluster[name] = cluster[name] * 2
    raw["clusters"] = [cluster] * 3
    answer = plan_round(parse_instance(raw, "alike"))
    assert answer.status == "optimal"
    assert answer.objective == pytest.approx(oracles.cheapest_round(raw), rel=1e-9)
    assert sorted(c.channel for c in answer.clusters if c.selected) == [0, 1]


def test_an_unproved_answer_is_called_feasible_and_tells_its_gap(monkeypatch):
    generator = np.random.default_rng(24)
    gaps = []
    while len(gaps) < 3:
        raw = random_instance(generator, num_clusters=6, num_channels=4, num_devices=3)
        instance = parse_instance(raw, "drawn")
        proved = plan_round(instance)
        with monkeypatch.context() as patch:
            patch.setattr(branching, "INTERVAL_LIMIT", 1)
            hasty = plan_round(instance)
        if proved.status == "optimal" and hasty.status != "optimal":
            assert hasty.status == "feasible"
            assert hasty.lower_bound <= proved.objective <= hasty.objective * (1 + 1e-12)
            assert {c.status for c in hasty.clusters} == {"feasible"}
            gaps.append(hasty.gap)
    assert min(gaps) > 1e-6


def reachable(num_clusters, num_channels):
    """A problem in which every cluster can use every channel."""
    raw = random_instance(
        np.random.default_rng(25), num_clusters=num_clusters, num_channels=num_channels, num_devices=2
    )
    raw.update(L=2, S_min=1, S_max=None, energy="none")
    for cluster in raw["clusters"]:
        cluster["up"].update(Emax=1e3, eps_max=None)
        for device in cluster["devices"]:
            device["mem"] = 1e9
    return raw


def test_an_upload_that_fits_no_channel_is_named_with_the_largest_that_would():
    raw = reachable(2, 3)
    raw["clusters"][1]["up"]["Emax"] = 1e-3
    answer = plan_round(parse_instance(raw, "starved"))
    (fault,) = answer.infeasible
    assert (answer.status, fault.cluster, fault.constraint, fault.has) == ("infeasible", 1, "C8", 1e-3)
    assert fault.needs > fault.has
    assert [c.status for c in answer.clusters] == ["feasible", "infeasible"]
    bits = float(fault.remedy.split("fits: ")[1].split(" bit")[0])
    raw["clusters"][1]["up"]["e_bits"] = bits * 0.99
    assert plan_round(parse_instance(raw, "fed")).status == "optimal"


def test_a_cluster_without_segments_is_named_unless_it_can_go_without_a_channel():
    raw = reachable(2, 2)
    for device in raw["clusters"][0]["devices"]:
        device["mem"] = 1e8
    answer = plan_round(parse_instance(raw, "small"))
    assert {(fault.cluster, fault.constraint) for fault in answer.infeasible} == {(0, "C7")}
    for cluster in raw["clusters"]:
        for name in ("h", "I", "B"):
            cluster[name] = cluster[name][:1]
    answer = plan_round(parse_instance(raw, "contended"))
    assert answer.status == "optimal"
    assert [c.selected for c in answer.clusters] == [False, True]


def test_clusters_that_can_use_only_the_same_channel_cannot_all_be_matched():
    raw = reachable(3, 3)
    for cluster in raw["clusters"][:2]:
        cluster["h"] = [1.0, 1e-6, 1e-6]
        cluster["up"]["Emax"] = 20.0
    instance = parse_instance(raw, "crowded")
    assert Uplinks.of(instance).feasible[:2].tolist() == [[True, False, False]] * 2
    (fault,) = plan_round(instance).infeasible
    assert (fault.cluster, fault.constraint, fault.needs, fault.has) == (None, "C5", 3, 2)
    # One of the two has it; the third cluster can use another one.
    assert re.findall(r"cluster (\d) can use channels (\[.*?\])", fault.remedy) in ([("0", "[0]")], [("1", "[0]")])


@pytest.mark.parametrize(("num_channels", "reported"), [(3, False), (2, True)])
def test_too_few_channels_in_use_are_reported_beside_the_clusters_at_fault(num_channels, reported):
    """C5: where no cluster may go without a channel, those at fault say all; where one may, how many are missing."""
    raw = reachable(3, num_channels)
    for cluster in raw["clusters"][:2]:
        for device in cluster["devices"]:
            device["mem"] = 1e8
    faults = plan_round(parse_instance(raw, "small")).infeasible
    assert [(fault.cluster, fault.constraint) for fault in faults if fault.cluster is not None] == [
        (0, "C7"),
        (1, "C7"),
    ]
    together = [(fault.constraint, fault.needs, fault.has) for fault in faults if fault.cluster is None]
    assert together == ([("C5", 2, 1)] if reported else [])


def test_powers_are_the_least_that_meet_the_deadline_when_nothing_else_matters():
    raw = reachable(3, 3)
    raw["V"] = 1.0
    for cluster in raw["clusters"]:
        cluster.update(wS=0.0, wS2=0.0, wP=0.0, wE=0.0, wG=0.0)
    answer = plan_round(parse_instance(raw, "delay"))
    assert answer.status == "optimal"
    assert answer.objective == answer.latency_s
    for cluster in answer.clusters:
        assert raw["steps"] * cluster.choice.pipeline_s + cluster.uplink_s == pytest.approx(answer.latency_s)


def test_a_large_round_is_certified_in_few_intervals(monkeypatch):
    raw = random_instance(np.random.default_rng(26), num_clusters=30, num_channels=12, num_devices=3, V=0.5, S_max=None)
    for cluster in raw["clusters"]:
        cluster["up"].update(Emax=30.0, eps_max=None)
        cluster["wG"] = 3.0
    monkeypatch.setattr(branching, "INTERVAL_LIMIT", 400)
    answer = plan_round(parse_instance(raw, "large"))
    assert answer.status == "optimal"
    assert answer.gap <= 1e-6


def test_the_shared_example_is_certified():
    path = Path(os.environ.get("COLLAPIPE_EXAMPLE_INSTANCE", ROOT.parent / "shared/example-instance.json"))
    if not path.exists():
        pytest.skip(f"no {path}; set COLLAPIPE_EXAMPLE_INSTANCE to the example instance")
    answer = plan_round(read_instance(path.read_text(), path.name))
    assert answer.status == "optimal"
    assert answer.gap <= 1e-6
