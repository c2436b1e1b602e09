"""The main job through every real part: command line, SuperLink, simulation, Ray actors, decoder stream."""

import json

import pytest

from client_pipeline.runtime.ray.machine import machine_facts
from flower_app.runs.machines import read_machines
from helpers.command_line import TINY, collapipe, rounds, sets

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
            assert (cluster["link_bytes"] > 0) == (len(cluster["devices"]) > 1)
            assert min(cluster["stream_bytes"].values()) > 0
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
