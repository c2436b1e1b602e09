"""Records of a run that its report reads: not written over, and of whatever form."""

import json

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.runs.live_faults import faults_of_round
from flower_app.runs.run_directory import append_round, write_summary

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text('"num-rounds" = 1\n')
    append_round(run_dir, {"round": 1, "train_loss": 2.5, "metrics": {}})
    write_summary(run_dir, status="finished", rounds=1, wall_s=1.0, metrics={})
    return run_dir


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.parametrize("name", ["rounds.jsonl", "summary.json", "config.toml"])
def test_a_report_is_not_written_over_a_record_of_its_run(run_dir, name):
    before = (run_dir / name).read_bytes()
    result = report(run_dir, "--out", run_dir / name)
    assert result.exit_code == 2 and "--out" in result.stderr and "is the file that is read" in result.stderr
    assert (run_dir / name).read_bytes() == before


@pytest.mark.parametrize("name", ["timeline.json", "mistakes.json"])
@pytest.mark.parametrize("text", [DEEP, '{"clusters": 3}', "[1]", "null", "3", '{"examples": ' + "9" * 5000 + "}"])
def test_a_record_of_no_known_form_is_left_out(run_dir, name, text):
    (run_dir / name).write_text(text)
    result = report(run_dir)
    assert result.exit_code == 0, result.exception
    assert (run_dir / "report.html").is_file()


def test_notes_of_faults_beyond_reason_are_passed_over(run_dir):
    for number, text in enumerate((DEEP, json.dumps({"round": 1, "faults": [{"cluster": 1, "kind": "device"}]}))):
        (run_dir / "clusters" / str(number)).mkdir(parents=True)
        (run_dir / "clusters" / str(number) / "faults.json").write_text(text)
    try:
        faults = faults_of_round(run_dir, 1)
    except RecursionError:
        faults = None
    assert faults == [{"cluster": 1, "kind": "device"}]
