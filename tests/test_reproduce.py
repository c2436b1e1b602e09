"""``collapipe reproduce``: curves in, rows, pictures and findings out."""

import json

import pytest
from typer.testing import CliRunner

from flower_app.cli import app
from flower_app.experiments.curves import load_curves
from flower_app.experiments.fig11 import jain
from flower_app.experiments.reproduce import EXPERIMENTS, Options, reproduce
from flower_app.experiments.results import read_rows

PLANNING = [name for name, experiment in EXPERIMENTS.items() if not experiment.trains]
CURVE = """
label = "mine"
seeds = 2
[run]
scenario = "table2"
policy = "dssda"
num-rounds = 3
[smoke]
seeds = 1
run.num-rounds = 2
"""


def quiet(_):
    pass


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("smoke", [False, True])
def test_every_experiment_has_curves(name, smoke):
    curves = load_curves(name, smoke=smoke)
    assert curves
    if name in PLANNING:
        assert all(curve.config.model.encoder_layers == 12 for curve in curves)
    # A figure of several panels has each of its labels in all of them.
    panels = len({curve.figure.get("panel") for curve in curves} if name == "fig6" else "1")
    assert len({curve.label for curve in curves}) * panels == len(curves)


@pytest.mark.parametrize("name", PLANNING)
def test_an_experiment_leaves_rows_picture_and_findings(name, tmp_path):
    found = reproduce(name, Options(out=tmp_path, smoke=True), quiet)[name]
    folder = tmp_path / name
    assert [vars(f) for f in found] == json.loads((folder / "findings.json").read_text())
    assert (folder / "figure.png").stat().st_size > 10_000
    rows = read_rows(folder)
    assert len((folder / "results.csv").read_text().splitlines()) == len(rows) + 1
    # Drawing needs the rows alone, and finds the same.
    (folder / "figure.png").unlink()
    assert reproduce(name, Options(out=tmp_path, plot_only=True), quiet)[name] == found
    assert (folder / "figure.png").is_file()


def test_the_same_curves_give_the_same_rows(tmp_path):
    for out in ("a", "b"):
        reproduce("drift", Options(out=tmp_path / out, smoke=True), quiet)
    assert read_rows(tmp_path / "a" / "drift") == read_rows(tmp_path / "b" / "drift")


def test_a_reader_can_change_a_curve(tmp_path):
    (tmp_path / "curves" / "drift").mkdir(parents=True)
    (tmp_path / "curves" / "drift" / "mine.toml").write_text(CURVE)
    options = Options(out=tmp_path, smoke=False, curves=tmp_path / "curves", sets=["planner.v=0.5"])
    reproduce("drift", options, quiet)
    rows = read_rows(tmp_path / "drift")
    assert [(row["seed"], row["round"]) for row in rows] == [(i, t) for i in (0, 1) for t in (1, 2, 3)]
    assert {row["label"] for row in rows} == {"mine"}
    [curve] = load_curves("drift", smoke=True, folder=tmp_path / "curves", sets=["planner.v=0.5"])
    assert (curve.seeds, curve.config.num_rounds, curve.config.planner.v) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 2", "seeds = 0", "seeds: expected at least 1, found 0"),
        ("seeds = 2", 'seeds = "two"', "seeds: expected int, found 'two'"),
        ("seeds = 2", "seed = 2", "seed: unknown key"),
        ("num-rounds = 3", "num-round = 3", r"\[run\] .*num-round"),
        ("[run]", "[run", "expected TOML"),
        ("seeds = 1\n", "size = 1\n", "smoke.size: unknown key"),
    ],
)
def test_a_wrong_curve_is_named(old, new, message, tmp_path):
    (tmp_path / "drift").mkdir()
    (tmp_path / "drift" / "mine.toml").write_text(CURVE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as error:
        load_curves("drift", smoke=False, folder=tmp_path)
    assert "mine.toml" in str(error.value)


def test_what_is_not_there_is_refused(tmp_path):
    for arguments, message in (
        (["fig3"], "expected all or one of fig4"),
        (["fig4", "--plot"], "run the experiment first"),
        (["fig4", "--curves", str(tmp_path)], "expected one TOML for each curve"),
        (["drift", "--set", "strategy=FedAvg", "--smoke"], "policy"),
    ):
        outcome = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path / "out")])
        assert outcome.exit_code != 0
        assert message in f"{outcome.output}{outcome.exception}"


def test_fairness_is_that_of_jain():
    assert jain([0.5, 0.5, 0.5, 0.5]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([0, 0]) == 0
