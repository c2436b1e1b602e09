"""Strategies and policies trained beside each other: what is refused, and what the figures say."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.compare import trained as compare_training
from flower_app.compare.trained import contenders
from flower_app.config.run_config import RunConfig
from flower_app.launch.run_series import train_series
from flower_app.runs import run_checkpoints
from flower_app.runs.run_directory import FINISHED, append_round, write_summary
from flower_app.runs.run_inputs import input_digests
from helpers.fake_series import FakeLauncher, fake_round, fake_run
from strategies.checkpoint import Checkpoint

COUNTED = ("latency_s", "pipeline_s", "energy_j", "bytes", "memory_bytes")


def base(**more):
    return RunConfig.from_flat({"num-rounds": 4, "scenario": "table2", **more})


def compare(configs, num_seeds, out, say=lambda _: None, train=fake_run):
    return compare_training.compare_training(configs, num_seeds, out, say, FakeLauncher(train))


def test_every_contender_is_checked_before_the_first_is_trained(tmp_path):
    """The second name used to be looked at when the first had been trained, and left an empty folder that was in
    the way of the next try."""
    for strategies, message in (
        ("titanic,nope", "strategy: expected collapipe"),
        ("titanic,FedAdam:x", "cannot import"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                compare(contenders(base(), "", strategies), 1, tmp_path)
            assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="policy: expected one of dssda"):
        compare(contenders(base(), "dssda,best", ""), 1, tmp_path)
    with pytest.raises(ValueError, match="dssda is named twice"):
        contenders(base(), "dssda,dssda", "")
    with pytest.raises(ValueError, match="nothing to compare"):
        contenders(base(), " , ", "")


@pytest.mark.slow
def test_means_leave_out_the_first_quarter_and_go_over_seeds(tmp_path):
    configs = contenders(base(), "dssda", "vanilla-fl")
    found = compare(configs, 2, tmp_path)
    assert found == json.loads((tmp_path / "compare.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["dssda", "vanilla-fl"]
    run = found["runs"][0]
    # Seeds 0 and 1: the second is fake_run's slower one.
    assert {key: run[key] for key in COUNTED} == {
        "latency_s": 30.0,
        "pipeline_s": 15.0,
        "energy_j": 4.0,
        "bytes": 150.0,
        "memory_bytes": 14.0,
    }
    assert found["metric"] == "bleu" and run["metric"] == 40.5 and run["metrics"] == [40.0, 41.0]
    assert run["process_bytes"] == 20 and run["gamma"] == 2.5 and run["selected_share"] == [1.0, 0.0]
    lines = (tmp_path / "curves.csv").read_text().splitlines()
    assert lines[0] == "name,seed,round,virtual_s,bytes,energy_j,train_loss,metric"
    assert lines[2] == "dssda,0,2,2020.0,300.0,8.0,1.0,20.0" and len(lines) == 1 + 2 * 2 * 4
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert compare_training.training_table(found).row_count == 2


def labelled_run(run_dir, config, resume):
    """A run that keeps its model of round 2, whose scores are near each other."""
    scores = {2: 0.71234, 4: 0.6}
    for number in range(1, 5):
        accuracy = {"loss": 1.0, "accuracy": scores[number] + config.seed / 10} if number in scores else {}
        append_round(run_dir, fake_round(number, 1.0) | {"metrics": accuracy})
    write_summary(run_dir, FINISHED, rounds=4, scored_round=2, wall_s=1.0, metrics={"loss": 1.0, "accuracy": 0.70618})


@pytest.mark.slow
def test_the_table_has_validation_and_test_apart_in_four_digits_and_a_legend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "flower_app.compare.trained.train_series",
        lambda series, folder, say, launcher: train_series(series, folder, say, FakeLauncher(labelled_run)),
    )
    arguments = ["compare", "--train", "--policies", "dssda,uniform", "--scenario", "table2", "--rounds", "4"]
    outcome = CliRunner().invoke(app, [*arguments, "--seeds", "2"])
    assert outcome.exit_code == 0, outcome.output
    table, _, legend = outcome.stdout.partition("\n\n")
    header, *rows = table.splitlines()
    assert "validation accuracy" in header and "test accuracy" in header, header
    assert all(
        row.split()[:3] == [name, "0.7623", "0.7062"] for row, name in zip(rows, ("dssda", "uniform"), strict=True)
    )
    columns = [name for name in re.split(r"\s{2,}", header.strip()) if name]
    assert [re.split(r"\s{2,}", line)[0] for line in legend.strip().splitlines()] == columns
    runs = json.loads((tmp_path / "compare" / "compare.json").read_text())["runs"]
    assert [run["validations"] for run in runs] == [[0.71234, 0.81234]] * 2 and runs[0]["metrics"] == [0.70618] * 2


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_and_another_configuration_is_refused(tmp_path):
    trained = []

    def run(run_dir, config, resume):
        trained.append(run_dir.name)
        if len(trained) == 2:
            raise RuntimeError("no such luck")
        fake_run(run_dir, config, resume)

    configs = contenders(base(), "dssda,uniform", "")
    with pytest.raises(RuntimeError, match="uniform-seed0: no such luck; logs: .*The same command continues"):
        compare(configs, 1, tmp_path, train=run)
    # The same command goes on; once the unfinished run's folder was in its way.
    compare(configs, 1, tmp_path, train=run)
    assert trained == ["dssda-seed0", "uniform-seed0", "uniform-seed0"]
    with pytest.raises(ValueError, match="dssda-seed0: was trained with local-steps = 4, expected 2"):
        compare(contenders(base(**{"local-steps": 2}), "dssda", ""), 1, tmp_path)


@pytest.mark.slow
def test_a_run_of_a_comparison_that_stopped_goes_on_from_its_checkpoint_or_begins_again(tmp_path):
    """One behaviour, whether it is compared or drawn: it used to be refused here."""
    begun = []

    def run(run_dir, config, resume):
        assert not (run_dir / "summary.json").exists()
        begun.append(resume)
        if len(begun) < 3:
            # The first stops before a checkpoint, the second after it.
            (run_dir / "plans" / "left-over.json").write_text("{}")
            if len(begun) == 2:
                round_state = Checkpoint(1, {"w": torch.ones(1)}, {}, {}, {})
                run_checkpoints.commit_round(run_dir, round_state, config, input_digests(config))
            raise RuntimeError("stopped")
        fake_run(run_dir, config, resume)

    configs = contenders(base(), "dssda", "")
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dssda-seed0: stopped"):
            compare(configs, 1, tmp_path, said.append, run)
    compare(configs, 1, tmp_path, said.append, run)
    assert begun == [False, False, True]
    assert "dssda-seed0: did not finish, and has no checkpoint; begins again" in said
    assert "dssda-seed0: goes on from its checkpoint" in said
