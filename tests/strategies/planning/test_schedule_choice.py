"""The schedule as a decision: against every one tried by the longest path, with memory counted action by action."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes, write_plans
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.schedules import SCHEDULES, actions, schedules_of
from helpers.instances import drawn_plan, random_instance
from helpers.oracles import makespan
from strategies.baselines.pipeline import PipeLine
from strategies.dssda.evaluation import round_joules
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.segments import segment_table
from strategies.planning.dry_run import plan_rounds
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.planning.plan_demands import device_memory, lean_instance, memory_violations, plan_times
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA, make_policy
from strategies.planning.policy import Round
from strategies.planning.schedule_choice import ScheduledPolicy, best_schedule, simulated_seconds

AUTO = PipelineChoices.of("auto")


def drawn(generator):
    """A cluster with all devices in use, any share of weight gradients, and activations of any size."""
    devices = int(generator.integers(1, 5))
    raw = random_instance(generator, num_clusters=1, num_channels=1, num_devices=devices)
    raw["L"] = int(generator.integers(devices, 7))
    raw["work"]["weight_share"] = float(generator.choice([0.0, 0.5, 1.0, generator.random()]))
    raw["gamma_act"] = float(generator.choice([0.0, 0.9])) * raw["gamma0"]
    instance = parse_instance(raw, "drawn")
    return instance, drawn_plan(generator, instance, devices)


def memory_by_actions(instance, plan):
    """Each device's memory, from what is kept after each action of its list."""
    sizes, memory = micro_batch_sizes(instance.b, plan.m), [0.0] * len(plan.delta)
    for stage, device in enumerate(plan.order):
        kept, most = 0, 0
        for kind, i in actions(plan.schedule, stage, len(plan.order), plan.m):
            kept += sizes[i] * ((kind == "F") - (kind == ("W" if plan.schedule == "zb-h1" else "B")))
            most = max(most, kept)
        alone = instance.gamma0 - instance.gamma_act
        memory[device] = plan.delta[device] * (alone + instance.gamma_act * most / instance.b)
    return memory


def test_the_schedule_is_the_fastest_of_all_that_fit_the_devices():
    generator, chosen = np.random.default_rng(5), []
    for _ in range(150):
        instance, plan = drawn(generator)
        tried = {}
        for name in SCHEDULES:
            scheduled = replace(plan, schedule=name)
            memory = memory_by_actions(instance, scheduled)
            assert device_memory(instance, scheduled) == pytest.approx(memory)
            if all(n <= d.mem * (1 + 1e-9) for n, d in zip(memory, instance.clusters[0].devices, strict=True)):
                times = (t.tolist() for t in plan_times(instance, 0, scheduled))
                tried[name] = makespan(name, *times), sum(memory)
        found = best_schedule(instance, 0, plan, AUTO, simulated_seconds(instance))
        chosen.append(found and found.schedule)
        if not tried:
            assert found is None
            continue
        seconds, memory = tried[found.schedule]
        assert seconds <= min(s for s, _ in tried.values()) * (1 + 2e-9)
        # Of equally fast ones the one of least memory.
        assert memory <= min(n for s, n in tried.values() if s <= seconds * (1 - 2e-9) or s == seconds) * (1 + 1e-9)
        assert (found.delta, found.order, found.m) == (plan.delta, plan.order, plan.m)
    # All answers occur.
    assert set(chosen) == {None, *SCHEDULES}


def tight(seed=0, activations=0.3e9, least_memory_gb=0.25):
    """``table2`` where TEBs are mostly activations, and devices hold few of them under GPipe."""
    scenario = load_scenario("table2", seed)
    costs = replace(scenario.costs, activation_memory=activations)
    clusters = tuple(
        tuple(replace(d, memory=d.memory * least_memory_gb / 0.375) for d in devices) for devices in scenario.clusters
    )
    return replace(scenario, costs=costs, clusters=clusters)


def test_where_schedules_keep_less_plans_fit_that_gpipe_has_no_room_for():
    """Less memory a TEB never makes the certified plan worse, and what is planned fits its devices."""
    gains = []
    for seed in range(2):
        scenario = tight(seed)
        gpipe, auto = (list(plan_rounds(scenario, DSSDA(), 2, schedule=name)) for name in ("gpipe", "auto"))
        for whole, decided in zip(gpipe, auto, strict=True):
            assert decided.violations == []
            assert sum(decided.selected) >= sum(whole.selected)
            for n, plan in enumerate(decided.plans):
                if plan.selected:
                    assert memory_violations(decided.instance, n, plan) == []
                    assert sum(plan.delta) == scenario.planner.num_blocks
            if sum(whole.selected) == sum(decided.selected):
                gains.append(decided.costs.latency_s / whole.costs.latency_s)
    assert min(gains) < 0.95
    assert max(gains) < 1.02


def test_without_room_under_any_schedule_the_round_is_planned_with_a_whole_batch_of_activations():
    """A device that holds the TEBs with one micro-batch, and with no more: as few as GPipe needs are planned."""
    generator = np.random.default_rng(7)
    outcomes = set()
    for _ in range(60):
        instance, _ = drawn(generator)
        instance = replace(instance, m_set=(1, 2), gamma_act=0.9 * instance.gamma0, energy="none", steps=1)
        round_ = Round(number=1, instance=instance, losses=[1.0])
        answer = ScheduledPolicy(DSSDA(), AUTO).plan(round_)
        outcomes.add(answer.status)
        if answer.status == "infeasible":
            assert DSSDA().plan(round_).status == "infeasible"
            continue
        [plan] = DSSDA().plans(round_, answer)
        assert best_schedule(instance, 0, plan, AUTO, simulated_seconds(instance)) is not None
    assert {"infeasible", "optimal"} <= outcomes


@pytest.mark.parametrize("energy", ["c9", "exact"])
def test_segments_planned_for_memory_stay_within_the_energy_budgets(energy):
    """Each m took the segments that were planned, and checked, for another m: C9 was broken in every third round."""
    num_trained = 0
    for seed in (0, 7, 19):
        scenario = load_scenario("table2", seed)
        generator = np.random.default_rng(seed)
        clusters = tuple(
            tuple(
                replace(d, memory=generator.uniform(0.5e9, 1e9), energy_budget_j=generator.uniform(1.0, 8.0))
                for d in devices
            )
            for devices in scenario.clusters
        )
        scenario = replace(
            scenario,
            clusters=clusters,
            costs=replace(scenario.costs, activation_memory=0.3e9),
            planner=replace(scenario.planner, num_blocks=6, batch_size=16, max_micro_batches=16, energy=energy),
        )
        for schedule in ("1f1b", "auto"):
            [planned] = plan_rounds(scenario, DSSDA(), 1, schedule=schedule)
            assert planned.violations == []
            num_trained += sum(planned.selected)
    # With segments planned for each m nobody has to be left out.
    assert num_trained == 3 * 2 * 3


def test_segments_planned_for_memory_count_the_price_of_joules():
    """The price was left out: the segments were the same at any price."""
    generator, joules = np.random.default_rng(3), []
    for _ in range(60):
        instance, _ = drawn(generator)
        instance = replace(instance, gamma_act=0.9 * instance.gamma0, energy="none", weight_share=0.5)
        rounds = [Round(number=1, instance=replace(instance, wJ=price), losses=[1.0]) for price in (0.0, 100.0)]
        answers = [ScheduledPolicy(DSSDA(), PipelineChoices.of("1f1b")).plan(round_) for round_ in rounds]
        # Of the planner itself the answer is optimal.
        if [answer.status for answer in answers] == ["feasible"] * 2:
            joules.append([round_joules(instance, 0, answer.clusters[0].choice) for answer in answers])
    assert all(priced <= free * (1 + 1e-9) for free, priced in joules)
    assert any(priced < 0.9 * free for free, priced in joules)


def test_segments_planned_for_memory_cost_least_over_all_local_steps():
    """The time of one step alone would weigh too little beside the cost of each segment."""
    generator, replaced = np.random.default_rng(9), 0
    for _ in range(60):
        instance, _ = drawn(generator)
        instance = replace(instance, gamma_act=0.9 * instance.gamma0, energy="none", steps=8, V=1.0)
        cluster = replace(instance.clusters[0], wS=float(generator.uniform(0.0, 40.0)), wS2=0.0)
        instance = replace(instance, clusters=(cluster,))
        round_ = Round(number=1, instance=instance, losses=[1.0])
        answer = ScheduledPolicy(DSSDA(), PipelineChoices.of("1f1b")).plan(round_)
        # Of the planner itself the answer is optimal.
        if answer.status != "feasible":
            continue
        speed = np.array([device.phi * device.f for device in cluster.devices])
        costs = {}
        for m in instance.m_set:
            for choice in segment_table(replace(lean_instance(instance), m_set=(m,)), 0).choices.values():
                plan = ClusterPlan(delta=choice.delta, order=choice.order(speed), m=m, schedule="1f1b")
                if all(n <= d.mem for n, d in zip(memory_by_actions(instance, plan), cluster.devices, strict=True)):
                    step_s = makespan("1f1b", *(t.tolist() for t in plan_times(instance, 0, plan)))
                    costs[choice.delta, m] = 8 * step_s + cluster.wS * choice.num_segments
        chosen = answer.clusters[0].choice
        assert costs[chosen.delta, chosen.m] <= min(costs.values()) * (1 + 1e-9)
        replaced += 1
    assert replaced >= 5


def test_clusters_without_uploads_train_on_segments_planned_for_memory():
    """The baseline ``pipeline`` selected nobody where memory changed the segments of one cluster."""
    scenario, generator = load_scenario("table2"), np.random.default_rng(0)
    clusters = tuple(
        tuple(replace(device, memory=generator.uniform(0.3e9, 1e9)) for device in devices[:3])
        for devices in scenario.clusters
    )
    costs, planner = replace(scenario.costs, activation_memory=0.3e9), replace(scenario.planner, num_blocks=4)
    scenario = replace(scenario, clusters=clusters, costs=costs, planner=planner)
    decision = RoundPlanner(scenario, PipeLine.own_policy(0), schedule="zb-h1").plan(1, [1.0] * 3)
    assert decision.selected == [True] * 3
    # Even segments would use all three devices.
    assert min(len(plan.devices) for plan in decision.plans) < 3
    for n, plan in enumerate(decision.plans):
        assert sum(plan.delta) == 4 and memory_violations(decision.instance, n, plan) == []


def test_segments_planned_for_memory_keep_the_band_that_was_divided():
    scenario = tight()
    scenario = replace(scenario, planner=replace(scenario.planner, bandwidth="split", energy="exact"))
    decision = RoundPlanner(scenario, DSSDA(), power_control="exact", schedule="1f1b").plan(1, [1.0] * 3)
    # Of the planner itself the answer would be optimal.
    assert decision.answer.status == "feasible"
    for n, part in enumerate(decision.answer.clusters):
        assert part.band_hz == decision.instance.clusters[n].B[part.channel]
        rate = decision.instance.uplink_rate(n, part.power_w, part.channel)
        assert part.uplink_s == pytest.approx(decision.instance.upload_bits(n, part.choice.m) / rate)


def test_a_plan_file_fits_under_the_schedules_that_it_runs_by(tmp_path):
    """Plans for less memory under another schedule could not be replayed: they were checked as under GPipe."""
    scenario = load_scenario("table2")
    block = scenario.costs.block_memory
    clusters = tuple(tuple(replace(d, memory=2.1 * block) for d in devices) for devices in scenario.clusters)
    scenario = replace(scenario, clusters=clusters, costs=replace(scenario.costs, activation_memory=0.8 * block))
    planned = RoundPlanner(scenario, DSSDA(), schedule="auto", power_control="exact").plan(1, [1.0] * 3)
    assert max(max(plan.delta) for plan in planned.plans) > 2
    path = tmp_path / "plan.json"

    def replayed(schedule, plans):
        write_plans(path, plans)
        planner = RoundPlanner(scenario, make_policy("fixed", plan_file=str(path)), schedule=schedule)
        return planner.plan(1, [1.0] * 3).plans

    gpipe = [replace(plan, schedule="gpipe") for plan in planned.plans]
    assert replayed("", planned.plans) == planned.plans
    # What planner.schedule says runs, whatever the file names.
    assert replayed("auto", gpipe) == planned.plans
    for schedule, plans in (("", gpipe), ("gpipe", planned.plans)):
        with pytest.raises(
            ValueError, match=r"plan.json: clusters\[0\]: delta .* does not fit under gpipe: C7: device"
        ):
            replayed(schedule, plans)


def test_an_unknown_schedule_is_refused():
    assert schedules_of("auto") == SCHEDULES and schedules_of("1f1b") == ("1f1b",)
    with pytest.raises(ValueError, match=r"planner.schedule: expected one of gpipe, 1f1b, zb-h1, auto, found 'x'"):
        RoundPlanner(load_scenario("table2"), DSSDA(), schedule="x")
