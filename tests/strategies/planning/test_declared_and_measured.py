"""Plans by measured times, and accounts by the scenario's: uploads, their bits, bands, reasons."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.system.radio import upload_energy, upload_time
from client_pipeline.system.scenario import load_scenario
from strategies.dssda.round_problem import round_bound
from strategies.estimation.cluster_times import DEVICE, UPLOAD
from strategies.estimation.measured_network import MeasuredNetwork, declared_times
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy

FRESH = [1.0] * 3


def as_declared(scenario, network):
    """Let every time but the uploads' be measured as the scenario has it."""
    declared = RoundPlanner(scenario, make_policy("dssda"), power_control="exact").plan(1, FRESH).declared
    for n, times in enumerate(network.clusters):
        for key, (fixed_s, sample_s) in declared_times(declared, n).items():
            times.believe(key, fixed_s, sample_s)
    return declared


def test_virtual_time_joules_and_gamma_are_the_scenarios_where_a_deployments_uploads_were_measured():
    scenario, network = load_scenario("table2"), MeasuredNetwork(3)
    as_declared(scenario, network)
    network.clusters[0].believe((UPLOAD, 0), 0.25, 0.0)
    planner = RoundPlanner(scenario, make_policy("dssda"), power_control="exact", adaptation=Adaptation(network))
    decision = planner.plan(1, FRESH)
    virtual = decision.as_declared()
    assert virtual.instance is decision.declared
    for n, part in enumerate(virtual.answer.clusters):
        rate = decision.declared.uplink_rate(n, part.power_w, part.channel)
        up = decision.declared.clusters[n].up
        assert part.uplink_s == pytest.approx(float(upload_time(up.t_bits, rate)))
        assert part.uplink_energy_j == pytest.approx(float(upload_energy(up.e_bits, part.power_w, rate)))
    expected = round_bound(scenario, decision.network, decision.declared, decision.answer)
    np.testing.assert_array_equal(planner.settle(decision), expected)
    assert not np.array_equal(expected, round_bound(scenario, decision.network, decision.instance, decision.answer))


@pytest.mark.parametrize("scale", [None, 1.0], ids=["deployment", "paced"])
def test_activations_of_an_upload_are_part_of_what_was_measured_or_as_many_as_declared(scale):
    network = MeasuredNetwork(3, scale)
    declared = as_declared(load_scenario("table2-activations"), network)
    middle = np.median(declared.m_set)
    assert declared.m_decides_upload
    instance = network.instance(declared)
    assert float(instance.activation_bits(4)) == pytest.approx(float(declared.activation_bits(middle)))
    network.clusters[0].believe((UPLOAD, 0), 0.25 if scale is None else 1.0, 0.0)
    instance = network.instance(declared)
    if scale is None:
        up = instance.clusters[0].up
        assert instance.upload_bits(0, 4) / instance.uplink_rate(0, up.Pmax, 0) == pytest.approx(0.25)
    else:
        assert instance.upload_bits(0, 4) == pytest.approx(declared.upload_bits(0, middle))


def test_lost_devices_are_forgotten_only_where_a_plan_needs_them_and_changes_of_others_are_kept():
    scenario, network = load_scenario("table2").first(2), MeasuredNetwork(2)
    weak = (replace(scenario.uplinks[0], energy_budget_j=1e-6), scenario.uplinks[1])
    # The first has no power for its upload: what it lost has nothing to do with it.
    scenario = replace(scenario, uplinks=weak)
    plans = []
    for away in (set(), {0}):
        network = MeasuredNetwork(2)
        planner = RoundPlanner(scenario, make_policy("dssda"), power_control="exact", adaptation=Adaptation(network))
        first = planner.plan(1, [1.0] * 2)
        for n, times in enumerate(network.clusters):
            for key, (fixed_s, sample_s) in declared_times(first.declared, n).items():
                slow = 6.0 if n == 1 and key == (DEVICE, int(np.argmax(first.plans[1].delta))) else 1.0
                times.believe(key, slow * fixed_s, slow * sample_s)
        network.clusters[0].away = set(away)
        decision = planner.plan(2, [1.0] * 2)
        assert decision.left_out.keys() == {0} and network.clusters[0].away == away
        plans.append(decision.plans[1])
    assert plans[0] == plans[1]
