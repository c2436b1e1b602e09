"""Algorithms 2 to 4 of the paper: their steps, their constraints, and how near they come to the optimum."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from helpers import oracles
from helpers.instances import matches_of, random_instance
from strategies.dssda.convergence import BoundParameters
from strategies.dssda.evaluation import exceeds, violations
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.paper.paper import plan_round_paper, trace_round_paper
from strategies.dssda.paper.paper_segments import cheapest_sizes, micro_batches, paper_segment_choices
from strategies.dssda.paper.sca import solve_power
from strategies.dssda.per_round_bound import PerRoundBound
from strategies.dssda.planner import plan_round
from strategies.dssda.power import power_interval, uplink_of
from strategies.dssda.segments import segment_table


def draw(generator):
    """A small problem with the odd values that planners trip over."""
    raw = random_instance(generator)
    raw["V"] = float(generator.choice([0.0, raw["V"], 10 ** generator.uniform(-4, 2)]))
    for cluster in raw["clusters"]:
        cluster["wS"] = float(generator.choice([cluster["wS"], -1.0]))
        for name in ("wP", "wE", "wG"):
            cluster[name] *= float(generator.choice([0.0, 1.0, 30.0]))
        up = cluster["up"]
        up["Emax"] = float(generator.choice([3.0, 10.0, 50.0]))
        up["t_bits"] *= float(generator.choice([1.0, 1.0, 1.0, 0.0]))
    return raw


def table2_like(generator, num_clusters=3, queue=1.0, printed=False, num_devices=6):
    """A round of the paper's Table II; ``printed``: the queue's weights of P2 in place of the true drift."""
    channels, interference = 4, generator.uniform(0.06, 0.08, 4)
    silent = 0.2 * float(np.mean(1 / interference))
    return {
        **{"format": "collapipe-instance/1", "L": 12, "b": 64, "m_set": list(range(1, 65)), "V": 1.0},
        **{"latency": "eq15", "tail": "last", "energy": "c9p", "gamma0": 0.375e9, "N0": 4e-21},
        "work": {"o_f": 2e9, "o_b": 2e9, "o_b_scaling": "microbatch"},
        "act": {"z_bits": 1.25e6, "g_bits": 1.25e6, "scaling": "microbatch"},
        "clusters": [
            {
                "wS2": queue / 12,
                **({"wP": queue} if printed else {"wG": queue, "skip": queue * silent}),
                "devices": [
                    {
                        "phi": generator.uniform(10, 24),
                        "f": generator.uniform(0.1e9, 0.8e9) * generator.uniform(0.7, 1.0),
                        "p": generator.uniform(0.07, 0.1),
                        **{"kappa": 1e-27, "B": 0.5e6, "h": 1e-3, "I": 5e-10, "mem": 1.5e9, "Emax": 5.0},
                    }
                    for _ in range(num_devices)
                ],
                "up": {"t_bits": 19e6, "e_bits": 19e6, "Pmax": 0.5, "Emax": 10.0, "eps_mode": "paper", "C": 0.2},
                "h": [float(h) for h in 0.977 * (0.2 + 0.8 * generator.exponential(1.0, channels))],
                "I": interference.tolist(),
                "B": [generator.uniform(0.4e6, 0.6e6)] * channels,
            }
            for _ in range(num_clusters)
        ],
    }


# Algorithm 2


def test_the_closed_form_gives_16_and_13_9_and_11_3_micro_batches_for_5_4_and_3_segments():
    batch, work = 64, 2e9
    found = micro_batches(np.array([5, 4, 3]), batch * work, work)
    assert found == pytest.approx([16.0, 13.856, 11.314], abs=1e-3)


def test_the_closed_form_without_a_time_for_each_micro_batch_has_as_many_as_there_may_be():
    found = micro_batches(np.array([1, 1, 2, 2]), np.array([3.0, 3.0, 3.0, 0.0]), np.array([0.0, 2.0, 0.0, 0.0]))
    # One segment gains nothing by micro-batches, nor do several without work to share.
    assert found.tolist() == [0.0, 0.0, math.inf, 0.0]


def test_the_closed_form_as_printed_never_exceeds_4_5_micro_batches():
    sizes, work = np.arange(1, 6), 2e9
    assert np.max(micro_batches(sizes, sizes * work, work)) == pytest.approx(math.sqrt(20))
    assert np.max(micro_batches(sizes, sizes * work, work)) < 4.5


def test_equal_devices_with_free_links_get_the_closed_form_rounded_to_the_better_side():
    raw = table2_like(np.random.default_rng(0), num_clusters=1)
    for device in raw["clusters"][0]["devices"]:
        device.update(phi=17.0, f=0.4e9)
    raw["act"].update(z_bits=0.0, g_bits=0.0)
    choices = paper_segment_choices(parse_instance(raw, "raw"), 0)
    assert [choices[s].m for s in (5, 4, 3)] == [16, 14, 11]
    assert [sorted(choices[s].delta)[-s:] for s in (5, 4, 3)] == [[2, 2, 2, 3, 3], [3, 3, 3, 3], [4, 4, 4]]
    # A message's own time counts for every micro-batch.
    raw["act"]["lat"] = 3.0
    for choice in paper_segment_choices(parse_instance(raw, "raw"), 0).values():
        seconds = [oracles.pipeline_time(raw, 0, choice.delta, m, None) for m in raw["m_set"]]
        assert choice.pipeline_s == pytest.approx(min(s for s in seconds if s is not None))


def test_algorithm_2_ends_with_the_best_segments_for_its_devices_and_micro_batches():
    generator, checked = np.random.default_rng(5), 0
    for _ in range(120):
        raw = random_instance(generator, latency="eq15")
        for n in range(len(raw["clusters"])):
            for found in paper_segment_choices(parse_instance(raw, "raw"), n).values():
                checked += 1
                mine = oracles.pipeline_time(raw, n, found.delta, found.m, None)
                assert found.pipeline_s == pytest.approx(mine, rel=1e-9)
                others = [oracles.pipeline_time(raw, n, delta, found.m, None) for delta in same_devices(found.delta)]
                assert min(t for t in others if t is not None) >= mine * (1 - 1e-9)
    assert checked > 150


def test_on_table_2_algorithm_2_is_close_to_the_best_pipelines():
    generator = np.random.default_rng(7)
    for _ in range(10):
        instance = parse_instance(table2_like(generator, num_clusters=1), "raw")
        found, best = paper_segment_choices(instance, 0), segment_table(instance, 0).choices
        for size, choice in best.items():
            assert choice.pipeline_s * (1 - 1e-9) <= found[size].pipeline_s <= 1.02 * choice.pipeline_s


def test_the_sizes_of_several_clusters_are_the_cheapest_for_their_longest_pipeline():
    generator = np.random.default_rng(9)
    for _ in range(40):
        instance = parse_instance(random_instance(generator, latency="eq15", num_clusters=3), "raw")
        tables = {n: paper_segment_choices(instance, n) for n in range(3)}
        tables = {n: table for n, table in tables.items() if table}
        if not tables:
            continue

        def cost(sizes, tables=tables, instance=instance):
            chosen = dict(zip(tables, sizes, strict=True))
            longest = max(tables[n][s].pipeline_s for n, s in chosen.items())
            of_sizes = sum(instance.clusters[n].wS * s + instance.clusters[n].wS2 * s**2 for n, s in chosen.items())
            return instance.V * instance.steps * longest + of_sizes

        found = cheapest_sizes(instance, tables)
        assert cost(found.values()) == pytest.approx(min(map(cost, itertools.product(*tables.values()))), rel=1e-9)


def same_devices(delta):
    """All other ways to cut as many TEBs for the same devices."""
    busy, total = [k for k, d in enumerate(delta) if d], sum(delta)
    for cuts in itertools.combinations(range(1, total), len(busy) - 1):
        parts = [b - a for a, b in itertools.pairwise((0, *cuts, total))]
        yield tuple(parts[busy.index(k)] if k in busy else 0 for k in range(len(delta)))


# Algorithms 3 and 4


@pytest.mark.slow
def test_every_answer_meets_all_constraints_and_never_costs_less_than_the_certified_bound():
    generator, feasible, infeasible = np.random.default_rng(10), 0, 0
    for number in range(120):
        raw = draw(generator) if number % 2 else random_instance(generator)
        instance = parse_instance(raw, "raw")
        answer, certified = plan_round_paper(instance), plan_round(instance)
        if certified.status == "infeasible":
            assert answer.status == "infeasible" and answer.infeasible == certified.infeasible
            infeasible += 1
            continue
        feasible += 1
        assert answer.status == "feasible" and answer.lower_bound == -math.inf and answer.gap is None
        assert violations(instance, matches_of(answer)) == []
        assert answer.objective >= certified.lower_bound - 1e-9 * max(abs(certified.lower_bound), 1.0)
    assert feasible > 40 and infeasible > 20


@pytest.mark.slow
def test_the_objective_never_rises_over_the_iterations_and_is_never_below_the_true_cost():
    generator, fell = np.random.default_rng(11), 0
    for number in range(60):
        raw = random_instance(generator) if number % 2 else table2_like(generator, 8, 5.0, printed=number % 4 == 0)
        trace = trace_round_paper(parse_instance(raw, "raw"))
        if trace.status == "infeasible":
            assert trace.objectives == () and trace.answer.status == "infeasible"
            continue
        assert trace.status == "converged"
        assert all(b <= a for a, b in itertools.pairwise(trace.objectives))
        # Two maxima are no less than the one.
        assert trace.answer.objective <= trace.objectives[-1] * (1 + 1e-9)
        fell += trace.objectives[-1] < trace.objectives[0]
    assert fell > 20


def test_channels_are_matched_by_upload_time_and_queue_costs():
    # As printed, Eq. (25), interference lowers the distortion: the better channel for one is the worse for the other.
    raw = table2_like(np.random.default_rng(18), num_clusters=1)
    raw["clusters"][0].update(h=[1.0, 1.0], I=[0.06, 0.08], B=[0.5e6, 0.5e6])
    channels = []
    for weight in (0.0, 1000.0):
        raw["clusters"][0]["wG"] = weight
        channels.append(plan_round_paper(parse_instance(raw, "raw")).clusters[0].channel)
    assert channels == [0, 1]


def test_the_weight_of_time_counts_where_channels_are_matched():
    """V once could be dropped from the costs of the matching without a test that noticed."""
    raw = table2_like(np.random.default_rng(19), num_clusters=1)
    cluster = raw["clusters"][0]
    # More bandwidth is the shorter upload, more interference the lower printed distortion.
    cluster.update(h=[1.0, 1.0], I=[0.06, 0.08], B=[0.6e6, 0.5e6], wG=100.0)
    channels = []
    for weight in (1e-6, 100.0):
        raw["V"] = weight
        channels.append(plan_round_paper(parse_instance(raw, "raw")).clusters[0].channel)
    assert channels == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("printed", [False, True])
def test_on_table_2_the_cost_is_within_30_percent_of_the_certified_optimum(printed):
    generator = np.random.default_rng(12)
    for queue in (0.0, 1.0, 10.0, 50.0):
        for _ in range(4):
            instance = parse_instance(table2_like(generator, queue=queue, printed=printed), "raw")
            answer, certified = plan_round_paper(instance), plan_round(instance)
            assert certified.objective * (1 - 1e-6) <= answer.objective <= 1.3 * certified.objective


@pytest.mark.slow
def test_algorithm_3_finds_the_power_of_least_cost_of_each_cluster():
    generator, checked = np.random.default_rng(13), 0
    for _ in range(15):
        instance = parse_instance(table2_like(generator, queue=20.0, printed=True), "raw")
        trace = trace_round_paper(instance)
        for n, (part, power) in enumerate(zip(trace.answer.clusters, trace.powers, strict=True)):
            uplink = uplink_of(instance, n, part.channel)
            best = float(uplink.power(uplink.cheapest(instance.V)))
            assert power.status == "converged" and power.residual <= 1e-10
            assert part.power_w == pytest.approx(best, rel=1e-3)
            checked += power.iterations > 1
    assert checked > 20


def test_equation_43_as_printed_breaks_c8_on_its_first_step_and_bisection_does_not():
    # E_up <= Emax is p D <= Emax R(p). (43) puts R's first-order expansion about a power, here a tenth of Pmax, in its
    # place. R is concave: the expansion lies above it, and lets pass what C8 forbids.
    raw = table2_like(np.random.default_rng(15), num_clusters=1)
    raw["clusters"][0]["up"]["Emax"] = 4.0
    instance, upload = parse_instance(raw, "raw"), oracles.Upload(raw, 0, 0)
    budget, bits, around = 4.0, upload.up["e_bits"], 0.05

    def rate(p):
        return p * bits / upload.energy(p)

    assert upload.energy(around) < budget
    slope = (rate(around * 1.000001) - rate(around * 0.999999)) / (around * 0.000002)
    first_step = (rate(around) - slope * around) / (bits / budget - slope)
    assert around < first_step < upload.up["Pmax"]
    assert upload.energy(first_step) > 1.05 * budget

    _, largest = power_interval(instance, 0, 0)
    assert upload.energy(largest) == pytest.approx(budget, rel=1e-9) and largest < first_step
    found = solve_power(instance, 0, 0, latency_weight=1.0)
    assert upload.energy(found.power_w) <= budget * (1 + 1e-9)
    answer = plan_round_paper(instance)
    assert violations(instance, matches_of(answer)) == []


# C11 in every round


def bound_of(instance, answer, parameters):
    """Gamma of each matched cluster, Eq. (28)."""
    found = []
    for n, part in enumerate(answer.clusters):
        if part.selected:
            cluster, p, j = instance.clusters[n], part.power_w, part.channel
            noise = cluster.I[j] + cluster.B[j] * instance.N0
            sent = p * cluster.h[j]
            distortion = cluster.up.C / (sent + cluster.I[j] if cluster.up.eps_mode == "paper" else 1 + sent / noise)
            size = part.choice.num_segments
            found.append(parameters.g0 * (parameters.phi**2 * (size**2 / instance.L + 1) + distortion))
    return found


@pytest.mark.slow
def test_c11_holds_in_the_round_when_switched_on_and_costs_something():
    generator, parameters = np.random.default_rng(16), BoundParameters(g0=0.5, phi=1.0)
    held, broken, refused = 0, 0, 0
    for number in range(50):
        raw = random_instance(generator) if number % 2 else table2_like(generator, 3, 8.0, printed=number % 4 == 0)
        instance = parse_instance(raw, "raw")
        free = trace_round_paper(instance)
        if free.status == "infeasible":
            continue
        worst = max(bound_of(instance, free.answer, parameters))
        limit = PerRoundBound(parameters=parameters, gamma_max=worst * generator.uniform(0.6, 1.1))
        trace = trace_round_paper(instance, per_round=limit)
        if trace.status == "infeasible":
            refused += 1
            assert {fault.constraint for fault in trace.answer.infeasible} <= {"C11", "C5"}
            continue
        held += 1
        broken += worst > limit.gamma_max
        assert all(not exceeds(gamma, limit.gamma_max) for gamma in bound_of(instance, trace.answer, parameters))
        assert violations(instance, matches_of(trace.answer)) == []
        assert all(b <= a for a, b in itertools.pairwise(trace.objectives))
        assert trace.answer.objective >= plan_round(instance).lower_bound - 1e-9
    assert held > 20 and broken > 8 and refused > 3


def test_a_bound_that_no_power_meets_names_the_cluster_and_by_how_much():
    instance = parse_instance(table2_like(np.random.default_rng(17)), "raw")
    limit = PerRoundBound(parameters=BoundParameters(g0=1.0, phi=1.0), gamma_max=1.5)
    answer = plan_round_paper(instance, per_round=limit)
    assert answer.status == "infeasible" and [c.status for c in answer.clusters] == ["infeasible"] * 3
    assert [(fault.cluster, fault.constraint, fault.has) for fault in answer.infeasible] == [
        (n, "C11", 1.5) for n in range(3)
    ]
    # With the bound that the worst of them needs there is a plan.
    enough = max(fault.needs for fault in answer.infeasible) * 1.2
    relaxed = PerRoundBound(parameters=limit.parameters, gamma_max=enough)
    assert plan_round_paper(instance, per_round=relaxed).status == "feasible"


def test_the_smaller_of_c11_and_the_uplinks_own_limit_binds():
    instance = parse_instance(table2_like(np.random.default_rng(18)), "raw")
    limit = PerRoundBound(parameters=BoundParameters(g0=1.0, phi=1.0), gamma_max=3.0)
    left = limit.distortion_left(2, instance.L)
    for printed, expected in ((None, left), (left / 2, left / 2), (left * 2, left)):
        clusters = tuple(replace(c, up=replace(c.up, eps_max=printed)) for c in instance.clusters)
        restricted, possible = limit.restrict(replace(instance, clusters=clusters), [2] * 3)
        assert possible.all() and [c.up.eps_max for c in restricted.clusters] == pytest.approx([expected] * 3)
