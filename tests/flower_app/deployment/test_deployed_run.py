"""``collapipe run --superlink`` follows a run to its end, through a SuperLink that is away, and not for ever."""

import json
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from flower_app.deployment import deployed_run
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.deployed_run import Deployment
from flower_app.launch import superlink
from flower_app.launch.launcher import LaunchOrder
from flower_app.runs.run_directory import read_summary, write_summary

ANSWERS = {
    "run": {"success": True, "run-id": "7"},
    "ls": {"success": False, "error-message": "connection refused"},
    "stop": {"success": True},
    "log": {},
}


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Follow a run, with a program in the place of Flower's that gives prepared answers."""
    program = tmp_path / "flwr"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "answers = json.loads((here / 'answers.json').read_text())[sys.argv[1]]\n"
        "answers = answers if isinstance(answers, list) else [answers]\n"
        "calls = here / f'calls-{sys.argv[1]}'\n"
        "made = len(calls.read_text()) if calls.exists() else 0\n"
        "calls.write_text('.' * (made + 1))\n"
        "answer = answers[min(made, len(answers) - 1)]\n"
        "time.sleep(answer.get('sleep', 0))\n"
        "print(json.dumps(answer))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(superlink, "program_path", lambda name: program)
    for name, seconds in {
        "_RECONNECT_S": 0.01,
        "_WITHOUT_CONTACT_S": 0.5,
        "_COMMAND_S": 20.0,
        "_LAST_WORDS_S": 0.1,
        "_STOPPED_S": 0.5,
    }.items():
        monkeypatch.setattr(deployed_run, name, seconds)
    run_dir = tmp_path / "run-1"
    (run_dir / "flower").mkdir(parents=True)

    def run(watch=lambda: None, **answers):
        (tmp_path / "answers.json").write_text(json.dumps(ANSWERS | answers))
        deployment = Deployment(address="127.0.0.1:1", control="127.0.0.1:2", certs=ServerFiles(tmp_path))
        order = LaunchOrder(
            run_dir=run_dir,
            app=tmp_path,
            run_config=tmp_path / "run.toml",
            num_clusters=1,
            watch=watch,
            poll_s=0.01,
        )
        return deployment.launch(order), run_dir

    return SimpleNamespace(run=run, run_dir=run_dir, monkeypatch=monkeypatch)


@pytest.mark.slow
def test_a_superlink_that_stays_away_is_told_and_given_up(follow, capsys):
    outcome, run_dir = follow.run()
    assert outcome.status == "failed" and "has not answered for" in outcome.error
    assert "connection refused" in outcome.error and "the run may go on" in outcome.error
    assert "--resume run-1" in outcome.error
    said = capsys.readouterr().err
    assert said.count("warning: no contact with the SuperLink, trying again: connection refused") == 1
    assert read_summary(run_dir)["error"] == outcome.error


@pytest.mark.slow
def test_a_superlink_that_comes_back_is_followed_again(follow, capsys):
    refused, there = ANSWERS["ls"], {"success": True, "runs": [{"status": "running"}]}
    done = {"success": True, "runs": [{"status": "finished:failed", "status-details": "why"}]}
    outcome, _ = follow.run(ls=[refused, there, done])
    assert "the run ended (finished:failed why) without a result" in outcome.error
    assert "the SuperLink answers again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_that_hangs_is_no_contact(follow, capsys):
    follow.monkeypatch.setattr(deployed_run, "_COMMAND_S", 1.0)
    outcome, _ = follow.run(ls={"sleep": 60})
    assert "flwr ls: no answer within 1 s" in outcome.error


@pytest.mark.slow
def test_ctrl_c_leaves_its_summary_whatever_flower_does(follow, capsys):
    follow.monkeypatch.setattr(deployed_run, "_COMMAND_S", 1.0)
    follow.monkeypatch.setattr(deployed_run, "_STOP_S", 0.1)
    waited = subprocess.Popen.wait

    def deaf(child, timeout=None):
        # The log's program does not hear that it is to end.
        if timeout == 0.1:
            raise subprocess.TimeoutExpired("flwr log", timeout)
        return waited(child, timeout)

    follow.monkeypatch.setattr(subprocess.Popen, "wait", deaf)
    with pytest.raises(KeyboardInterrupt):
        follow.run(watch=lambda: signal.raise_signal(signal.SIGTERM), stop={"sleep": 60}, log={"sleep": 60})
    assert read_summary(follow.run_dir)["status"] == "interrupted"
    assert "which may go on: flwr stop: no answer within 1 s" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("last", "left"), [("finished", "finished"), ("failed", "interrupted"), (None, "interrupted")])
def test_ctrl_c_waits_for_what_the_server_app_writes_last(follow, last, left):
    follow.monkeypatch.setattr(deployed_run, "_STOPPED_S", 20.0 if last else 0.1)
    told = follow.run_dir.parent / "calls-stop"

    def writes_once_it_hears():
        deadline = time.monotonic() + 20.0
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        write_summary(follow.run_dir, last)

    server_app = threading.Thread(target=writes_once_it_hears if last else time.time)
    server_app.start()
    with pytest.raises(KeyboardInterrupt):
        follow.run(watch=lambda: signal.raise_signal(signal.SIGTERM), log={"sleep": 60})
    server_app.join()
    assert read_summary(follow.run_dir)["status"] == left


def test_a_table_of_set_is_taken_for_real_machines_too_and_its_keys_win(tmp_path):
    """``--set 'faults=device=0.1'`` was refused with ``--superlink``: an unknown key."""
    deployment = Deployment(address="10.0.0.1:9092", control="127.0.0.1:9093", certs=ServerFiles(tmp_path))
    settings = deployment.settings(None, ["faults=device=0.1, stream=0.02", "decoder=join-timeout=5.0"])
    assert [pair.partition("=")[0] for pair in settings] == [
        "decoder.bind",
        "decoder.tls-certificate",
        "decoder.tls-key",
        "decoder.tls-ca",
        "costs",
    ]


@pytest.mark.parametrize(
    ("sets", "costs"),
    [
        ([], ["costs=measured"]),
        (["costs=model"], []),
        (["plan=plan.json"], []),
        (["strategy=vanilla-fl"], []),
        (["strategy=collapipe"], ["costs=measured"]),
    ],
)
def test_real_machines_are_planned_by_what_they_take_unless_one_says_otherwise(tmp_path, sets, costs):
    deployment = Deployment(address="10.0.0.1:9092", control="127.0.0.1:9093", certs=ServerFiles(tmp_path))
    assert [pair for pair in deployment.settings(None, sets) if pair.startswith("costs=")] == costs
