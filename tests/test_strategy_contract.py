"""What every strategy does: each trains for real on the same clients, and is held to the same accounting."""

import json
import math

import pytest
from test_end_to_end import collapipe, rounds, sets

from client_pipeline.partition.plan import read_plans
from flower_app.saved_model import load_model
from flower_app.strategy_choice import BASELINES

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 2
devices = 2
channels = 1
seed = 3
[device]
flop-per-cycle = 20.0
frequency-ghz = { min = 0.3, max = 0.8 }
memory-gb = 1.2
[block]
memory-gb = 0.375
"""
CASES = {
    "random": {"policy": "random+optimal"},
    "uniform": {"policy": "uniform", "tensorboard": "true", "device-emulation": "paced", "time-scale": 0.002},
    "vanilla-fl": {"strategy": "vanilla-fl"},
    "pipeline": {"strategy": "pipeline"},
    "titanic": {"strategy": "titanic"},
    "FedAvg": {"strategy": "FedAvg"},
    "module:Class": {"strategy": "flwr.serverapp.strategy:FedMedian", "costs": "model"},
}
UPLOADS_BY_PLAN = ("random", "uniform", "vanilla-fl", "titanic")


def test_the_cases_hold_every_baseline():
    assert BASELINES.keys() <= CASES.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_strategy_trains_and_accounts_for_every_round(name, tmp_path):
    (tmp_path / "two.toml").write_text(SCENARIO)
    more = {"scenario": tmp_path / "two.toml", "num-rounds": 2, "evaluate-every": 1, **CASES[name]}
    result = collapipe("run", *sets(**more), cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    run_dir = tmp_path / "runs" / "latest"
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
    plans = read_plans(run_dir / "plans" / "round-0002.json")
    assert [sum(plan.delta) for plan in plans] == [4, 4]
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
        assert all(d["peak_bytes"] >= d["idle_bytes"] > 0 for d in report["devices"].values())
    assert virtual["latency_s"] == pytest.approx(max(ends))
    spent = [sum(c["device_energy_j"]) + c["uplink_energy_j"] for c in virtual["clusters"] if c["selected"]]
    assert virtual["energy_j"] == pytest.approx(sum(spent))


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
        ({"policy": "best"}, "policy: expected one of dssda"),
        ({"costs": "guess"}, "costs: expected one of scenario, model, found 'guess'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message):
    from client_pipeline.system.scenario import load_scenario
    from flower_app.config import RunConfig
    from flower_app.strategy_choice import make_planner

    def choose():
        return make_planner(RunConfig.from_flat(changes), load_scenario("default"))

    if message is None:
        assert choose().policy.name == "pipeline"
    else:
        with pytest.raises(ValueError, match=message):
            choose()
