"""Eq. (11) with its activations, and a last device that sends nothing, against brute force."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.radio import upload_time
from client_pipeline.system.scenario import load_scenario
from helpers import oracles
from helpers.instances import checked_round, instance_to_dict, matches_of, random_instance
from strategies.dssda.evaluation import device_energy, score
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.paper.paper import plan_round_paper
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import segment_table
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def drawn(generator, **changes):
    raw = random_instance(generator, num_devices=int(generator.integers(1, 4)), **changes)
    raw["act"]["z_enc_bits"] = float(10 ** generator.uniform(6, 7.5))
    raw["tail_energy"] = str(generator.choice(["link", "none"]))
    if generator.random() < 0.6:  # short links and cheap backward passes: many micro-batches pay, until they go up
        raw["act"] |= {"z_bits": 1e5, "g_bits": 1e5, "lat": 0.0, "scaling": "microbatch"}
        raw["work"] |= {"o_b": 1e8, "o_b_scaling": "microbatch", "t0": 0.0}
    raw["m_set"] = list(range(1, min(raw["b"], 8) + 1))
    return raw


@pytest.mark.slow
def test_rounds_with_uploaded_activations_cost_what_brute_force_says():
    generator, planned, fewer, per_micro_batch = np.random.default_rng(31), 0, 0, 0
    for _ in range(60):
        raw = drawn(generator, num_clusters=int(generator.integers(1, 3)), num_channels=int(generator.integers(1, 3)))
        if (found := checked_round(raw)) is None:
            continue
        instance, answer = found
        planned += 1
        if raw["act"]["scaling"] == "microbatch":
            per_micro_batch += 1
            without = plan_round(replace(instance, z_enc_bits=0.0))
            fewer += any(
                a.choice and b.choice and a.choice.m < b.choice.m
                for a, b in zip(answer.clusters, without.clusters, strict=True)
            )
    assert planned > 30 and per_micro_batch > 12 and fewer > 3


def test_an_upload_takes_the_activations_of_all_local_steps():
    generator = np.random.default_rng(32)
    for scaling in ("microbatch", "sample"):
        raw = random_instance(generator, num_clusters=1, num_channels=1, steps=3, energy="none")
        raw["act"] |= {"scaling": scaling, "z_enc_bits": 2e6}
        raw["gamma0"], raw["S_min"] = 1.0, 1
        raw["clusters"][0]["up"] |= {"eps_max": None, "Emax": 1e3}
        instance = parse_instance(raw, "case")
        answer = plan_round(instance)
        [cluster] = answer.clusters
        bits = raw["clusters"][0]["up"]["t_bits"]
        bits += 3 * 2e6 * (cluster.choice.m if scaling == "microbatch" else raw["b"])
        rate = float(instance.uplink_rate(0, cluster.power_w, 0))
        assert cluster.uplink_s == pytest.approx(float(upload_time(bits, rate)))
        energy = raw["clusters"][0]["up"]["e_bits"] / rate * cluster.power_w
        assert cluster.uplink_energy_j == pytest.approx(energy)


def test_segments_whose_last_device_pays_no_link_are_the_best_of_all():
    generator, gained, differs = np.random.default_rng(33), 0, 0
    for _ in range(150):
        raw = random_instance(generator, num_clusters=1, num_channels=1, latency="eq15", tail_energy="none")
        raw["energy"] = str(generator.choice(["c9p", "c9", "exact"]))
        for device in raw["clusters"][0]["devices"]:
            device["Emax"] *= float(generator.choice([0.3, 1.0]))
        instance = parse_instance(raw, "case")
        expected, table = oracles.best_pipelines(raw, 0), segment_table(instance, 0)
        assert set(table.choices) <= set(expected) and bool(expected) == bool(table.choices)
        for size, choice in table.choices.items():
            assert choice.pipeline_s == pytest.approx(expected[size])
            assert choice.delta[choice.last] > 0
            energy = device_energy(instance, 0, choice.delta, choice.m, choice.last)
            assert np.all(energy <= instance.device_arrays(0).Emax * (1 + 1e-9))
        charged = segment_table(replace(instance, tail_energy="link"), 0)
        if table.choices:
            best = min(c.pipeline_s for c in table.choices.values())
            gained += not charged.choices or best < min(c.pipeline_s for c in charged.choices.values()) * (1 - 1e-9)
        differs += len(table.choices) != len(charged.choices)
    assert gained > 8 and differs > 3


def test_a_file_keeps_both_keys_and_their_defaults_are_the_old_ones():
    raw = drawn(np.random.default_rng(34))
    raw["tail_energy"] = "none"
    instance = parse_instance(raw, "case")
    assert parse_instance(instance_to_dict(instance), "case") == instance
    assert (instance.z_enc_bits, instance.tail_energy) == (raw["act"]["z_enc_bits"], "none")
    del raw["tail_energy"], raw["act"]["z_enc_bits"]
    assert (parse_instance(raw, "case").z_enc_bits, parse_instance(raw, "case").tail_energy) == (0.0, "link")
    with pytest.raises(ValueError, match="case: tail_energy: expected one of link, none, found 'free'"):
        parse_instance(raw | {"tail_energy": "free"}, "case")


def test_the_papers_algorithms_pay_for_the_activations_too():
    generator, planned = np.random.default_rng(35), 0
    for _ in range(12):
        raw = drawn(generator, latency="eq15", num_clusters=2, num_channels=2)
        raw["act"]["scaling"] = "microbatch"
        instance = parse_instance(raw, "case")
        ours, paper = plan_round(instance), plan_round_paper(instance)
        if ours.status == "infeasible" or paper.status == "infeasible":
            continue
        planned += 1
        assert paper.objective == pytest.approx(score(instance, matches_of(paper), "feasible").objective)
        assert paper.objective >= ours.lower_bound * (1 - 1e-9)
    assert planned > 4


@pytest.mark.parametrize("name", ["table2", "table2-bert", "table2-contended"])
def test_the_variants_of_table_2_differ_by_the_activations_and_the_last_link_alone(name):
    plain, variant = load_scenario(name), load_scenario(f"{name}-activations")
    assert variant.costs.upload_activation_bits == plain.costs.z_bits
    same = replace(
        variant,
        name=plain.name,
        costs=replace(variant.costs, upload_activation_bits=0.0),
        planner=replace(variant.planner, tail_energy="link"),
    )
    assert same == plain
    [before], [after] = (list(plan_rounds(s, make_policy("dssda"), 1)) for s in (plain, variant))
    assert after.latency_s > before.latency_s and after.answer.gap <= 1e-6 and after.violations == []
    last = [plan.order[-1] for plan in after.plans]
    for n, plan in enumerate(after.plans):
        if plan.selected:
            # The last device of the accounted energy pays its computation alone.
            instance = after.instance
            choice = after.answer.clusters[n].choice
            exact = replace(instance, energy="exact")
            charged = device_energy(replace(exact, tail_energy="link"), n, plan.delta, plan.m, last[n])
            spent = after.costs.clusters[n].work.device_energy_j
            assert choice.last == last[n] and spent[last[n]] < charged[last[n]]
            assert np.delete(spent, last[n]) == pytest.approx(np.delete(charged, last[n]))
