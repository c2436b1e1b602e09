"""The grid of a run, with all its layers, carries the rounds of a stock strategy over Flower's own link state."""

import threading

import pytest
import torch
from flwr.app import ConfigRecord

from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import read_waiting
from flower_app.training.cluster_setup import round_bounds
from flower_app.training.run_grid import run_grid
from helpers.link_state import Link
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.clusters import ClusterState
from strategies.grid.parcels import unpack_message
from strategies.grid.single_pulls import SinglePulls
from strategies.records import CONFIG, RUN_KEY, read_train_config, to_arrays

pytestmark = pytest.mark.usefixtures("flower_process")


def test_two_rounds_of_fedavg_go_through_all_layers(tmp_path):
    link, config = Link(2), RunConfig(strategy="FedAvg", num_clusters=2)
    scenario = load_scenario("edge-boxes")
    states = [
        ClusterState(cluster=n, node_id=node, devices=scenario.clusters[0], block_memory=1.0, num_examples=8)
        for n, node in enumerate(link.nodes)
    ]
    bounds = round_bounds(config, 2, states)
    strategy = make_stock("FedAvg", {}, 2)
    orders = []

    def node(cluster):
        for _ in range(2):
            message = link.pull(cluster)
            assert unpack_message(message)
            order = read_train_config(message.content.config_records[CONFIG], cluster)
            orders.append((order.round, cluster, order.run))
            values = {"w": torch.full((3,), float(cluster + order.round))}
            reply = answer_to(message, cluster, values, steps=config.local_steps)
            reply.metadata.__dict__["_message_id"] = f"reply to {message.metadata.message_id}"
            assert link.state.store_message_res(reply)

    for cluster in range(2):
        threading.Thread(target=node, args=(cluster,), daemon=True).start()
    grid = run_grid(SinglePulls(link.grid), config, tmp_path, None, link.clusters, bounds, None)
    strategy.start(
        grid,
        initial_arrays=to_arrays({"w": torch.zeros(3)}),
        num_rounds=2,
        timeout=120,
        train_config=ConfigRecord({RUN_KEY: "run-1"}),
    )
    assert sorted(orders) == [(round_, cluster, "run-1") for round_ in (1, 2) for cluster in range(2)]
    assert grid.last_round["failed"] == [] and len(grid.last_round["clusters"]) == 2
    assert read_waiting(tmp_path) == {}
