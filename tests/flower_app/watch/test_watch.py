"""The page of a run: who may see it, what it is told, and that it follows a run that goes on."""

import base64
import hashlib
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from typer.testing import CliRunner

from client_pipeline.system.scenario import load_scenario
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import ROUNDS, append_round, write_config
from flower_app.watch import server
from flower_app.watch.run_metrics import metrics_text
from flower_app.watch.run_state import WatchedRun
from flower_app.watch.server import open_port, watch_app
from helpers.control_unit_folder import control_unit_text
from helpers.planned_run import planned_run, unfinished_run
from helpers.repository import ROOT

TOKEN = "a token of more than sixteen characters"
HOST = "http://127.0.0.1:8090"
UPLOT = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of files of uplot-1.6.32.tgz of the npm registry."""


@pytest.fixture
def run_dir(tmp_path):
    folder = unfinished_run(tmp_path / "run", 9)
    (folder / "logs").mkdir()
    (folder / "logs" / "simulation.log").write_text("first line\nsecond line\n")
    return folder


@pytest.fixture
def page(run_dir):
    return TestClient(watch_app(run_dir, TOKEN), base_url=HOST, follow_redirects=False)


def state_of(page, after=0, log=0):
    answer = page.get(f"/state?after={after}&log={log}", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    return answer.json()


@pytest.mark.parametrize("path", ["/", "/watch.js", "/state", "/metrics"])
@pytest.mark.parametrize("token", ["", "another token of sixteen or more", TOKEN[:-1]])
def test_nothing_is_shown_without_the_token(page, path, token):
    refused = [
        page.get(path, params={"token": token} if token else {}),
        page.get(path, headers={"authorization": f"Bearer {token}"}),
        page.get(path, cookies={"collapipe-watch-8090": token}),
    ]
    assert [answer.status_code for answer in refused] == [403] * 3
    assert all("first line" not in answer.text for answer in refused)


def test_the_page_is_heard_on_the_loopback_alone():
    with open_port(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_token_of_its_own_has_192_bits(run_dir, monkeypatch):
    tokens = []
    monkeypatch.setattr(server, "serve_watch", lambda run, port, token, say: tokens.append(token))
    for _ in range(2):
        assert CliRunner().invoke(app, ["watch", str(run_dir)]).exit_code == 0
    assert len({*tokens}) == 2
    assert all(len(base64.urlsafe_b64decode(token)) == 24 for token in tokens)


def test_a_name_of_elsewhere_that_leads_here_is_refused(page):
    answer = page.get("/state", headers={"host": "evil.example:8090", "authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 403


def test_the_token_leaves_the_address_and_becomes_a_cookie_of_this_page_alone(page):
    answer = page.get("/", params={"token": TOKEN})
    place = answer.headers["location"]
    assert answer.status_code == 303 and TOKEN not in place
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    shown = page.get(place)
    assert shown.status_code == 200 and "<title>collapipe watch</title>" in shown.text
    assert page.get(f"{place}state").json()["num_rounds"] == 9


@pytest.mark.parametrize("address", ["http://127.0.0.1:9999/", "http://127.0.0.1:9999/state", "http://127.0.0.1/a/"])
def test_a_browser_sends_the_token_to_no_other_port(page, address):
    """A cookie is of a host and a path, whatever the port: any program of this machine could ask for it."""
    place = page.get("/", params={"token": TOKEN}).headers["location"]
    elsewhere, here = page.build_request("GET", address), page.build_request("GET", place)
    assert TOKEN not in elsewhere.headers.get("cookie", "") and TOKEN in here.headers["cookie"]


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text_as_code(page):
    place = page.get("/", params={"token": TOKEN}).headers["location"].rstrip("/")
    names = ("/", "/watch.js", "/watch.css", "/uPlot.iife.min.js", "/uPlot.min.css")
    answers = {name: page.get(f"{place}{name}") for name in names}
    for answer in answers.values():
        # What the library's first line says of itself is loaded by nobody.
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", re.sub(r"^/\*!.*\*/", "", answer.text)))
        assert answer.status_code == 200 and addresses <= {"http://www.w3.org/2000/svg"}
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answers["/watch.js"].text)
    # The page's own rules forbid styles and code in its text.
    assert not re.search(r"<script>|style=|onclick|<style", answers["/"].text)
    assert page.get(f"{place}/other.js").status_code == 404


def test_the_library_inside_is_the_published_one_with_its_licence():
    folder = ROOT / "flower_app" / "watch" / "page" / "uplot"
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert digests == UPLOT
    assert "(v1.6.32)" in (folder / "uPlot.iife.min.js").read_text().splitlines()[0]
    assert "MIT License" in (folder / "LICENSE").read_text()


def test_rounds_come_once_and_the_newest_whole(page, run_dir):
    first = state_of(page)
    assert first["status"] == "running" and first["num_rounds"] == 9
    assert [line["round"] for line in first["rounds"]] == [1, 2, 3, 4] and first["last_round"] == 4
    assert {c["cluster"] for c in first["newest"]["clusters"]} == {
        i for i, s in enumerate(first["rounds"][-1]["states"]) if s == "t"
    }
    nothing_new = state_of(page, after=4)
    assert nothing_new["rounds"] == [] and not nothing_new.keys() & {"newest", "timeline"}
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    append_round(run_dir, line | {"round": 5, "train_loss": 0.25})
    later = state_of(page, after=4)
    assert [(line["round"], line["loss"]) for line in later["rounds"]] == [(5, 0.25)]


def test_the_log_comes_from_where_one_has_read_to(page, run_dir):
    log = state_of(page)["log"]
    assert log["text"] == "first line\nsecond line\n"
    with (run_dir / "logs" / "simulation.log").open("a") as file:
        file.write("third line\n")
    assert state_of(page, log=log["offset"])["log"] == {"offset": log["offset"] + 11, "text": "third line\n"}


def test_a_fault_of_the_round_under_way_is_there_before_the_round_has_ended(page, run_dir):
    fault = {"kind": "device", "cluster": 0, "device": 2, "round": 5, "step": 1, "recovered": False, "seconds": None}
    folder = run_dir / "clusters" / "cluster-0"
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps({"round": 5, "faults": [fault | {"bytes": 0, "reason": "killed"}]}))
    [shown] = state_of(page)["faults_now"]
    assert (shown["kind"], shown["device"], shown["reason"]) == ("device", 2, "killed")
    # That of a round that is done stands in its line.
    (folder / "faults.json").write_text(json.dumps({"round": 4, "faults": [fault]}))
    assert state_of(page)["faults_now"] == []


def test_rounds_that_a_resumed_run_takes_back_are_taken_back(run_dir):
    run = WatchedRun(run_dir)
    run.refresh()
    lines = (run_dir / ROUNDS).read_text().splitlines(keepends=True)
    (run_dir / ROUNDS).write_text("".join(lines[:2]))
    run.refresh()
    assert [line["round"] for line in run.lines] == [1, 2]


def test_plans_and_predictions_reach_the_page(run_dir):
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    predicted = {"cluster": 0, "predicted_train_s": 3.0, "measured_train_s": 3.1}
    change = {
        "cluster": 0,
        "taken": True,
        "reason": "a TEB on device 1 takes 2 times as long",
        "gain_s": 1,
        "move_s": 0,
    }
    append_round(
        run_dir, line | {"round": 5, "plan": {"predictions": [predicted], "changes": [change], "left_out": []}}
    )
    run = WatchedRun(run_dir)
    state = run.state(4, 0)
    assert (state["rounds"][0]["predicted_s"], state["rounds"][0]["measured_s"]) == (3.0, 3.1)
    assert state["rounds"][0]["changes"][0]["reason"] == change["reason"]
    assert 'collapipe_measured_seconds{cluster="0",run="run"} 3.1' in metrics_text(run)
    assert 'collapipe_replans_total{run="run"} 1.0' in metrics_text(run)


def test_prometheus_reads_what_a_get_of_metrics_answers(page, run_dir):
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    # What a fault is called comes from elsewhere; no name may end a line or a label.
    fault = {"kind": 'a "kind" \\ of\ntwo lines', "cluster": 0, "device": None, "round": 5, "reason": ""}
    append_round(run_dir, line | {"round": 5, "faults": [fault], "train_loss": 1e-17})
    answer = page.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) == len({family.name for family in families}) and all(f.documentation for f in families)
    # The parser leaves the ending of a counter out of its family's name.
    by_name = {family.name: family for family in families}
    assert by_name["collapipe_faults"].type == "counter"
    [counted] = by_name["collapipe_faults"].samples
    assert (counted.labels, counted.value) == ({"run": run_dir.name, "kind": fault["kind"]}, 1.0)
    assert [s.value for s in by_name["collapipe_round"].samples] == [5.0]
    scalars = {s.labels["tag"]: s.value for s in by_name["collapipe_scalar"].samples}
    assert scalars["train/loss"] == 1e-17 and len(scalars) > 20


def test_a_thousand_rounds_of_a_hundred_clusters_stay_small(tmp_path):
    folder = planned_run(tmp_path / "run", load_scenario("city"), 1)
    write_config(folder, RunConfig(scenario="city"))
    line = json.loads((folder / ROUNDS).read_text())
    with (folder / ROUNDS).open("a") as file:
        file.writelines(json.dumps(line | {"round": n}) + "\n" for n in range(2, 101))
    run = WatchedRun(folder)
    assert len(json.dumps(run.state(0, 0)["rounds"])) < 100 * 700
    assert len(json.dumps(run.state(99, 0))) < 150_000
    assert len(json.dumps(run.state(100, 0))) < 1_000


@pytest.mark.parametrize("mistake", ["port", "token"])
def test_a_watched_run_whose_page_cannot_be_served_leaves_no_directory(tmp_path, monkeypatch, mistake):
    monkeypatch.setenv("COLLAPIPE_WATCH_TOKEN", "short" if mistake == "token" else "")
    message = {"port": "--watch-port: .*give another", "token": "COLLAPIPE_WATCH_TOKEN: .* found 5"}[mistake]
    with open_port(0) as listener:
        port = listener.getsockname()[1] if mistake == "port" else 0
        runs = f"runs-dir={tmp_path / 'runs'}"
        done = CliRunner().invoke(app, ["run", "--watch", "--watch-port", str(port), "--set", runs])
    assert done.exit_code == 2 and re.search(message, done.stderr)
    assert not (tmp_path / "runs").exists()


def test_every_metric_of_the_dashboard_is_one_that_a_run_or_a_control_unit_has(run_dir):
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    predicted = {"cluster": 0, "predicted_train_s": 3.0, "measured_train_s": 3.1}
    fault = {"kind": "device", "cluster": 0, "device": 1, "round": 5, "step": 1, "recovered": True, "seconds": 1.0}
    append_round(run_dir, line | {"round": 5, "plan": {"predictions": [predicted]}, "faults": [fault]})
    text = metrics_text(WatchedRun(run_dir)) + control_unit_text(run_dir.parent)
    shown = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    asked = {name for p in board["panels"] for t in p["targets"] for name in re.findall(r"collapipe_\w+", t["expr"])}
    assert asked and asked <= shown
