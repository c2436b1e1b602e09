"""The figures that train: what is trained once, what rows say, and what is drawn and found without training."""

from dataclasses import replace

import pytest
import torch

from experiments import theorem1
from experiments.base import training
from experiments.base.results import read_rows
from experiments.curves import load_curves
from experiments.reproduce import ReproduceOptions, reproduce
from experiments.theorem1_problems import SmallTransformer, SoftmaxRegression, curvature
from flower_app.launch import run_series
from flower_app.runs.run_directory import FAILED, FINISHED, append_round, write_config, write_summary


def quiet(_):
    pass


def finish(trainings):
    """Leave the files of finished runs."""
    for one in trainings:
        one.run_dir.mkdir(parents=True)
        write_config(one.run_dir, one.config)
        append_round(one.run_dir, {"round": 1})
        write_summary(one.run_dir, FINISHED, metrics={"loss": 1.0}, wall_s=1.0)


def curves(experiment="fig6", only="classes-1"):
    return load_curves(experiment, smoke=True, only=only)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fig6_trains_all_four_frameworks_once_and_draws_without_training(tmp_path, monkeypatch):
    options = ReproduceOptions(out=tmp_path, smoke=True, only="translation", sets=["num-rounds=4"])
    said = []
    found = reproduce("fig6", options, said.append)["fig6"]
    rows = read_rows(tmp_path / "fig6")
    assert "4 runs, 0 finished before" in said
    assert [row["what"] for row in rows if row["test_score"] is not None] == [
        "collapipe", "vanilla-fl", "pipeline", "titanic",
    ]  # fmt: skip
    last = {row["what"]: row["train_loss"] for row in rows if row["round"] == 4}
    # They learn from each other, or from nobody: what is averaged makes a difference, who computes what makes none.
    rounding = abs(last["titanic"] - last["vanilla-fl"])
    assert rounding < 1e-5 * last["titanic"]
    for other in ("collapipe", "pipeline"):
        assert abs(last[other] - last["vanilla-fl"]) > 3 * rounding
    assert {f.what for f in found} > {
        "translation: CollaPipe against PipeLine",
        "translation: CollaPipe against TITANIC",
    }
    assert (tmp_path / "fig6" / "figure.png").stat().st_size > 10_000
    monkeypatch.setattr(run_series, "_train_session", None)
    assert reproduce("fig6", options, said.append)["fig6"] == found
    assert "4 runs, 4 finished before" in said
    assert reproduce("fig6", replace(options, plot_only=True), quiet)["fig6"] == found


def test_what_has_finished_is_not_trained_again_and_what_has_not_begins_anew(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(run_series, "_train_session", lambda claimed, *_: trained.extend(claimed))
    wanted = training.trainings([replace(curves()[0], seeds=3)], tmp_path)
    assert [one.config.seed for one in wanted] == [0, 1, 2]
    finish(wanted[:2])
    write_summary(wanted[1].run_dir, FAILED, error="killed")
    training.train_all(wanted, tmp_path, quiet)
    assert [run_dir for run_dir, _ in trained] == [one.run_dir for one in wanted[1:]]
    assert not (wanted[1].run_dir / "rounds.jsonl").exists()
    other = [replace(one, config=replace(one.config, batch_size=7)) for one in wanted]
    with pytest.raises(ValueError, match="was trained with batch-size = 32, expected 7; remove the folder"):
        training.train_all(other, tmp_path, quiet)


def test_a_mistake_in_any_curve_is_named_before_the_first_is_trained(tmp_path):
    [curve] = load_curves("fig6", smoke=False, only="classes-4", sets=["data.path=/nowhere"])
    with pytest.raises((ValueError, FileNotFoundError), match=r"classes-4-titanic: .*/nowhere"):
        training.train_all(training.trainings([curve], tmp_path), tmp_path, quiet)
    assert not list(tmp_path.iterdir())


# Theorem 1.


@pytest.fixture(scope="module")
def convex():
    [curve] = load_curves("theorem1", smoke=True, only="2-distorted")
    return curve, SoftmaxRegression(curve, 0)


@pytest.mark.slow
def test_the_bound_holds_on_a_convex_problem_in_every_round(tmp_path):
    reproduce("theorem1", ReproduceOptions(out=tmp_path, smoke=True, only="distorted"), quiet)
    rows = read_rows(tmp_path / "theorem1")
    assert {(row["seed"], row["round"]) for row in rows} >= {(s, t) for s in (0, 1) for t in (1, 2, 3, 100)}
    assert rows[0]["broken_rounds"] == rows[0]["gap_broken_rounds"] == 0
    for row in rows:
        assert 0 <= row["gap"] <= row["gap_bound"]
        assert row["mean_gradient_sq"] <= row["bound"] <= row["bound_printed"]
    assert rows[0]["eta_beta"] == pytest.approx(0.1)
    # It does learn: with distorted uploads the gap still halves.
    assert rows[-1]["gap"] < 0.5 * rows[0]["gap"]


@pytest.mark.slow
def test_the_constants_of_the_convex_problem_are_those_of_its_gradients(convex):
    curve, problem = convex
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(problem.start().shape, generator=generator, dtype=torch.float64)
    value, gradient = problem.loss(w)
    assert value >= problem.lowest
    probe = 1e-6 * torch.randn(w.shape, generator=generator, dtype=torch.float64)
    difference = problem.loss(w + probe)[0] - problem.loss(w - probe)[0]
    assert difference == pytest.approx(2 * float(gradient @ probe), rel=1e-5)
    assert curvature(problem, problem.start(), generator) <= problem.global_smoothness
    # The sampling error is that of many batches; each cluster's mean gradient is the mean of its batches'.
    drawn = [torch.stack([problem.sample(w, n, generator) for _ in range(3000)]) for n in range(problem.num_clusters)]
    seen = sum(float((g - g.mean(dim=0)).square().sum(dim=1).mean()) for g in drawn) / problem.num_clusters
    assert problem.sampling_error(w, generator) == pytest.approx(seen, rel=0.05)
    assert torch.stack([g.mean(dim=0) for g in drawn]).mean(dim=0) == pytest.approx(gradient, abs=0.01)


def test_the_small_transformers_gradient_is_that_of_its_loss_and_every_seed_starts_alike():
    """Once the second seed began where the first had ended."""
    [curve] = load_curves("theorem1", smoke=True, only="transformer")
    problem = SmallTransformer(curve, 0)
    w = problem.start()
    value, gradient = problem.loss(w)
    moved = w - 0.05 * gradient
    # What a step gains is what the gradient says, to first order.
    gained = value - problem.loss(moved)[0]
    assert gained == pytest.approx(0.05 * float(gradient.square().sum()), rel=0.2)
    assert torch.equal(problem.start(), w)
    sampled = torch.stack([problem.sample(w, n, torch.Generator().manual_seed(0)) for n in range(2)])
    assert (sampled.mean(dim=0) - gradient).norm() < 0.5 * gradient.norm()


def test_theorem1_refuses_a_problem_that_it_does_not_know(convex):
    curve, _ = convex
    wrong = replace(curve, figure={**curve.figure, "problem": "concave"})
    with pytest.raises(ValueError, match="figure.problem: expected one of convex, transformer, found 'concave'"):
        list(theorem1.run([wrong], None, quiet))


# Sessions and files.


def test_curves_share_what_their_base_says(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "base.toml").write_text(
        "seeds = 3\n[run]\nnum-rounds = 9\nbatch-size = 8\n[smoke]\nrun.num-rounds = 2\n"
    )
    (tmp_path / "mine" / "a.toml").write_text('base = "../base.toml"\n[run]\nbatch-size = 4\n')
    (tmp_path / "mine" / "b.toml").write_text('base = "../base.toml"\n[smoke]\nseeds = 1\n')
    a, b = load_curves("mine", smoke=True, folder=tmp_path)
    assert (a.seeds, a.config.num_rounds, a.config.batch_size) == (3, 2, 4)
    assert (b.seeds, b.config.num_rounds, b.config.batch_size) == (1, 2, 8)
    with pytest.raises(FileNotFoundError, match=r"expected a part of one of the curves' names a, b; found 'c'"):
        load_curves("mine", smoke=True, folder=tmp_path, only="c")
    (tmp_path / "base.toml").write_text('base = "mine/a.toml"\n')
    with pytest.raises(ValueError, match=r"base.toml: base: expected none in a file that is a base itself"):
        load_curves("mine", smoke=True, folder=tmp_path)
    (tmp_path / "mine" / "a.toml").write_text('base = "../bass.toml"\n')
    with pytest.raises(ValueError, match=r"a.toml: base: expected another file"):
        load_curves("mine", smoke=True, folder=tmp_path)
