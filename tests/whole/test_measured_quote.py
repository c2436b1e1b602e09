"""``collapipe quote --after``: the rest of a run, by what its rounds have measured, is what the run then does."""

import statistics
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.compare.measured_quote import measured_quote
from flower_app.config.sources import load_config
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.launch.single_run import continued_run
from flower_app.runs.run_directory import read_rounds
from helpers.chat_cases import save_chat_model
from helpers.command_line import TINY, collapipe

SETTINGS = {
    "scenario": "two-clusters",
    "task.name": "causal-lm",
    "model.family": "llama",
    "local-steps": 2,
    "num-rounds": 4,
    "checkpoint-every": 1,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of four rounds with measured costs, and one with the model's."""
    folder = tmp_path_factory.mktemp("pilots")
    # Of long texts nearly all sequences are full.
    words = ["ich", "sehe", "den", "hund", "und", "das", "haus"]
    lines = [" ".join(words[(n + i * i) % 7] for i in range(900)) for n in range(12)]
    (folder / "text.txt").write_text("\n".join(lines))
    files = {f"data.{split}-source": "text.txt" for split in ("train", "validation", "test")}
    settings = TINY | SETTINGS | {"data.source": "files", "data.path": folder, "data.max-length": 12, **files}
    # Of fewer TEBs than a fresh model has.
    settings |= {"model.pretrained": save_chat_model(folder / "pretrained"), "model.decoder-layers": 1}
    values = [f"{key}={value}" for key, value in settings.items()]
    configs = {
        costs: load_config(None, [*values, f"costs={costs}", f"run-dir={folder / costs}"])
        for costs in ("measured", "model")
    }
    train_series([SeriesRun(name, config) for name, config in configs.items()], folder / "session", print)
    return folder


@pytest.mark.slow
def test_the_rest_of_a_run_is_what_was_quoted(runs):
    run = continued_run(str(runs / "measured"), ["num-rounds=5"])
    document = measured_quote(run.config, run.run_dir)
    more = measured_quote(replace(run.config, num_rounds=8), run.run_dir)
    assert (more["first_round"], more["rounds"]) == (5, 4) and more["seconds"] > document["seconds"] > 0
    assert sum(entry["share"] for entry in more["bottlenecks"]) == pytest.approx(1.0)
    result = CliRunner().invoke(app, ["quote", "--after", str(runs / "measured"), "--set", "num-rounds=5"])
    with pytest.raises(ValueError, match="has had its 4 rounds; say how many it is to have with --set num-rounds=8"):
        measured_quote(replace(run.config, num_rounds=4), run.run_dir)
    assert result.exit_code == 0 and "1 round: " in result.output and "local steps and uploads" in result.output
    assert "memory of a device are its model's, not measured" in result.output
    gone_on = collapipe("run", "--resume", runs / "measured", "--set", "num-rounds=5", cwd=runs)
    assert gone_on.returncode == 0, gone_on.stderr
    line = read_rounds(run.run_dir)[0][-1]
    assert line["round"] == 5
    # By the same state the run predicts the same; the two rounds before took so many times what was predicted.
    third, fourth, fifth = (record["plan"]["predictions"] for record in read_rounds(run.run_dir)[0][2:])
    parts = [
        [
            now[f"predicted_{part}_s"]
            * statistics.fmean(p[f"measured_{part}_s"] / p[f"predicted_{part}_s"] for p in before)
            for part in ("train", "upload")
        ]
        for *before, now in zip(third, fourth, fifth, strict=True)
    ]
    assert document["seconds"] == pytest.approx(max(map(sum, parts)), rel=1e-9)
    assert document["train_s"] == pytest.approx(max(train_s for train_s, _ in parts), rel=1e-9)
    payloads = [report["payload_bytes"] for report in line["clusters"]]
    sent = sum(payload["up"] + payload["update"] for payload in payloads)
    assert document["uplink_bytes"] == pytest.approx(sent, rel=0.02)
    assert sum(line["clusters"][0]["plan"]["delta"]) == 2
    first, *others = (
        max(p["measured_train_s"] + (p["measured_upload_s"] or 0.0) for p in record["plan"]["predictions"])
        for record in read_rounds(run.run_dir)[0][:4]
    )
    assert document["start_s"] == pytest.approx(max(first - statistics.median(others), 0.0))
    assert document["link_bytes"] == pytest.approx(sum(report["link_bytes"] for report in line["clusters"]), rel=0.02)
    held = {(r["cluster"], int(k)): d["held_bytes"] for r in line["clusters"] for k, d in r["devices"].items()}
    boxes = {(box["cluster"], box["device"]): box["memory_bytes"] for box in document["boxes"] if box["share"]}
    assert boxes == pytest.approx(held, rel=0.1)


@pytest.mark.slow
def test_a_run_that_does_not_measure_has_nothing_to_go_by(runs):
    result = CliRunner().invoke(app, ["quote", "--after", str(runs / "model"), "--set", "num-rounds=5"])
    assert result.exit_code != 0
    assert "--after: expected a run that measures, found costs = model" in " ".join(result.output.split())


def test_a_run_goes_on_as_it_began():
    for option in (["--prices"], ["--what-if", "cluster=1,bandwidth-mhz=x2"], ["--config", "toy"]):
        result = CliRunner().invoke(app, ["quote", "--after", "latest", *option])
        assert result.exit_code != 0 and "--after: a run goes on as it began" in " ".join(result.output.split())
