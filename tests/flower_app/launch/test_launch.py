"""The launcher, with a real SuperLink and a tiny real Flower app."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tomli_w

from flower_app.launch import simulation, stopped_process, superlink
from flower_app.launch.launcher import Outcome, last_error
from flower_app.launch.processes import MARK, RunProcesses, is_alive
from flower_app.launch.ray_folders import end_abandoned_runs
from flower_app.launch.simulation import _death
from flower_app.runs.run_directory import read_rounds, read_summary
from helpers.tiny_app import launch_tiny_app, left_over, write_tiny_app


@pytest.fixture
def tiny_app(tmp_path):
    return write_tiny_app(tmp_path / "tiny-app")


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    yield folder
    assert left_over(folder) == {}


@pytest.mark.slow
def test_a_run_finishes_with_all_nodes_at_once_and_leaves_nothing_but_its_results(tiny_app, run_dir, monkeypatch):
    # The SuperLink must not look for its packages where the user happens to be.
    (run_dir / "elsewhere" / "tiny").mkdir(parents=True)
    (run_dir / "elsewhere" / "tiny" / "__init__.py").write_text("raise ImportError('a tiny from elsewhere')")
    monkeypatch.chdir(run_dir / "elsewhere")
    programs, ray_folders = [], []

    def look():
        family = left_over(run_dir)
        programs.append(family)
        ray_folders.extend(Path(psutil.Process(pid).environ()["RAY_TMPDIR"]) for pid in family)

    outcome = launch_tiny_app(tiny_app, run_dir, "well", finished=look)
    assert outcome == Outcome("finished", "", {"status": "finished", "rounds": 1}), outcome
    assert outcome.exit_code == 0
    # What is left to do once it has finished is done while its programs end.
    assert len(programs) == 1 and any("flower-superlink" in command for command in programs[0].values())
    assert len(set(ray_folders)) == 1 and not ray_folders[0].exists()
    [first] = read_rounds(run_dir)[0]
    assert first["replies"] == 2
    assert first["cwd"] == str(run_dir / "flower" / "work")
    assert not (run_dir / "flower").exists()
    # Flower passes a log on every now and then: it used to be cut off where the summary was there.
    log = (run_dir / "logs" / "simulation.log").read_text()
    assert [f"line {n}" in log for n in range(200)] == [True] * 200


@pytest.mark.slow
def test_a_server_app_that_raises_is_a_failed_run_with_its_exception(tiny_app, run_dir):
    outcome = launch_tiny_app(tiny_app, run_dir, "raise", finished=lambda: pytest.fail("it has not"))
    assert outcome.exit_code == 1
    log = run_dir / "logs" / "simulation.log"
    assert outcome.error == f"the simulation ended without a result: RuntimeError: the oven is cold; see {log}"
    assert read_summary(run_dir) == {"status": "failed", "error": outcome.error}


@pytest.mark.slow
def test_a_simulation_whose_ray_is_late_is_started_again(tiny_app, run_dir):
    said = []
    outcome = launch_tiny_app(tiny_app, run_dir, "late", say=said.append)
    assert outcome.exit_code == 0
    assert [line.split(":")[0] for line in said] == ["this machine is busy"]


@pytest.mark.slow
def test_what_the_server_app_refuses_is_bad_input(tiny_app, run_dir):
    outcome = launch_tiny_app(tiny_app, run_dir, "refuse")
    assert (outcome.exit_code, outcome.error) == (2, "flour: expected some, found none")


@pytest.mark.slow
def test_a_killed_simulation_is_noticed(tiny_app, run_dir):
    # Flower itself goes on calling it running.
    def kill():
        if read_rounds(run_dir)[0]:
            for pid, command in left_over(run_dir).items():
                if "flwr-simulation" in command:
                    os.kill(pid, signal.SIGKILL)

    outcome = launch_tiny_app(tiny_app, run_dir, "hang", kill)
    assert outcome.exit_code == 1
    assert outcome.error.startswith("the simulation ended without a result; see ")


def death(server=None, submission=None, simulation=None, waited_s=0.0, status="starting"):
    programs = [SimpleNamespace(poll=lambda code=code: code, returncode=code) for code in (server, submission)]
    superlink = SimpleNamespace(
        server=programs[0],
        submission=programs[1],
        superlink_log="superlink.log",
        processes=SimpleNamespace(find=lambda program: None),
        run_status=lambda: status,
    )
    return _death(superlink, simulation, waited_s)


@pytest.mark.slow
def test_a_run_is_given_up_when_nobody_is_left_to_end_it():
    with subprocess.Popen(["true"]) as ended:
        pass
    assert death(simulation=ended.pid) == "the simulation ended without a result"
    assert death(simulation=ended.pid, status="pending") == ""
    assert death(simulation=ended.pid, status="pending", waited_s=1e6) == "the simulation ended without a result"
    assert death(submission=0) == "the simulation ended without a result"
    assert death(submission=2) == "flwr run did not accept the app"
    assert death(server=1, simulation=os.getpid()) == "the SuperLink ended with exit code 1; see superlink.log"
    assert death() == "" and death(waited_s=1e6) == "no simulation started within 300 s; see superlink.log"


@pytest.mark.slow
def test_a_simulation_that_stands_still_is_told_of_and_given_up(tiny_app, run_dir, monkeypatch):
    """Its SuperLink answers, and Flower calls it running."""
    monkeypatch.setattr(stopped_process, "SAY_S", 0.5)
    monkeypatch.setattr(stopped_process, "GIVE_UP_S", 5.0)
    monkeypatch.setattr(simulation, "GIVE_UP_S", 5.0)
    messages, stops, going_on_at = [], [], [0.0]

    def signal_all(number):
        for pid, command in left_over(run_dir).items():
            if "flwr-simulation" in command:
                os.kill(pid, number)

    def stop():
        # Not at once again: the launcher must see it run in between.
        if read_rounds(run_dir)[0] and len(stops) == len(messages) < 2 and time.monotonic() > going_on_at[0]:
            stops.append(signal.SIGSTOP)
            signal_all(signal.SIGSTOP)

    def say(text):
        messages.append(text)
        if len(messages) == 1:
            signal_all(signal.SIGCONT)
            going_on_at[0] = time.monotonic() + 2.0

    outcome = launch_tiny_app(tiny_app, run_dir, "hang", stop, say)
    assert len(messages) == 2 and re.fullmatch(
        r"The simulation \(process (\d+)\) is stopped\. `kill -CONT \1` lets it go on; after 5 s .*", messages[0]
    )
    assert outcome.exit_code == 1
    assert re.match(r"the simulation \(process \d+\) has been stopped for [5-9]", outcome.error), outcome.error
    assert read_summary(run_dir)["status"] == "failed"


@pytest.mark.slow
def test_a_task_that_flower_hands_out_again_is_followed_to_its_end(tiny_app, run_dir):
    """Its first process stands still as it starts, beyond Flower's claim of 30 s."""
    stopped, gone_on = [], []

    def look():
        simulations = [pid for pid, command in left_over(run_dir).items() if "flwr-simulation" in command]
        if simulations and not stopped:
            os.kill(simulations[0], signal.SIGSTOP)
            stopped.append(simulations[0])
        elif stopped and not gone_on and set(simulations) - set(stopped):
            os.kill(stopped[0], signal.SIGCONT)
            gone_on.append(stopped[0])

    outcome = launch_tiny_app(tiny_app, run_dir, "well", look)
    assert stopped == gone_on and outcome == Outcome("finished", "", {"status": "finished", "rounds": 1}), outcome


@pytest.mark.slow
def test_an_interrupted_run_ends_everything_and_says_so(tiny_app, run_dir):
    def interrupt():
        if read_rounds(run_dir)[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        launch_tiny_app(tiny_app, run_dir, "hang", interrupt)
    assert read_summary(run_dir) == {"status": "interrupted", "error": "interrupted"}
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
def test_the_next_start_ends_what_a_killed_launcher_left(tiny_app, run_dir):
    config = run_dir / "config.toml"
    config.write_text(tomli_w.dumps({"behave": "hang", "run-dir": str(run_dir)}))
    code = (
        "import sys; from pathlib import Path; from flower_app.launch.launcher import LaunchOrder; "
        "from flower_app.launch.simulation import SimulationLauncher; "
        "run_dir, app, config = map(Path, sys.argv[1:]); "
        "order = LaunchOrder(run_dir=run_dir, app=app, run_config=config, num_clusters=2); "
        "SimulationLauncher().launch(order)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, run_dir, tiny_app, config])
    try:
        while not read_rounds(run_dir)[0]:
            assert launcher.poll() is None
            time.sleep(0.1)
        simulation = next(pid for pid, command in left_over(run_dir).items() if "flwr-simulation" in command)
        ray_folder = Path(psutil.Process(simulation).environ()["RAY_TMPDIR"])
        assert ray_folder.is_dir()
    finally:
        launcher.kill()
        launcher.wait()
    assert simulation in left_over(run_dir)
    end_abandoned_runs(ray_folder.parent)
    assert left_over(run_dir) == {} and not ray_folder.exists()


def test_the_environment_of_a_launch_is_its_own():
    inherited = {"PATH": "/bin", "RAY_ADDRESS": "auto", "NO_PROXY": "a.example", "FLWR_HOME": "/x", "HOME": "/h"}
    first, second = (
        superlink.launch_environment(Path("/home"), Path(folder), inherited) for folder in ("/ray", "/ray2")
    )
    assert "RAY_ADDRESS" not in first and first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert first["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert first["NO_PROXY"] == "a.example,127.0.0.1,localhost"
    assert (first["FLWR_HOME"], first["RAY_TMPDIR"], first["HOME"]) == ("/home", "/ray", "/h")
    assert first["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert first[MARK] != second[MARK]
    assert first["RAY_worker_niceness"] == "0"
    inherited["RAY_worker_niceness"] = "5"
    assert superlink.launch_environment(Path("/home"), Path("/ray"), inherited)["RAY_worker_niceness"] == "5"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("ValueError: first\nmore\nray.exceptions.RayError: last\nbye\n", "ray.exceptions.RayError: last"),
        ("\x1b[91mERROR \x1b[0m: x\n  RuntimeError: boom\x1b[0m\n", "RuntimeError: boom"),
        ("KeyError\n", "KeyError"),
        # Flower ends a simulation with an error of its own; what matters is what it was raised from.
        ("OSError: no space\nRuntimeError: An error was encountered. Ending simulation.\n", "OSError: no space"),
        (
            "OSError: no space\n\nThe above exception was the direct cause of the following exception:\n\n"
            "RuntimeError: Simulation Runtime crashed.\nRuntimeError: An error was encountered. Ending simulation.\n",
            "OSError: no space",
        ),
        ("Exception: The current node timed out\nbye\n", "Exception: The current node timed out"),
        (
            "RuntimeError: An error was encountered. Ending simulation.\n",
            "RuntimeError: An error was encountered. Ending simulation.",
        ),
        ("Usage: flwr run\nError: no such app\n", "Error: no such app"),
    ],
)
def test_the_last_exception_of_a_log_is_found(tmp_path, log, error):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == error
    assert last_error(tmp_path / "none") == ""


STUBBORN = textwrap.dedent(
    """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
    open(sys.argv[1] + str(os.getpid()), "w").close()
    time.sleep(600)
    """
)


@pytest.mark.slow
def test_processes_that_left_their_family_and_ignore_requests_are_ended(tmp_path):
    mark = os.urandom(8).hex()
    child = subprocess.Popen([sys.executable, "-c", STUBBORN, f"{tmp_path}/"], env={**os.environ, MARK: mark})
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: mark[1:]})
    try:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        processes = RunProcesses(mark)
        assert {str(pid) for pid in processes.alive()} == {path.name for path in tmp_path.iterdir()}
        assert processes.find("time.sleep(600)") in processes.alive()
        assert processes.end(polite_s=0.2) == []
        assert not is_alive(child.pid)
        assert is_alive(other.pid)
    finally:
        child.kill()
        other.kill()
        child.wait()
        other.wait()
