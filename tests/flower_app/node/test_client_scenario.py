"""Work that the client does once in a run, however many rounds there are."""

import json
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit.round_order import RoundResult
from client_pipeline.system.scenario import load_scenario
from flower_app import client_app
from flower_app.config.run_config import RunConfig
from flower_app.training import network as training_network
from helpers.tiny_models import CLASSIC, NUM_BLOCKS
from strategies.clusters import ClusterState
from strategies.planning.replan import ScheduledReplan
from strategies.records import ARRAYS, CONFIG, ROUND_KEY, to_arrays, train_config


@pytest.fixture
def calls(monkeypatch):
    """Count how often the scenario is read and FLOP are counted."""
    counted = {"load_scenario": 0, "model_costs": 0}
    functions = {name: getattr(training_network, name) for name in counted}
    for name, function in functions.items():

        def count(*args, name=name, real=function, **options):
            counted[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(training_network, name, count)
    return counted


def train_rounds(monkeypatch, numbers, run_id=1, plan=None, block_memory=1.0, plans="", **run_config):
    """Train messages of a simulated node, one after the other; returns the orders that its control unit got."""
    orders = []

    def train_round(run, cluster, order, timeout, place):
        orders.append(order)
        return RoundResult(weights={}, weight=1, loss=1.0, steps=1, wall_s=1.0, report={"num_examples": 7})

    monkeypatch.setattr(client_app, "train_round", train_round)
    monkeypatch.setattr(client_app, "Message", lambda content, reply_to: content)
    devices = load_scenario("default").clusters[0]
    state = ClusterState(cluster=0, node_id=7, devices=devices, block_memory=block_memory, num_examples=7)
    kept = {
        "spec": CLASSIC.to_json(),
        "num-blocks": NUM_BLOCKS,
        "plans": plans,
        "cluster": json.dumps(state.to_dict()),
        "folder": ".",
    }
    context = Context(
        run_id=run_id,
        node_id=7,
        node_config={"partition-id": 0, "num-partitions": 3},
        state=RecordDict({client_app.STATE: ConfigRecord(kept)}),
        run_config=run_config,
    )
    for number in numbers:
        config = ConfigRecord({ROUND_KEY: number}) if plan is None else train_config(number, plan)
        content = RecordDict({CONFIG: config, ARRAYS: to_arrays({})})
        client_app._train(SimpleNamespace(content=content), context)
    return orders


PLAN = ClusterPlan(delta=(2, 3, 0), order=(0, 1), m=2)


def replans(orders):
    """Plans for the two devices that are left when the middle one is lost."""
    return [order.replan(PLAN, (0, 2), {}) for order in orders]


def test_a_runs_scenario_is_read_when_a_device_is_lost_and_once(monkeypatch, calls):
    """The scenario went with every train message, and each message had its FLOP counted."""
    orders = train_rounds(monkeypatch, (1, 2, 3), run_id=101, costs="model")
    assert calls == {"load_scenario": 0, "model_costs": 0}
    plans = replans(orders)
    assert calls == {"load_scenario": 1, "model_costs": 1}
    assert [order.replan.round for order in orders] == [1, 2, 3]
    assert all(plan.delta[1] == 0 and sum(plan.delta) == NUM_BLOCKS and plan.m == 2 for plan in plans)


def test_the_plan_for_the_devices_that_are_left_is_the_planners_on_the_runs_network(monkeypatch):
    [order] = train_rounds(monkeypatch, [4], run_id=104)
    scenario = training_network.training_scenario(RunConfig(), CLASSIC)
    expected = ScheduledReplan(scenario=scenario, cluster=0, round=4)
    assert replans([order]) == [expected(PLAN, (0, 2), {})]
