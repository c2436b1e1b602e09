"""``collapipe runs``."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import append_round, create_run_directory, write_config, write_summary
from flower_app.runs.run_lock import serving

pytestmark = pytest.mark.usefixtures("elsewhere")


def listed():
    return json.loads(CliRunner().invoke(app, ["runs", "--json"]).stdout)["runs"]


def test_runs_are_listed_with_status_metric_and_size():
    names = ("finished", "stopped", "going")
    folders = {name: create_run_directory("runs", name) for name in names}
    for number, (name, folder) in enumerate(folders.items()):
        write_config(folder, RunConfig.from_flat({"name": name, "num-rounds": 9}))
        append_round(folder, {"round": 3, "metrics": {"loss": 2.0, "bleu": 41.0}})
        append_round(folder, {"round": 4, "metrics": {}})
        if name == "finished":
            write_summary(folder, "finished", rounds=9, metrics={"loss": 1.0, "bleu": 50.0})
        (folder / "big").write_bytes(b"x" * 2_000_000)
        for path in folder.rglob("*"):
            os.utime(path, (1e9 + number, 1e9 + number))
    with serving(folders["going"]):
        runs = listed()
        shown = CliRunner().invoke(app, ["runs"]).stdout
    assert [run["status"] for run in runs] == ["running", "stopped", "finished"]
    assert [(run["value"], run["metric_round"]) for run in runs] == [(41.0, 3), (41.0, 3), (50.0, 9)]
    assert all(run["metric"] == "bleu" and run["size"] > 2_000_000 for run in runs)
    assert len(shown.splitlines()) == 4 and "bleu 41 (round 3)" in shown and "4/9" in shown and "2.0" in shown


def test_a_run_that_cannot_be_read_is_listed_with_the_reason_and_hides_no_other(monkeypatch):
    broken = {
        "of-another-release": ("config.toml", "new-key = 1\n"),
        "cut": ("summary.json", '{"status": "fin'),
        "bad-line": ("rounds.jsonl", "no json\n"),
        "no-status": ("summary.json", '{"error": ""}'),
    }
    for name in ("whole", *broken):
        folder = create_run_directory("runs", name)
        write_config(folder, RunConfig())
        if name in broken:
            file, text = broken[name]
            (folder / file).write_text(text)
    lstat = os.lstat

    def vanishing(path):
        if str(path).endswith("whole/gone"):
            raise FileNotFoundError(path)
        return lstat(path)

    # A run that goes on has renamed it since its name was read.
    (next(Path("runs").glob("*-whole")) / "gone").write_text("")
    monkeypatch.setattr(os, "lstat", vanishing)
    runs = {run["name"].partition("-")[2].partition("-")[2]: run for run in listed()}
    assert runs["whole"]["status"] == "stopped" and runs["whole"]["reason"] == ""
    assert {runs[name]["status"] for name in broken} == {"unreadable"}
    shown = CliRunner().invoke(app, ["runs"])
    assert shown.exit_code == 0
    for name, reason in (
        ("of-another-release", "unknown configuration key 'new-key'"),
        ("cut", "summary.json: expected JSON"),
        ("bad-line", "rounds.jsonl: expected JSON"),
        ("no-status", "KeyError: 'status'"),
    ):
        assert reason in runs[name]["reason"] and f"-{name}: unreadable: {runs[name]['reason']}" in shown.stderr


def test_the_version_is_told_in_one_line():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout.startswith("collapipe ") and "flwr 1.4" in result.stdout
