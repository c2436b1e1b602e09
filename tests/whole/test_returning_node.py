"""A SuperNode that was started again has lost what Flower kept for it, and finds it in its own folder."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.actors import ControlUnitError
from client_pipeline.system.scenario import load_scenario
from flower_app import client_app
from flower_app.node import kept_setup
from helpers.tiny_models import CLASSIC, NUM_BLOCKS
from strategies.clusters import ClusterState
from strategies.records import ARRAYS, CONFIG, ROUND_KEY, to_arrays


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Ask a node without a memory to train a round of a run; returns what reaches its control unit."""
    asked = []

    def train_round(run, cluster, order, *_):
        asked.append((run, cluster, order))
        raise ControlUnitError("as far as this")

    monkeypatch.setattr(client_app, "train_round", train_round)

    def ask(run_name):
        state = {"partition-id": 1, "state-dir": str(tmp_path)}
        context = Context(run_id=5, node_id=7, node_config=state, state=RecordDict(), run_config={})
        config = ConfigRecord({ROUND_KEY: 3, "run-name": run_name})
        message = SimpleNamespace(content=RecordDict({CONFIG: config, ARRAYS: to_arrays({})}))
        try:
            client_app._train(message, context)
        except Exception as error:
            return asked, f"{type(error).__name__}: {error}"

    return ask


def test_it_goes_on_with_the_set_up_of_its_run(ask, tmp_path):
    devices = load_scenario("edge-boxes").clusters[0]
    plan = ClusterPlan(delta=(NUM_BLOCKS, 0), order=(0, 1), m=1)
    told = {
        "num-clusters": 2,
        "spec": CLASSIC.to_json(),
        "num-blocks": NUM_BLOCKS,
        "network": json.dumps(
            [
                ClusterState(cluster=n, node_id=0, devices=devices, block_memory=1.0, num_examples=0).to_dict()
                for n in range(2)
            ]
        ),
        "plans": json.dumps([plan.to_dict(), replace(plan, m=2).to_dict()]),
    }
    kept_setup.write(tmp_path / "run-1" / "cluster-1", told, {})
    asked, error = ask("run-1")
    assert error == "ControlUnitError: as far as this"
    [(run, cluster, order)] = asked
    assert (run, cluster, order.round, order.plan.m) == ("5", 1, 3, 2)


def test_a_node_without_its_folder_says_so(ask, tmp_path):
    asked, error = ask("run-1")
    assert asked == []
    assert error.startswith("RuntimeError: cluster 1: its node was started again without its --state: ")
    assert str(tmp_path / "run-1" / "cluster-1") in error
