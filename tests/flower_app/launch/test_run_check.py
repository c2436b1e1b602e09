"""The checks of a new run are another process's, and what they find is raised as if they were made here."""

import json
import subprocess
import sys
import threading

import pytest

from flower_app.config.sources import load_config
from flower_app.launch import run_check
from flower_app.launch.run_check import RunCheck
from helpers.tiny_app import left_over
from strategies.planning.planner import InfeasibleRound

PROGRAM = """
import os, signal, sys
from multiprocessing import Process
from pathlib import Path
import tomli_w
from flower_app.config.run_config import nested
from flower_app.config.sources import load_config
from flower_app.launch import run_check
from flower_app.launch.run_check import RunCheck, check_and_tell

FILES = ["data.source=files", "data.train-source=no.en", "data.train-target=no.de", "data.test-source=no.en"]

def said(check):
    try:
        check.wait()
        check.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"

def handed_over(config):
    check, file = RunCheck(config), Path("run.toml")
    file.write_text(tomli_w.dumps(nested(config.to_flat())))
    with check.hand_over() as end:
        other = Process(target=check_and_tell, args=(file, end))
        other.start()
    answer = said(check)
    other.join()
    return answer

print(said(RunCheck(load_config(None, []))))
print(said(RunCheck(load_config(None, FILES))))
print(said(RunCheck(load_config(None, ["costs=scenario", "model.encoder-layers=1000"]))))
print(handed_over(load_config(None, FILES)))
left_alone = RunCheck(load_config(None, FILES))
left_alone.hand_over().close()
print(said(left_alone))
begun = RunCheck(load_config(None, FILES))
begun.begin()
begun.begin()
print(said(begun))
run_check._check = lambda config: os.kill(os.getpid(), signal.SIGKILL)
print(said(RunCheck(load_config(None, []))))
unwanted = RunCheck(load_config(None, []))
end = unwanted.hand_over()
unwanted.give_up()
check_and_tell(Path("no.toml"), end)
print(said(unwanted), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_check_in_another_process_says_what_one_here_would_and_leaves_no_library_behind(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fine, file, infeasible, handed_over, left_alone, begun, killed, unwanted = done.stdout.splitlines()
    assert fine == "fine"
    assert file.startswith("ValueError: data.train-source: no file ") and "no.en" in file
    assert infeasible.startswith("InfeasibleRound: round 1: no cluster can train: cluster 0")
    # By whoever was given the pipe, or, as nobody is left to, by a fork.
    assert handed_over == left_alone == begun == file
    assert killed.startswith("ChildProcessError") and "ended without an answer, with exit code -9" in killed
    assert unwanted == "fine False"


@pytest.mark.slow
def test_a_run_that_cannot_be_leaves_neither_a_directory_nor_a_program(tmp_path):
    files = ("data.source=files", "data.train-source=no.en", "data.train-target=no.de", "data.test-source=no.en")
    command = [sys.executable, "-m", "flower_app.cli", "run"]
    for pair in (f"runs-dir={tmp_path / 'runs'}", "optimizer.warmup-steps=0", *files):
        command += ["--set", pair]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: data.train-source: no file")
    assert not list((tmp_path / "runs").iterdir())
    assert not left_over(tmp_path)


def test_where_torch_is_there_the_check_is_made_here_and_at_once_and_where_there_are_threads_when_it_is_waited_for(
    monkeypatch,
):
    seen = []
    monkeypatch.setattr(run_check, "_check", seen.append)
    first, second = load_config(None, []), load_config(None, ["seed=7"])
    check = RunCheck(first)
    assert check.is_over and seen == [first]
    monkeypatch.delitem(sys.modules, "torch")
    other = threading.Event()
    thread = threading.Thread(target=other.wait)
    thread.start()
    try:
        later = RunCheck(second)
        assert not later.is_over and seen == [first]
        later.wait()
    finally:
        other.set()
        thread.join()
    check.wait()
    assert seen == [first, second]


def test_an_infeasible_round_is_made_again_of_what_it_says_and_an_error_that_is_no_mistake_in_words():
    def there_and_back(error):
        return run_check._raised_there(**json.loads(json.dumps(run_check._description(error))))

    error = InfeasibleRound(2, {1: "no device has room"})
    copy = there_and_back(error)
    assert isinstance(copy, InfeasibleRound) and str(copy) == str(error) and copy.left_out == {1: "no device has room"}
    no_text = there_and_back(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert type(no_text) is ValueError and "invalid start byte" in str(no_text)
    other = there_and_back(MemoryError("4 TB"))
    assert type(other) is RuntimeError and str(other) == "MemoryError: 4 TB"
