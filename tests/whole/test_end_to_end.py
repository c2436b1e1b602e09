"""The main job through every real part: command line, SuperLink, simulation, Ray actors, decoder stream."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from client_pipeline.runtime.ray.machine import machine_facts
from flower_app.runs.machines import read_machines
from helpers.command_line import TINY, collapipe, rounds, sets
from helpers.repository import ROOT
from helpers.running_programs import free_port

pytestmark = [pytest.mark.slow, pytest.mark.promise]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """A small run of the default strategy with three clusters, which reports to MLflow's store beside it."""
    folder = tmp_path_factory.mktemp("default")
    result = collapipe("run", *sets(report_to="mlflow"), cwd=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def test_a_run_leaves_what_the_readme_says(default_run):
    run_dir = default_run / "runs" / "latest"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["rounds"] == TINY["num-rounds"]
    assert summary["wall_s"] > 0
    assert 0 <= summary["metrics"]["bleu"] <= 100
    found = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert {"config.toml", "rounds.jsonl", "summary.json", "plans/round-0001.json", "plans/round-0003.json"} <= found
    # The folder is a link to the newest version, which a walk does not enter.
    assert all((run_dir / "model" / name).is_file() for name in ("model.safetensors", "spec.json", "tokenizer.json"))


def test_a_run_notes_which_machines_it_used_and_its_report_shows_them(default_run):
    run_dir = default_run / "runs" / "latest"
    [start] = read_machines(run_dir)
    here = machine_facts()
    assert start["after_round"] == 0 and start["server"] == here
    assert start["clusters"] == {str(n): {"control_unit": here, "devices": {}} for n in range(3)}
    page = (run_dir / "report.html").read_text()
    assert "server; control units and devices of clusters 0, 1, 2" in page and here["host"] in page


def test_mlflow_reads_from_a_local_store_what_the_rounds_say(default_run):
    from mlflow.tracking import MlflowClient

    run_dir = (default_run / "runs" / "latest").resolve()
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("collapipe").experiment_id])
    assert (run.info.run_name, run.info.status) == (run_dir.name, "FINISHED")
    assert (run.data.params["num-rounds"], run.data.params["model.width"]) == ("3", "16")
    for tag, key in (("train/loss", "train_loss"), ("messages/bytes_up", "bytes_up"), ("wall/round_s", "round_s")):
        history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, tag)]
        assert history == [(line["round"], line[key]) for line in rounds(run_dir)], tag


def test_loss_falls_over_three_clusters_whose_rounds_dssda_plans(default_run):
    lines = rounds(default_run / "runs" / "latest")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    for line in lines:
        assert [cluster["cluster"] for cluster in line["clusters"]] == [0, 1, 2]
        assert (line["plan"]["policy"], line["plan"]["status"]) == ("dssda", "optimal")
        for cluster, planned in zip(line["clusters"], line["virtual"]["clusters"], strict=True):
            assert {int(device) for device in cluster["devices"]} == set(planned["order"])
            # What really went over the wires stands beside what the costs say.
            assert cluster["link_bytes"] > 0 and min(cluster["stream_bytes"].values()) > 0
            assert planned["m"] == cluster["plan"]["m"] and planned["pipeline_s"] > 0
        assert not line["failed"]
    assert any(len(cluster["devices"]) >= 2 for line in lines for cluster in line["clusters"])


def test_messages_leave_the_decoder_out_and_the_saved_model_has_it(default_run):
    from safetensors import safe_open

    run_dir = default_run / "runs" / "latest"
    with safe_open(run_dir / "model" / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    encoder = sum(size for name, size in sizes.items() if not name.startswith("head."))
    assert any(name.startswith("head.") for name in sizes)
    sent = rounds(run_dir)[0]["bytes_up"] / 3
    # Each array travels with a header of its own, of about a hundred bytes.
    assert encoder < sent < encoder + 200 * len(sizes)


def test_the_saved_model_can_be_scored_and_used(default_run):
    scored = collapipe("evaluate", "latest", "--json", cwd=default_run)
    assert scored.returncode == 0, scored.stderr
    summary = json.loads((default_run / "runs" / "latest" / "summary.json").read_text())
    assert json.loads(scored.stdout)["metrics"]["bleu"] == pytest.approx(summary["metrics"]["bleu"])
    used = collapipe("translate", "latest", "the dog sleeps", cwd=default_run)
    assert used.returncode == 0, used.stderr


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
    # Nodes of a simulation are all there at once: nobody waits a minute for a third.
    assert "within 60 s" not in summary["error"]


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
            _, alive = psutil.wait_procs(family, timeout=10)
            for member in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
