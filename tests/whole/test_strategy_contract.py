"""Contract of every strategy: each trains for real on the same clients, with the same accounting."""

import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from safetensors.torch import load_file

from client_pipeline.partition.plan import read_plans
from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.config.strategy_choice import check_can_resume, make_planner
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.report.pictures import write_pictures
from flower_app.saved_model import load_model
from helpers.command_line import TINY, rounds

pytestmark = pytest.mark.slow

SCENARIO = """
format = "collapipe-scenario/1"
channels = 1
seed = 3
[device]
flop-per-cycle = 20.0
memory-gb = 1.2
[block]
memory-gb = 0.375
[[cluster]]
name = "workshop"
devices = 3
data-share = 2.0
[cluster.device]
frequency-ghz = [0.8, 0.7, 0.5]
[[cluster]]
name = "depot"
devices = 4
[cluster.device]
frequency-ghz = { min = 0.3, max = 0.4 }
memory-gb = [0.8, 0.8, 0.4, 0.4]
"""
SIZES = [3, 4]
EXAMPLES = [200, 100]
"""Examples of each cluster of 300, by the shares."""
CASES = {
    "random": {"policy": "random+optimal"},
    "uniform": {"policy": "uniform", "tensorboard": "true", "device-emulation": "paced", "time-scale": 0.002},
    "vanilla-fl": {"strategy": "vanilla-fl"},
    "pipeline": {"strategy": "pipeline"},
    "titanic": {"strategy": "titanic"},
    "FedAdam": {"strategy": "FedAdam", "strategy-options": '{"eta": 0.02}'},
    "module:Class": {"strategy": "flwr.serverapp.strategy:FedMedian", "costs": "model"},
    "outside": {"strategy": "helpers.outside_strategy:TradedModels", "strategy-options": '{"every": 1}'},
}
CLIP = 0.001
"""Clip of an update; a round of these runs moves the encoder hundreds of times as far."""
RANKS = {"model.trainable": "lora", "lora.rank": 4, "lora.average": "products", "lora.cluster-ranks": "4,2"}
AVERAGES_NOTHING = ("pipeline", "outside")
UPLOADS_BY_PLAN = ("random", "uniform", "vanilla-fl", "titanic")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """All cases, and some more runs, one after the other in one simulation: their run directories."""
    folder = tmp_path_factory.mktemp("contract")
    (folder / "two.toml").write_text(SCENARIO)
    physical = (files("configs") / "scenarios" / "physical.toml").read_text()
    (folder / "physical.toml").write_text(
        re.sub(r"(?m)^clusters = 3\ndevices = 6$", "clusters = 2\ndevices = 3", physical)
    )
    common = TINY | {"num-rounds": 2, "evaluate-every": 1, "scenario": folder / "two.toml"}
    cases = {
        **CASES,
        "energy-queue": {"scenario": folder / "physical.toml"},
        "ranks": {"scenario": "two-clusters", **RANKS},
        "clipped": {"privacy.update-mechanism": "client-fixed", "privacy.update-clip": CLIP},
    }
    wanted = {
        name: load_config(None, [f"{key}={value}" for key, value in (common | more).items()])
        for name, more in cases.items()
    }
    run_dirs = {name: folder / "runs" / name.replace(":", "-") for name in wanted}
    series = [SeriesRun(name, replace(config, run_dir=str(run_dirs[name]))) for name, config in wanted.items()]
    train_series(series, folder / "session", print)
    return run_dirs


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_strategy_trains_and_accounts_for_every_round(name, trained):
    run_dir = trained[name]
    write_pictures(run_dir)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    lines = rounds(run_dir)
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert math.isfinite(line["train_loss"]) and line["weight"] > 0 and line["metrics"]["loss"] > 0
        chosen = [c["cluster"] for c in line["virtual"]["clusters"] if c["selected"]]
        assert [c["cluster"] for c in line["clusters"]] == chosen
        # One channel: who needs it by plan trains alone; others wait for it, or need none.
        assert len(chosen) == (1 if name in UPLOADS_BY_PLAN else 2)
        check_costs(line["virtual"], line)
        assert (line["bytes_up"] == 0) == (name == "pipeline")
    arrays = load_file(run_dir / "checkpoint" / "round-000002" / "weights.safetensors")
    assert all(key.startswith("cluster-") for key in arrays) == (name in AVERAGES_NOTHING)
    plans = read_plans(run_dir / "plans" / "round-0002.json")
    assert [sum(plan.delta) for plan in plans] == [4, 4]
    assert [len(plan.delta) for plan in plans] == SIZES
    for line in lines:
        assert [c["name"] for c in line["virtual"]["clusters"]] == ["workshop", "depot"]
        for report in line["clusters"]:
            n = report["cluster"]
            assert report["num_examples"] == EXAMPLES[n] and len(report["plan"]["delta"]) == SIZES[n]
        for cost in (c for c in line["virtual"]["clusters"] if c["selected"]):
            assert len(cost["device_energy_j"]) == len(cost["device_memory_bytes"]) == SIZES[cost["cluster"]]
    assert load_model(run_dir).parts.weights()
    for file in ("report.html", "timeline.json", "trace.json", "checkpoint/round-000002/state.json"):
        assert (run_dir / file).is_file(), file
    assert (run_dir / "tensorboard").is_dir() == (name == "uniform")
    paced = [c["paced_s"] for line in lines for c in line["clusters"]]
    if name == "uniform":
        # Paced devices take no less than the model says; how much more is a benchmark's matter.
        ends = [c["train_s"] + c["uplink_s"] for line in lines for c in line["virtual"]["clusters"] if c["selected"]]
        assert all(took >= 0.002 * end for took, end in zip(paced, ends, strict=True))
    else:
        assert set(paced) == {None}
    [cluster, *_] = json.loads((run_dir / "timeline.json").read_text())["clusters"]
    assert cluster["measured"] and bool(cluster["modelled"]) == (name != "vanilla-fl")


def test_what_a_strategy_from_outside_declares_is_what_the_run_does(trained):
    """The class of ``outside_strategy`` averages nothing, uploads all the same, and brings its own plan and option."""
    lines = rounds(trained["outside"])
    assert [line["plan"]["policy"] for line in lines] == ["traded"] * 2
    assert all(line["plan"]["waived"] == ["C9"] for line in lines)
    first, second = (
        load_file(trained["outside"] / "checkpoint" / f"round-{number:06}" / "weights.safetensors") for number in (1, 2)
    )
    for models in (first, second):
        of_first = {name for name in models if name.startswith("cluster-0/")}
        pairs = [(models[name], models[name.replace("cluster-0", "cluster-1")]) for name in of_first]
        assert 2 * len(pairs) == len(models) and not all(torch.equal(ours, theirs) for ours, theirs in pairs)
    config = {"strategy": "helpers.outside_strategy:TradedModels"}
    with pytest.raises(ValueError, match="every cluster has a model of its own, so none is the best"):
        RunConfig.from_flat(config | {"selection.load-best-at-end": True})
    with pytest.raises(ValueError, match="takes no argument 'often'; expected some of every"):
        make_planner(RunConfig.from_flat(config | {"strategy-options": '{"often": 1}'}), load_scenario("default"))
    with pytest.raises(ValueError, match="aggregator.name: median needs strategy = collapipe"):
        make_planner(RunConfig.from_flat(config | {"aggregator.name": "median"}), load_scenario("default"))
    check_can_resume(RunConfig.from_flat(config))


def test_mods_clip_each_update_of_a_shared_simulation(trained):
    """One cluster a round uploads, so that a round moves as far as its update."""
    rounds = [trained["clipped"] / "checkpoint" / f"round-{number:06}" / "weights.safetensors" for number in (1, 2)]
    first, second = map(load_file, rounds)
    change = [second[name] - value for name, value in first.items() if not name.startswith("head.")]
    assert float(torch.cat([c.flatten() for c in change]).norm()) == pytest.approx(CLIP, rel=0.01)


def test_clusters_of_two_ranks_train_one_model(trained):
    run_dir = trained["ranks"]
    lines = rounds(run_dir)
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    for line in lines:
        assert not line["failed"]
        whole, half = (cluster["payload_bytes"]["update"] for cluster in line["clusters"])
        assert whole == 2 * half > 0
    # What is kept is of the global rank, and both clusters have taken part in it.
    spec = json.loads((run_dir / "model" / "spec.json").read_text())
    assert spec["lora"]["rank"] == 4
    weights = load_file(run_dir / "model" / "model.safetensors")
    factors = [value for name, value in weights.items() if ".lora_B." in name]
    assert factors and all(value.shape[1] == 4 and value.any() for value in factors)


def check_costs(virtual, line):
    """Seconds and joules add up."""
    steps = 3
    ends = []
    for cluster in (c for c in virtual["clusters"] if c["selected"]):
        assert 0 < cluster["pipeline_s"] and cluster["pipeline_fused_s"] <= cluster["pipeline_eq15_s"] * (1 + 1e-9)
        assert cluster["train_s"] == pytest.approx(steps * cluster["pipeline_s"])
        ends.append(cluster["train_s"] + cluster["uplink_wait_s"] + cluster["uplink_s"])
        assert ends[-1] + cluster["waiting_s"] == pytest.approx(virtual["latency_s"])
        assert sum(cluster["device_energy_j"]) > 0
        report = next(c for c in line["clusters"] if c["cluster"] == cluster["cluster"])
        assert all(d["held_bytes"] > 0 for d in report["devices"].values())
    assert virtual["latency_s"] == pytest.approx(max(ends))
    spent = [sum(c["device_energy_j"]) + c["uplink_energy_j"] for c in virtual["clusters"] if c["selected"]]
    assert virtual["energy_j"] == pytest.approx(sum(spent))


@pytest.mark.timeout(1200)
def test_the_powers_of_a_round_are_those_of_convex_programs_and_its_line_shows_their_work(trained):
    first, second = rounds(trained["energy-queue"])
    for line in (first, second):
        found = line["plan"]["power_control"]
        chosen = {c["cluster"]: c["power_w"] for c in line["virtual"]["clusters"] if c["selected"]}
        assert found["used"] == "sca" and found["iterations"] >= 1 and found["residual"] <= 1e-6
        assert abs(found["gap"]) <= 1e-6 and line["plan"]["gap"] <= 1e-6
        assert {c["cluster"]: c["sca_w"] for c in found["clusters"]} == chosen
    assert all(c["energy_queue"] == 0 for c in first["virtual"]["clusters"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "titanic", "policy": "uniform"}, "policy: titanic brings its own plan"),
        ({"strategy": "vanilla-fl", "plan": "x.json"}, "plan: vanilla-fl brings its own plan"),
        ({"strategy": "pipeline", "strategy-options": "{}"}, None),
        ({"strategy": "FedAvg", "device-emulation": "paced"}, "device-emulation: FedAvg sends no plan"),
        ({"planner.drift": "printed"}, 'set policy = "dssda-paper"'),
        ({"strategy": "titanic", "planner.drift": "printed"}, 'set policy = "dssda-paper"'),
        ({"strategy": "FedAvg", "planner.c11": True}, 'set policy = "dssda-paper"'),
        ({"planner.schedule": "2f2b"}, "planner.schedule: expected one of gpipe, 1f1b, zb-h1, auto, found '2f2b'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message):
    def choose():
        return make_planner(RunConfig.from_flat(changes), load_scenario("default"))

    if message is None:
        assert choose().policy.name == "pipeline"
    else:
        with pytest.raises(ValueError, match=message):
            choose()


def test_the_schedule_of_a_configuration_is_that_of_its_rounds():
    config = RunConfig.from_flat({"planner.schedule": "auto", "planner.power-control": "exact"})
    decision = make_planner(config, load_scenario("default")).plan(1, [1.0] * 3)
    plain = make_planner(RunConfig(), load_scenario("default")).plan(1, [1.0] * 3)
    assert {plan.schedule for plan in plain.plans} == {"gpipe"} != {plan.schedule for plan in decision.plans}
    titanic = RunConfig.from_flat({"strategy": "titanic", "planner.schedule": "1f1b"})
    decided = make_planner(titanic, load_scenario("default")).plan(1, [1.0] * 3)
    assert {plan.schedule for plan in decided.plans} == {"1f1b"}
