"""The grid of a run, with all its layers, carries the rounds of a stock strategy over Flower's own link state."""

import threading
import time

import pytest
import torch
from flwr.app import ConfigRecord

from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import read_waiting, write_waiting
from flower_app.training.cluster_setup import round_bounds
from flower_app.training.run_grid import run_grid
from helpers.link_state import Link
from helpers.replies import answer_to
from strategies.baselines.stock import make_stock
from strategies.clusters import ClusterState
from strategies.grid import bounded
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
            order = read_train_config(message.content.config_records[CONFIG])
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
        timeout=60.0,
        train_config=ConfigRecord({RUN_KEY: "run-1"}),
    )
    assert sorted(orders) == [(round_, cluster, "run-1") for round_ in (1, 2) for cluster in range(2)]
    assert grid.last_round["failed"] == [] and len(grid.last_round["clusters"]) == 2
    assert read_waiting(tmp_path) == {}


def test_the_file_of_waits_names_who_is_missing_why_and_since_when(tmp_path, monkeypatch):
    """Who follows a run sees no more of an exchange than this file."""
    monkeypatch.setattr(bounded, "WORTH_TELLING_S", 3.0)
    link = Link(3)
    # As a run leaves it that was killed.
    write_waiting(tmp_path, {9: "its stream to the decoder broke off"})
    bounds = round_bounds(RunConfig(strategy="FedAvg", num_clusters=3), 2, [])
    grid = run_grid(SinglePulls(link.grid), RunConfig(strategy="FedAvg"), tmp_path, None, link.clusters, bounds, None)
    assert read_waiting(tmp_path) == {}
    began = time.time()
    exchange = threading.Thread(target=grid.send_and_receive, args=(link.orders(0, 1, 2),), daemon=True)
    exchange.start()
    orders = [link.pull(cluster) for cluster in range(3)]
    # As long as nobody has answered nothing is amiss.
    assert read_waiting(tmp_path) == {}

    def waits_of(clusters):
        deadline = time.monotonic() + 30.0
        while set(waits := read_waiting(tmp_path)) != clusters:
            assert time.monotonic() < deadline, waits
            time.sleep(0.01)
        return waits

    link.answer(orders[0])
    # Nor while the others come soon after.
    time.sleep(0.2)
    assert read_waiting(tmp_path) == {}
    both = waits_of({"1", "2"})
    assert {wait.reason for wait in both.values()} == {"its answer has not come"}
    assert all(began <= wait.since <= time.time() for wait in both.values())
    link.answer(orders[1])
    assert waits_of({"2"}) == {"2": both["2"]}
    # The reason may change, as when a cut stream becomes a lost cluster: the wait goes on.
    write_waiting(tmp_path, {2: "its stream broke off"})
    assert read_waiting(tmp_path)["2"] == ("its stream broke off", both["2"].since)
    link.answer(orders[2])
    assert waits_of(set()) == {}
    exchange.join(30.0)
    assert not exchange.is_alive() and not (tmp_path / "waiting.json").exists()
