"""``flwr run`` as Flower documents it, with the SuperLink that it starts itself."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import TINY, rounds
from helpers.repository import ROOT
from helpers.running_programs import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain_flwr_run(tmp_path_factory):
    """``flwr run`` with a SuperLink that Flower itself starts, and keeps: folder of the runs and output of each."""
    folder = tmp_path_factory.mktemp("plain")
    ports = [str(free_port()) for _ in range(2)]
    (folder / "home").mkdir()
    binaries = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
    }

    def run(name, options=(), **more):
        overrides = {**TINY, "runs-dir": str(folder / name), **more}
        given = {key: value for key, value in overrides.items() if value is not None}
        pairs = " ".join(f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in given.items())
        command = ["flwr", "run", str(ROOT), "--stream", "--run-config", pairs, *options]
        for _ in range(3):
            result = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=560, capture_output=True, text=True, check=False
            )
            output = result.stdout + result.stderr
            # A busy machine exceeds the 15 s that Flower gives its SuperLink.
            if "Failed to start local SuperLink within" not in output:
                break
        if "[code: 15] Invalid run configuration." in output:
            return None, (folder / "home" / "local-superlink" / "superlink.log").read_text()
        # Even where the run has failed.
        assert result.returncode == 0, output[-3000:]
        run_dir = (folder / name / "latest").resolve()
        assert str(run_dir) in output, output[-3000:]
        return run_dir, output

    yield run
    end_superlink(ports[0])


@pytest.fixture(scope="module")
def run_of_two_nodes(plain_flwr_run):
    """The default scenario on the two nodes that Flower simulates by default, by Flower's own names of keys."""
    keys = {"num-rounds": None, "optimizer.lr": None, "num-server-rounds": 2, "learning-rate": 0.25}
    return plain_flwr_run("default", **keys)


@pytest.mark.promise
def test_plain_flwr_run_trains_as_many_clusters_as_it_has_nodes_and_says_so(run_of_two_nodes):
    """The run trained two of the default scenario's three clusters, and said nothing."""
    run_dir, output = run_of_two_nodes
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 2), summary
    assert [len(line["clusters"]) for line in rounds(run_dir)] == [2, 2]
    line = 'flwr run . --stream --federation-config "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=3"'
    warning = "scenario default has 3 clusters, this simulation 2 nodes: only the first 2 clusters train; all of them: "
    assert warning + line in output
    assert "num-clusters = 2\n" in (run_dir / "config.toml").read_text()


@pytest.mark.promise
def test_flowers_names_of_keys_train_under_flwr_run(run_of_two_nodes):
    run_dir, _ = run_of_two_nodes
    assert [line["round"] for line in rounds(run_dir)] == [1, 2]
    assert max(line["lr"] for line in rounds(run_dir)) > 0.1


def test_plain_flwr_run_refuses_fewer_nodes_than_clusters_that_somebody_asked_for(plain_flwr_run):
    run_dir, output = plain_flwr_run("refused", **{"num-rounds": 1, "num-clusters": 3})
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "bad-input", summary
    line = 'flwr run . --stream --federation-config "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=3"'
    assert line in summary["error"] and "expected 3 nodes, one a cluster, found 2" in summary["error"]
    assert line in output
    # The reason is the last line before Flower's own; the exit code says nothing of it.
    last = [text for text in output.partition("Exit Code: 700")[0].splitlines() if text.strip()][-2]
    assert last.startswith("ValueError: ") and last.endswith(summary["error"])
    # Nodes of a simulation are all there at once: nobody waits a minute for a third.
    assert "within 60 s" not in summary["error"]


def test_a_key_that_the_app_does_not_have_is_named_in_the_superlinks_log(plain_flwr_run):
    assert "Key 'num-round' is not present" in plain_flwr_run("misspelt", **{"num-round": 1})[1]


def test_plain_flwr_run_learns_with_two_clients_one_after_the_other(plain_flwr_run):
    # Two CPUs of two for each client: client apps run one after the other, and still take a common step.
    federation = "num-supernodes=2 client-resources-num-cpus=2 init-args-num-cpus=2"
    run_dir, output = plain_flwr_run("learns", ["--federation-config", federation], scenario="two-clusters")
    lines = rounds(run_dir)
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    assert len(lines[0]["clusters"]) == 2
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    assert "2 clusters train at once, on 1 client apps" in output
    assert "were not there in" not in output


def end_superlink(port):
    """End the SuperLink that flwr started for this test, found by its own port."""
    import psutil

    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if any("flower-superlink" in part for part in command) and port in command:
            family = [*process.children(recursive=True), process]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.terminate()
            _, alive = psutil.wait_procs(family, timeout=120)
            for member in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
