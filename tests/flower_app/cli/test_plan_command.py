"""``collapipe plan`` and ``collapipe compare`` as users call them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from client_pipeline.partition.plan import read_plans
from flower_app.cli.main import app
from helpers.instances import random_instance
from strategies.dssda.instance_file import instance_to_dict, parse_instance
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


def test_an_instance_survives_being_written_and_read(feasible):
    instance = parse_instance(feasible, "case")
    assert parse_instance(json.loads(json.dumps(instance_to_dict(instance))), "case") == instance


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


def test_the_segments_problem_has_no_channels(feasible):
    outcome = call("plan", "--instance", "-", "--problem", "segments", "--json", text=json.dumps(feasible))
    answer = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert answer["objective"] == pytest.approx(sum(c["cost"] for c in answer["clusters"]))
    assert all(c["channel"] is None and c["uplink_s"] is None for c in answer["clusters"])


def test_an_infeasible_problem_exits_3_and_names_cluster_constraint_and_remedy(feasible):
    raw = json.loads(json.dumps(feasible))
    raw["clusters"][1]["up"]["Emax"] = 1e-3
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
        (("L",), 0, "standard input: L: expected an integer of at least 1, found 0"),
        (("V",), float("nan"), "standard input: V: expected a finite number, found nan"),
        (("m_set",), [0], "standard input: m_set: expected a list of integers of at least 1, found [0]"),
        (("m_set",), None, "standard input: missing key 'm_set'"),
        (("latency",), "fast", "standard input: latency: expected one of eq15, flowshop, found 'fast'"),
        (("work", "o_f"), -1, "standard input: work: o_f: expected a number above 0, found -1"),
        (("clusters",), [], "standard input: clusters: expected a list of at least one cluster, found []"),
        (("clusters", 0, "devices"), [], "clusters[0].devices: expected a list of at least one device, found []"),
        (("clusters", 0, "devices", 0, "freq"), 1, "clusters[0].devices[0]: unknown key 'freq'; expected "),
        (("clusters", 0, "devices", 0, "f"), 0, "clusters[0].devices[0]: f: expected a number above 0, found 0"),
        (("clusters", 0, "up", "Pmax"), None, "clusters[0].up: missing key 'Pmax'"),
        (("clusters", 0, "h"), [1.0], "clusters[0]: h: has 1 values, B has 2; expected one for each channel"),
        (("clusters", 1, "B"), [], "clusters[1]: "),
    ],
)
def test_a_bad_instance_is_refused_with_file_and_key(feasible, path, value, message):
    raw = json.loads(json.dumps(feasible))
    target = raw
    for key in path[:-1]:
        target = target[key]
    if value is None:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    outcome = call("plan", "--instance", "-", text=json.dumps(raw))
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_text_that_is_no_json_is_refused():
    assert "standard input: expected JSON" in call("plan", "--instance", "-", text="{").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --instance or --scenario"),
        (("--instance", "a", "--scenario", "b"), "expected either --instance or --scenario"),
        (("--instance", "nowhere.json"), "--instance: no file nowhere.json"),
        (("--scenario", "nowhere"), "no packaged scenario 'nowhere'"),
        (("--scenario", "table2", "--problem", "all"), "--problem: expected one of round, segments, found 'all'"),
        (("--scenario", "table2", "--planner", "best"), "policy: expected one of dssda"),
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


def test_powers_by_convex_programs_are_asked_for_and_told():
    outcome = call("plan", "--scenario", "table2", "--rounds", "3", "--power-control", "sca")
    assert outcome.exit_code == 0 and outcome.stdout.count("powers by SCA: 1 convex program (converged)") == 3
    assert "powers by SCA in 3 of 3 rounds" in outcome.stdout
    by_programs, exact = (
        json.loads(call("plan", "--scenario", "table2", "--json", "--power-control", name).stdout)
        for name in ("sca", "exact")
    )
    assert by_programs["power_control"]["used"] == "sca" and "power_control" not in exact
    assert by_programs["objective"] == pytest.approx(exact["objective"], rel=1e-6) and by_programs["gap"] <= 1e-6
    outcome = call("plan", "--scenario", "table2", "--planner", "random", "--power-control", "sca")
    assert outcome.exit_code == 2 and "--power-control sca is for the rounds of dssda and uniform" in outcome.stderr


def test_a_plan_for_the_default_network_fits_the_default_run(tmp_path):
    from flower_app.config.sources import load_config
    from flower_app.launch.preflight import check_run

    path = tmp_path / "plan.json"
    assert call("plan", "--scenario", "default", "--write-plan", str(path)).exit_code == 0
    config = load_config(None, [f"plan={path}"])
    assert check_run(config) == 3
    assert {sum(plan.delta) for plan in read_plans(path)} == {config.model.encoder_layers}


@pytest.mark.slow
def test_costs_can_be_counted_from_a_real_model(tmp_path):
    config = {"model_type": "bert", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 5}
    config |= {"num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("plan", "--scenario", "physical", "--model", str(tmp_path), "--json")
    answer = json.loads(call(*arguments, "--length", "32").stdout)
    assert answer["status"] == "optimal"
    assert {sum(c["delta"]) for c in answer["clusters"]} == {5}
    shorter = json.loads(call(*arguments, "--length", "8").stdout)
    assert shorter["latency_s"] < answer["latency_s"]


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
    arguments = [
        "compare",
        "--scenario",
        "two-clusters",
        "--policies",
        "dssda,delay-only",
        "--rounds",
        "4",
        "--seeds",
        "1",
    ]
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


def test_compare_checks_its_options_before_it_plans():
    outcome = call("compare", "--scenario", "table2", "--policies", "dssda,best")
    assert outcome.exit_code == 2
    assert "policy: expected one of" in outcome.stderr
    outcome = call("compare", "--scenario", "table2", "--policies", "dssda", "--seeds", "0")
    assert (outcome.exit_code, "--seeds: expected at least 1" in outcome.stderr) == (2, True)
