"""``collapipe sweep``: the combinations, what is refused, and the best of them as a configuration."""

import csv
import json

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.compare import trained
from flower_app.compare.sweep import BEST, ROWS, combinations, sweep, sweep_table
from flower_app.config.sources import load_config
from flower_app.runs.run_directory import FINISHED, ROUNDS, append_round, write_summary
from helpers.fake_series import FakeLauncher, fake_round

OVER = ["optimizer.lr=0.001,0.002", "optimizer.clip-norm=1,2"]
SETS = ["num-rounds=4", "scenario=table2"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(trained, "write_pictures", lambda run_dir: None)


def scored_run(run_dir, config, resume):
    """A run that is best at a rate of 0.002 and a norm of 1, and worse with its second seed."""
    loss = abs(config.optimizer.lr - 0.002) * 1000 + config.optimizer.clip_norm + config.seed / 10
    for number in range(1, 5):
        line = fake_round(number, 1)
        if line["metrics"]:
            line["metrics"] = {"loss": loss + (4 - number), "bleu": 100 - loss}
        append_round(run_dir, line)
    write_summary(run_dir, FINISHED, rounds=4, wall_s=1.0, metrics={"loss": loss + 0.5, "bleu": 1.0})


def swept(tmp_path, sets=SETS, train=scored_run, seeds=2):
    configs = combinations(None, sets, OVER, seeds)
    return sweep(configs, seeds, tmp_path, lambda text: None, FakeLauncher(train))


def test_every_combination_is_a_configuration():
    configs = combinations(None, SETS, [*OVER, "lora.targets=query,value|all-linear"], 1)
    assert len(configs) == 8
    config = configs["optimizer.lr=0.002 optimizer.clip-norm=1 lora.targets=query,value"]
    assert (config.optimizer.lr, config.optimizer.clip_norm, config.lora.targets) == (0.002, 1.0, "query,value")
    assert config.num_rounds == 4


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ([], "sweep: expected --over KEY=VALUE,VALUE,... at least once"),
        (["optimizer.lr"], "--over: expected KEY=VALUE,VALUE,... of different values, found 'optimizer.lr'"),
        (["optimizer.lr=1,,2"], "--over: expected KEY=VALUE,VALUE,... of different values"),
        (["optimizer.lr=1,1"], "--over: expected KEY=VALUE,VALUE,... of different values"),
        (["optimizer.lr=1,2", "optimizer.lr=3"], "--over: optimizer.lr is named twice"),
        (["optimizer.lrr=1,2"], "optimizer.lrr"),
        (["optimizer.lr=1,fast"], "optimizer.lr"),
        (["seed=" + ",".join(map(str, range(600)))], "sweep: expected at most 1,000 runs, found 1,200"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(tmp_path, over, reason):
    options = [f"--over={text}" for text in over]
    result = CliRunner().invoke(app, ["sweep", *options, "--seeds", "2", "--out", str(tmp_path / "sweep")])
    assert result.exit_code != 0
    assert reason in " ".join(result.output.split())
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "bleu"])
def test_the_best_by_validation_is_a_configuration_that_runs(tmp_path, metric):
    given = [*SETS, f"selection.metric={metric}", "name=mine", "scenario-seed=5"]
    found = swept(tmp_path, given)
    assert found["best"] == "optimizer.lr=0.002 optimizer.clip-norm=1"
    assert found["edges"] == [
        "optimizer.lr = 0.002 is the highest that was tried; the best may lie beyond",
        "optimizer.clip-norm = 1 is the lowest that was tried; the best may lie beyond",
    ]
    best = next(row for row in found["rows"] if row["name"] == found["best"])
    if metric == "loss":
        # Seeds 0 and 1 end with 1.0 and 1.1.
        assert best["validation"] == pytest.approx(1.05) and best["test"] == pytest.approx(1.55)
        assert best["validation_deviation"] == pytest.approx(0.1 / 2**0.5)
    config = load_config(str(tmp_path / BEST))
    assert (config.optimizer.lr, config.optimizer.clip_norm, config.num_rounds) == (0.002, 1.0, 4)
    assert (config.name, config.seed, config.run_dir, config.resume) == ("mine", 0, "", False)
    # On the same network.
    assert config.scenario_seed == 5
    with (tmp_path / ROWS).open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["name", "seed", f"validation {metric}", f"test {metric}", "wall_s"]
    assert [line[:2] for line in lines[1:3]] == [["optimizer.lr=0.001 optimizer.clip-norm=1", str(n)] for n in (0, 1)]
    assert len(lines) == 9
    # What has finished is taken as it is.
    assert swept(tmp_path, given, train=None) == found


@pytest.mark.slow
def test_a_sweep_without_validation_says_what_to_set(tmp_path):
    def unscored(run_dir, config, resume):
        for number in range(1, 5):
            append_round(run_dir, fake_round(number, 1) | {"metrics": {}})
        write_summary(run_dir, FINISHED, rounds=4, wall_s=1.0, metrics={"loss": 1.0})

    with pytest.raises(ValueError, match="sweep: no run has a validation score loss; set evaluate-every above 0"):
        swept(tmp_path, train=unscored)
    assert not (tmp_path / BEST).exists()


@pytest.mark.slow
def test_what_diverged_with_a_seed_is_not_the_best_for_its_others(tmp_path):
    def sometimes(run_dir, config, resume):
        scored_run(run_dir, config, resume)
        if (config.optimizer.lr, config.optimizer.clip_norm, config.seed) == (0.002, 1.0, 1):
            lines = [json.loads(line) for line in (run_dir / ROUNDS).read_text().splitlines()]
            (run_dir / ROUNDS).unlink()
            for line in lines:
                append_round(run_dir, line | ({"metrics": {"loss": None}} if line["metrics"] else {}))
            write_summary(run_dir, FINISHED, rounds=4, wall_s=1.0, metrics={"loss": None})

    found = swept(tmp_path, [*SETS, "selection.metric=loss"], train=sometimes)
    of = {row["name"]: row for row in found["rows"]}
    assert of["optimizer.lr=0.002 optimizer.clip-norm=1"]["unscored"] == 1
    assert of["optimizer.lr=0.002 optimizer.clip-norm=1"]["validation"] == 1.0
    assert of[found["best"]]["unscored"] == 0 and of[found["best"]]["validation"] > 2
    caption = sweep_table(found).caption
    assert "optimizer.lr=0.002 optimizer.clip-norm=1: 1 seed of 2 without a score" in caption


def test_a_table_marks_the_best():
    row = {"validation": 1.0, "validation_deviation": None, "test": 2.0, "test_deviation": None, "unscored": 0}
    found = {"metric": "loss", "rows": [{"name": "a=1", **row}, {"name": "a=2", **row}], "best": "a=2", "config": "x"}
    table = sweep_table({**found, "edges": ["a = 2 is the highest that was tried"]})
    assert "a = 2 is the highest" in table.caption
    assert list(table.columns[0].cells) == ["a=1", "a=2 *"] and "best: a=2" in table.caption
