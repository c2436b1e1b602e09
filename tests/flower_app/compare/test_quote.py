"""``collapipe quote``: the sums of the planner's own rounds, and changes that are planned anew."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client_pipeline.link.compression import CompressionConfig
from flower_app import train
from flower_app.cli.main import app
from flower_app.compare.quote import quote, quote_text, read_change, read_changes
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.training.network import training_scenario
from helpers.command_line import TINY
from strategies.planning.dry_run import plan_rounds
from strategies.planning.planner import InfeasibleRound
from strategies.planning.policies import make_policy

SCENARIO = """
format = "collapipe-scenario/1"
clusters = {clusters}
devices = 3
channels = 2
seed = 3
[device]
flop-per-cycle = 20.0
frequency-ghz = [0.8, 0.4, 0.5]
memory-gb = [{first}, 1.2, 1.2]
[block]
memory-gb = 0.375
upload-mbit = {upload}
upload-energy-mbit = 2.0
[planner]
gamma-max = 50.0
"""
QUICK = {"num-rounds": 6, "planner.power-control": "exact", "model.encoder-layers": 6}


@pytest.fixture
def network(tmp_path):
    def write(name="net", **values):
        path = tmp_path / f"{name}.toml"
        path.write_text(SCENARIO.format(**{"clusters": 2, "first": 1.2, "upload": 2.0, **values}))
        return RunConfig.from_flat(QUICK | {"scenario": str(path)})

    return write


def test_a_quote_has_the_sums_of_the_planned_rounds(network):
    config = network()
    document = quote(config)
    rounds = list(plan_rounds(training_scenario(config), make_policy("dssda"), 6))
    assert document["seconds"] == pytest.approx(sum(r.costs.latency_s for r in rounds), rel=1e-9)
    assert document["joules"] == pytest.approx(sum(r.costs.energy_j for r in rounds), rel=1e-9)
    assert document["lower_bound"] == pytest.approx(sum(r.answer.lower_bound for r in rounds), rel=1e-9)
    assert document["objective"] >= document["lower_bound"] * (1 - 1e-6)
    assert document["round_s"]["p5"] <= document["round_s"]["mean"] <= document["round_s"]["p95"]
    boxes = document["boxes"]
    assert sum(box["link_bytes"] for box in boxes) == pytest.approx(document["link_bytes"], rel=1e-9) != 0
    uplinks_j = sum(c.uplink_energy_j for r in rounds for c in r.costs.clusters if c)
    assert sum(box["joules"] for box in boxes) + uplinks_j == pytest.approx(document["joules"], rel=1e-9)
    computing_s = sum(r.instance.steps * c.work.device_s.sum() for r in rounds for c in r.costs.clusters if c)
    assert sum(box["seconds"] for box in boxes) == pytest.approx(computing_s, rel=1e-9)
    used = [box for box in boxes if box["share"]]
    assert used and all(
        0 < box["memory_bytes"] <= box["has_bytes"] and box["joules"] > 0 and box["seconds"] > 0 for box in used
    )
    assert sum(entry["share"] for entry in document["bottlenecks"]) == pytest.approx(1.0)


@pytest.mark.parametrize("value", ["2.4", "x2"])
def test_what_a_change_saves_is_what_the_changed_network_takes(network, value):
    config, changed = network(clusters=1), network("more", clusters=1, first=2.4)
    change = read_change(f"device=0,memory-gb={value}", training_scenario(config))
    assert change.of(training_scenario(config)).clusters == training_scenario(changed).clusters
    [effect] = quote(config, [change])["what_if"]
    assert effect["saves"] == pytest.approx(1 - quote(changed)["seconds"] / quote(config)["seconds"], rel=1e-9)
    assert effect["saves"] > 0.01


def test_a_network_that_waits_for_its_uploads_is_told_so_and_what_helps(network):
    document = quote(network(upload=400.0))
    assert document["bottlenecks"][0]["what"] == "upload"
    best = document["hardware"][0]
    assert "bandwidth of the uplink" in best["change"] and 0 < best["saves"] < 0.5
    assert [e["saves"] for e in document["hardware"]] == sorted(
        (e["saves"] for e in document["hardware"]), reverse=True
    )


def test_a_change_after_which_nobody_can_train_is_told_with_the_reason(network):
    config = network()
    texts = [f"device={n}.{k},memory-gb=0.1" for n in range(2) for k in range(3)]
    scenario = training_scenario(config)
    changes = [read_change(text, scenario) for text in texts]

    def all_of_them(network):
        for change in changes:
            network = change.of(network)
        return network

    [effect] = quote(config, [changes[0]._replace(text="none", of=all_of_them)])["what_if"]
    assert effect["saves"] is None and "C7" in effect["reason"]
    with pytest.raises(InfeasibleRound, match="round 1: no cluster can train"):
        quote(RunConfig.from_flat(config.to_flat() | {"model.encoder-layers": 60}))


def test_the_command_prints_boxes_and_what_a_change_does(network):
    config = network()
    pairs = [
        part for key, value in (QUICK | {"scenario": config.scenario}).items() for part in ("--set", f"{key}={value}")
    ]
    result = CliRunner().invoke(app, ["quote", *pairs, "--what-if", "cluster=1,bandwidth-mhz=x2"])
    assert result.exit_code == 0, result.output
    assert "6 rounds: " in result.output and "what if: cluster=1,bandwidth-mhz=x2: -" in result.output
    document = json.loads(CliRunner().invoke(app, ["quote", *pairs, "--json"]).stdout)
    assert len(document["boxes"]) == 6 and document["what_if"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device=0.0", "expected device=CLUSTER.DEVICE,KEY=VALUE or cluster=CLUSTER,KEY=VALUE, found 'device=0.0'"),
        ("box=1,memory-gb=2", "expected device=CLUSTER.DEVICE"),
        ("device=0,memory-gb=2", "device: expected such as 0.4, found '0'"),
        ("device=0.3,memory-gb=2", "the network has no device 0.3"),
        ("cluster=2,bandwidth-mhz=2", "the network has no cluster 2"),
        ("device=0.0,memory=2", "expected one of memory-gb, .* found 'memory'; did you mean 'memory-gb'"),
        ("device=0.0,memory-gb=much", "memory-gb: expected a number above 0, or x2 for twice as much, found 'much'"),
        ("device=0.0,memory-gb=nan", "expected a number above 0"),
        ("cluster=0,bandwidth-mhz=x0", "expected a number above 0"),
    ],
)
def test_mistakes_in_a_change_are_named(network, text, message):
    with pytest.raises(ValueError, match=f"--what-if: .*{message}"):
        read_changes(network(), [text])


def test_a_change_of_a_cluster_that_does_not_train_is_a_mistake(network):
    first = replace(network(), num_clusters=1)
    with pytest.raises(ValueError, match="the network has no cluster 1, found"):
        read_changes(first, ["cluster=1,bandwidth-mhz=x2"])
    [change] = read_changes(first, ["device=2,memory-gb=x2"])
    assert change.of(training_scenario(first).first(1)).clusters[0][2].memory == 2.4e9


def test_prices_are_of_the_rounds_own_problems_without_clusters_that_cannot_train(network):
    config = replace(network("poor", clusters=0), num_rounds=2)
    file = Path(config.scenario)
    # The second cluster has no room for the model.
    tables = "[[cluster]]\n[[cluster]]\n[cluster.device]\nmemory-gb = 0.1\n[[cluster]]\n"
    text = file.read_text().replace("clusters = 0\n", "").replace("channels = 2", "channels = 3")
    file.write_text(text + tables)
    document = quote(config, with_prices=True)
    prices = {(p["resource"], p["cluster"], p["device"]): p for p in document["prices"]}
    assert {cluster for _, cluster, _ in prices} == {0, 2, None}
    link = prices["link", 0, 2]
    assert link["rounds"] == 2 and link["least"] - 1e-5 <= link["objective"] <= link["most"] + 1e-5
    rounds = [r.answer.objective for r in plan_rounds(training_scenario(config), make_policy("dssda"), 1)]
    more = read_change("device=0.2,link-bandwidth-mhz=1.5", training_scenario(config)).of(training_scenario(config))
    changed = [r.answer.objective for r in plan_rounds(more, make_policy("dssda"), 1)]
    first = quote(replace(config, num_rounds=1), with_prices=True)["prices"]
    [price] = [p for p in first if (p["resource"], p["cluster"], p["device"]) == ("link", 0, 2)]
    assert price["objective"] == pytest.approx(changed[0] - rounds[0], rel=1e-6) and price["objective"] < -1
    text = quote_text(document)
    assert "device 0.2, 1 MHz more for its link: objective -" in text and "one more channel" not in text


@pytest.mark.parametrize("schedule", ["", "1f1b"])
def test_prices_are_of_the_memory_that_the_schedule_keeps(network, schedule):
    """GPipe keeps the activations of a whole batch, so that the fastest device has room for one TEB."""
    config = network(clusters=1, first=0.5)
    file = Path(config.scenario)
    file.write_text(file.read_text().replace("memory-gb = 0.375", "memory-gb = 0.39\nactivation-memory-gb = 0.3"))
    config = replace(config, num_rounds=1, planner=replace(config.planner, schedule=schedule))
    document = quote(config, with_prices=True)
    scenario = training_scenario(config)
    more = read_change("device=0.0,memory-gb=1.5", scenario).of(scenario)
    before, after = (
        next(plan_rounds(s, make_policy("dssda"), 1, schedule=schedule)).answer.objective for s in (scenario, more)
    )
    [price] = [p for p in document["prices"] if (p["resource"], p["device"]) == ("memory", 0)]
    assert price["objective"] == pytest.approx(after - before, rel=1e-6, abs=1e-9)
    assert price["objective"] < -1
    document["prices"] = [price | {"least": None}]
    assert "device 0.0, 1 GB more: objective -" in quote_text(document) and "(not certified)" in quote_text(document)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "FedAvg"}, "quote: strategy = FedAvg plans nothing"),
        ({"costs": "measured"}, "quote: costs = measured follows a run's own times"),
    ],
)
def test_what_cannot_be_quoted_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        quote(RunConfig.from_flat(QUICK | values))


@pytest.mark.parametrize("values", [{"strategy": "titanic"}, {"policy": "random"}])
def test_prices_are_of_the_certified_planner_alone(values):
    with pytest.raises(ValueError, match="--prices: expected the certified planner .*; leave --prices"):
        quote(RunConfig.from_flat(QUICK | values), with_prices=True)


@pytest.mark.slow
def test_of_activations_that_are_kept_one_epoch_is_quoted_as_the_run_then_took(tmp_path):
    frozen = {"model.trainable": "lora", "lora.first-block": 4, "compression.cache-gb": 0.1, "model.family": "llama"}
    more = {"task.name": "causal-lm", "scenario": "two-clusters", "num-rounds": 5, "local-steps": 5, "batch-size": 10}
    values = TINY | frozen | more | {"costs": "model", "run-dir": str(tmp_path / "run")}
    config = load_config(None, [f"{key}={value}" for key, value in values.items()])
    document, every = quote(config), quote(replace(config, compression=CompressionConfig()))
    run = train(None, values)
    lines = [line["virtual"] for line in run.rounds]
    assert document["seconds"] == pytest.approx(sum(line["latency_s"] for line in lines), rel=1e-9)
    assert document["joules"] == pytest.approx(sum(line["energy_j"] for line in lines), rel=1e-9)
    sent = [sum(cluster["uplink_bytes"] for cluster in line["clusters"] if cluster["selected"]) for line in lines]
    assert document["uplink_bytes"] == pytest.approx(sum(sent), rel=1e-9)
    # Of 150 examples in each cluster three rounds send all, the two after them the updates alone.
    assert sent[0] == sent[2] > 2 * sent[3] and document["uplink_bytes"] < 0.75 * every["uplink_bytes"]
