"""``collapipe plan`` and ``collapipe compare`` as users call them."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from client_pipeline.partition.plan import read_plans
from flower_app.cli.main import app
from helpers.instances import random_instance
from helpers.mistaken_values import changed
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.planner import plan_round


def call(*arguments, text=None):
    return CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def feasible():
    generator = np.random.default_rng(0)
    while True:
        raw = random_instance(generator, num_clusters=2, num_channels=2)
        if plan_round(parse_instance(raw, "case")).status == "optimal":
            return raw


def test_an_instance_is_answered_from_a_file_and_from_standard_input(feasible, tmp_path):
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(feasible))
    outcome = call("plan", "--instance", str(path), "--json")
    assert outcome.exit_code == 0
    answer = json.loads(outcome.stdout)
    assert answer["status"] == "optimal"
    assert 0 <= answer["gap"] <= 1e-6
    assert answer["lower_bound"] <= answer["objective"]
    keys = {"status", "selected", "channel", "power_w", "S", "m", "delta", "last", "pipeline_s", "uplink_s"}
    assert set(answer["clusters"][0]) == keys | {"uplink_energy_j", "cost"}
    assert sum(answer["clusters"][0]["delta"]) == feasible["L"]
    again = call("plan", "--instance", "-", "--json", text=json.dumps(feasible))
    assert json.loads(again.stdout) == answer


def test_the_answer_says_how_tebs_that_cost_differently_are_counted(feasible):
    raw = changed(feasible, ("work", "teb_shares"), [0.5] * feasible["L"])
    outcome = call("plan", "--instance", "-", "--json", text=json.dumps(raw))
    said = json.loads(outcome.stdout)["teb_costs"]
    assert said.startswith("TEBs cost from 50% of the costliest to all of it; the plan counts each")
    assert said in call("plan", "--instance", "-", text=json.dumps(raw)).stdout.replace("\n", " ")


@pytest.mark.parametrize("rounds", ["1", "2"])
def test_a_plan_files_orders_and_schedules_are_written_as_they_were_read(tmp_path, rounds):
    """--write-plan once wrote the answer's devices in the order of their speed, and the default schedule."""
    given, written = tmp_path / "given.json", tmp_path / "written.json"
    assert call("plan", "--scenario", "table2", "--write-plan", str(given)).exit_code == 0
    document = json.loads(given.read_text())
    for cluster in document["clusters"]:
        cluster["order"].reverse()
        cluster["schedule"] = "1f1b"
    given.write_text(json.dumps(document))
    outcome = call(
        *("plan", "--scenario", "table2", "--planner", "fixed", "--plan", str(given)),
        *("--rounds", rounds, "--write-plan", str(written)),
    )
    assert outcome.exit_code == 0
    for before, after in zip(read_plans(given), read_plans(written), strict=True):
        assert (after.order, after.schedule, after.delta, after.m) == (before.order, "1f1b", before.delta, before.m)


def test_an_infeasible_problem_exits_3_and_names_cluster_constraint_and_remedy(feasible):
    raw = changed(feasible, ("clusters", 1, "up", "Emax"), 1e-3)
    outcome = call("plan", "--instance", "-", "--json", text=json.dumps(raw))
    assert outcome.exit_code == 3
    [reason] = json.loads(outcome.stdout)["infeasible"]
    assert (reason["cluster"], reason["constraint"]) == (1, "C8")
    assert reason["needs"] > reason["has"] == 1e-3
    assert "the largest upload that fits" in reason["remedy"]
    assert "infeasible: cluster 1: the upload needs" in call("plan", "--instance", "-", text=json.dumps(raw)).stdout


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "standard input: format: expected 'collapipe-instance/1', found 'other'"),
        (("clusters", 0, "devices", 0, "freq"), 1, "clusters[0].devices[0]: unknown key 'freq'; expected "),
        (("clusters", 0, "up", "Pmax"), None, "clusters[0].up: missing key 'Pmax'"),
    ],
)
def test_a_bad_instance_is_refused_with_file_and_key(feasible, path, value, message):
    outcome = call("plan", "--instance", "-", text=json.dumps(changed(feasible, path, value)))
    assert outcome.exit_code == 2
    assert message in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --instance or --scenario"),
        (("--instance", "a", "--scenario", "b"), "expected either --instance or --scenario"),
        (("--instance", "nowhere.json"), "--instance: no file nowhere.json"),
        (("--scenario", "table2", "--problem", "all"), "--problem: expected one of round, segments, found 'all'"),
        (("--scenario", "table2", "--rounds", "0"), "--rounds and --seed: expected at least 1"),
        (("--instance", "-", "--rounds", "2"), "--rounds: an instance and --problem segments have one round"),
        (("--instance", "-", "--model", "m"), "--model replaces a scenario's costs"),
        (("--scenario", "table2", "--length", "0"), "--length: expected at least 1 token, found 0"),
        (("--scenario", "table2", "--c11"), "add --planner dssda-paper"),
        (("--scenario", "table2", "--drift", "odd"), "--drift: expected one of true, printed, mixed, found 'odd'"),
        (("--scenario", "table2", "--problem", "segments", "--planner", "random"), "solved by dssda"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    outcome = call("plan", *arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_a_plan_is_drawn_to_scale_with_what_binds():
    outcome = call("plan", "--scenario", "table2")
    assert outcome.exit_code == 0
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("cluster 0: S = ")
    bars = [line for line in lines if "█" in line]
    widths = {line.count("█") / int(line.split()[2]) for line in bars}
    assert widths == {3.0}, "36 columns for 12 TEBs"
    assert any("binds: the round waits for it" in line for line in lines)
    assert "optimal; objective" in lines[-1]


def test_rounds_are_planned_with_queues_that_evolve_and_the_last_is_written(tmp_path):
    path = tmp_path / "plan.json"
    outcome = call("plan", "--scenario", "table2-contended", "--rounds", "6", "--json", "--write-plan", str(path))
    document = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert [r["round"] for r in document["rounds"]] == [1, 2, 3, 4, 5, 6]
    queues = [r["queues"]["virtual"] for r in document["rounds"]]
    assert queues[0] == [0.0] * 8
    for before, after, done in zip(queues, queues[1:], document["rounds"], strict=False):
        gamma = done["gamma"]
        assert after == pytest.approx([max(y + g - 3.4, 0) for y, g in zip(before, gamma, strict=True)])
    assert sum(s["share"] for s in document["summary"]["segments"].values()) == pytest.approx(1)
    plans = read_plans(path)
    assert [list(p.delta) for p in plans if p.selected] == [
        c["delta"] for c in document["rounds"][-1]["clusters"] if c["selected"]
    ]
    other = json.loads(call("plan", "--scenario", "table2-contended", "--seed", "1", "--json").stdout)
    assert other["objective"] != document["rounds"][0]["objective"]


def test_a_plan_for_the_default_network_fits_the_default_run(tmp_path):
    from flower_app.config.sources import load_config
    from flower_app.launch.preflight import check_run

    path = tmp_path / "plan.json"
    assert call("plan", "--scenario", "default", "--write-plan", str(path)).exit_code == 0
    config = load_config(None, [f"plan={path}"])
    assert check_run(config) == 3
    assert {sum(plan.delta) for plan in read_plans(path)} == {config.model.encoder_layers}


@pytest.mark.slow
def test_compare_sets_policies_beside_each_other():
    arguments = ("compare", "--scenario", "table2-contended", "--rounds", "8", "--seeds", "2")
    outcome = call(*arguments, "--policies", "dssda,uniform,random,random+optimal", "--json")
    assert outcome.exit_code == 0
    figures = json.loads(outcome.stdout)["policies"]
    assert [f["name"] for f in figures] == ["dssda", "uniform", "random", "random+optimal"]
    wanted = {"latency_s", "latency_event_s", "gamma", "gamma_max", "energy_j", "selected_share", "gap"}
    for f in figures:
        assert wanted <= set(f)
        assert f["gamma_max"] == 3.4
        assert f["largest_gamma"] >= f["gamma"]
        assert len(f["selected_share"]) == 8
        assert sum(f["selected_share"]) == pytest.approx(4)
        assert f["latency_event_s"] < f["latency_s"]
        assert f["violated_share"] == f["infeasible_share"] == 0
    assert figures[0]["gap"] <= 1e-6 < min(f["gap"] for f in figures[1:])
    assert figures[3]["latency_s"] < figures[2]["latency_s"]
    table = call(*arguments, "--policies", "delay-only")
    assert "delay-only" in table.stdout and "latency s" in table.stdout
    # It never selects some clusters: their bound is over the threshold, the mean over all clusters is not.
    assert " !" in table.stdout


@pytest.mark.slow
def test_compare_draws_time_against_energy(tmp_path):
    picture = tmp_path / "front.svg"
    arguments = "compare --scenario two-clusters --policies dssda,delay-only --rounds 4 --seeds 1".split()
    outcome = call(*arguments, "--front", str(picture), "--json")
    assert outcome.exit_code == 0, outcome.stderr
    points = json.loads(outcome.stdout)["front"]
    priced = [p for p in points if p["price"] is not None]
    assert [p["name"] for p in points[len(priced) :]] == ["delay-only", "vanilla-fl", "titanic"]
    assert all(p["gap"] <= 1e-6 for p in priced) and len(priced) > 4
    assert priced[-1]["energy_j"] < priced[0]["energy_j"] and priced[-1]["latency_s"] > priced[0]["latency_s"]
    assert picture.read_text().startswith("<?xml")
    outcome = call(*arguments, "--front", str(tmp_path / "front.txt"))
    assert outcome.exit_code == 2 and "--front: expected a file that ends in .png" in outcome.stderr


@pytest.mark.slow
@pytest.mark.parametrize("front", [(), ("--front", "front.svg")], ids=["figures", "front"])
def test_compare_takes_the_scenario_of_a_run_and_says_what_its_columns_are(front, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = call("compare", "--policies", "uniform", "--rounds", "2", "--seeds", "1", *front)
    assert outcome.exit_code == 0, outcome.stderr
    assert "scenario: default\n" in outcome.stderr
    table, _, legend = outcome.stdout.partition("\n\n")
    columns = [name for name in re.split(r"\s{2,}", table.splitlines()[0].strip()) if name]
    assert len(columns) >= 5
    assert [re.split(r"\s{2,}", line)[0] for line in legend.strip().splitlines()] == columns
    latency = re.search(r"uniform +(?:- +)?([\d.]+)", table)[1]
    assert len(latency.replace(".", "")) == 4
