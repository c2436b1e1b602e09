"""The figures that train: what is trained once, what rows say, and what is drawn and found without training."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flower_app.experiments import fig6, grid, table3, theorem1, training
from flower_app.experiments.curves import load_curves
from flower_app.experiments.reproduce import ReproduceOptions, reproduce
from flower_app.experiments.results import mean_rows, read_rows, write_table
from flower_app.experiments.theorem1_problems import SmallTransformer, SoftmaxRegression, curvature
from flower_app.launch import run_series, session_app
from flower_app.launch.single_run import check_new_run
from flower_app.runs.run_directory import FAILED, FINISHED, append_round, read_summary, write_config, write_summary
from flower_app.training import actor_start, prepared_run, training_run
from strategies.aggregation.config import ServerOptimizerConfig
from strategies.aggregation.server_optimizers import averaging_strategy
from strategies.records import reply_content, to_tensors


def quiet(_):
    pass


def fake_round(number, loss, metrics):
    clusters = [{"selected": True}, {"selected": number % 2 == 0}]
    idle = 100_000_000
    devices = {
        str(k): {"blocks": blocks, "idle_bytes": idle, "peak_bytes": idle + 50_000_000 * blocks + number}
        for k, blocks in enumerate((4, 2))
    }
    return {
        "round": number,
        "train_loss": loss,
        "metrics": metrics,
        "clusters": [{"devices": devices}],
        "virtual": {"latency_s": 360.0, "clusters": clusters},
    }


def finish(trainings):
    """Leave what a run of four rounds leaves, scored every second one."""
    for one in trainings:
        one.run_dir.mkdir(parents=True)
        write_config(one.run_dir, one.config)
        name = one.curve.figure.get("score", "accuracy")
        for number in range(1, 5):
            score = 0.1 * number + 0.01 * one.seed
            metrics = {"loss": 1.0, name: score} if number % 2 == 0 else {}
            append_round(one.run_dir, fake_round(number, 5.0 - number, metrics))
        write_summary(one.run_dir, FINISHED, metrics={"loss": 1.0, name: 0.5 + 0.01 * one.seed}, wall_s=1.0)


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


def test_history_counts_examples_and_gives_the_test_score_once(tmp_path):
    wanted = training.trainings(curves(), tmp_path)
    finish(wanted)
    rows = training.history(wanted[0])
    assert [row["round"] for row in rows] == [2, 4]
    # One cluster trains in odd rounds, both in even ones: 4 local steps of 32 examples each.
    assert [row["samples"] for row in rows] == [3 * 4 * 32, 6 * 4 * 32]
    assert [row["train_loss"] for row in rows] == [3.5, 1.5]
    assert [row["virtual_h"] for row in rows] == pytest.approx([0.2, 0.4])
    assert [row["score"] for row in rows] == pytest.approx([20.0, 40.0])
    assert [row["test_score"] for row in rows] == [None, 50.0]
    assert [row["score"] is None for row in training.history(wanted[0], every_round=True)] == [True, False, True, False]


def grid_rows(apart):
    """A grid of S in (1, 2) and m in (1, 4) at seed 0 and another seed at S = 2, m = 4."""
    rows = []
    for size, m, seed in [*itertools.product((1, 2), (1, 4), (0,)), (2, 4, 1)]:
        for number in (1, 2):
            loss = 3.0 - number + apart["m"] * (m != 4) + apart["S"] * (size != 2) + apart["seed"] * seed
            score = None if number == 1 else 50.0 + 10 * apart["m"] * (m != 4) + 10 * apart["seed"] * seed
            rows.append(
                {"curve": f"S{size}", "label": "", "segments": size, "m": m, "seed": seed, "round": number}
                | {"metric": "bleu", "dropout": 0.0, "train_loss": loss, "test_score": score}
            )  # fmt: skip
    return rows


def test_the_grid_tells_what_s_m_and_seed_change_each():
    rows = grid_rows({"S": 0.0, "m": 1e-5, "seed": 0.5})
    found = {f.what.split(":")[0]: f.ours for f in grid.findings(rows)}
    assert found["other S, same m"] == "BLEU 0, training loss 0.0e+00 nat, 1 runs"
    assert found["other m, same S"] == "BLEU 0.0001, training loss 1.0e-05 nat, 1 runs"
    assert found["other seed"] == "BLEU 5, training loss 5.0e-01 nat, 1 runs"
    assert "no larger than that between seeds" in grid.findings(rows)[-1].why
    assert "wider" in grid.findings(grid_rows({"S": 0.0, "m": 3.0, "seed": 0.1}))[-1].why
    grid.draw(rows)


@pytest.mark.parametrize(("name", "masks"), [("fig9", False), ("fig10", True)])
def test_the_grid_reads_its_runs_and_speaks_of_masks_where_there_is_dropout(name, masks, tmp_path, monkeypatch):
    """Once masks were said to tell the runs of fig9 apart, which has no dropout."""
    monkeypatch.setattr(run_series, "_train_session", None)
    wanted = load_curves(name, smoke=True)
    runs = [
        grid._training(curve, seed, m, tmp_path)
        for curve in wanted
        for seed in range(curve.config.seed, curve.config.seed + curve.seeds)
        for m in curve.figure["micro-batches"]
    ]
    finish(runs)
    rows = list(grid.run(wanted, tmp_path, quiet))
    per_run = Counter((row["segments"], row["m"], row["seed"]) for row in rows)
    assert set(per_run.values()) == {4} and len(per_run) == len(runs)
    assert {row["segments"] for row in rows} == {1, 2, 4}
    assert sum(row["test_score"] is not None for row in rows) == len(runs)
    whys = " ".join(finding.why for finding in grid.findings(rows))
    assert ("masks" in whys) == masks
    # The wide grid's reason, too.
    for row in rows:
        row["test_score"] = row["test_score"] and row["test_score"] + 100 * (row["m"] == 1)
    assert "wider" in grid.findings(rows)[-1].why
    assert ("masks" in grid.findings(rows)[-1].why) == masks


@pytest.mark.parametrize(("panel", "score", "unit"), [("translation", "BLEU", 1), ("entities", "span F1 [%]", 100)])
def test_every_panel_of_fig6_is_told_from_its_runs(panel, score, unit, tmp_path, monkeypatch):
    monkeypatch.setattr(run_series, "_train_session", None)
    wanted = load_curves("fig6", smoke=True, only=panel)
    finish(training.trainings(wanted, tmp_path))
    rows = list(fig6.run(wanted, tmp_path, quiet))
    assert [row["what"] for row in rows if row["test_score"] is not None] == [
        "collapipe", "vanilla-fl", "pipeline", "titanic",
    ]  # fmt: skip
    assert rows[0]["score"] == pytest.approx(0.2 * unit)
    first, by_round, *others = fig6.findings(rows)
    assert first.what == f"{panel}: CollaPipe, {score}" and first.ours.startswith(f"{0.5 * unit:.1f} ± 0.0 after")
    assert by_round.what.endswith("by round")
    assert by_round.ours == f"{0.2 * unit:.1f} at 2, {0.4 * unit:.1f} at 4"
    assert [f.ours.split(" points")[0] for f in others] == ["+0.0 ± 0.0"] * 3
    # Where the paper counts something else, it is said.
    assert all(("accuracy" in f.why) == (panel == "entities") for f in others)
    fig6.draw(rows)


def test_table3_reads_the_largest_device_of_a_run(tmp_path, monkeypatch):
    wanted = training.trainings(load_curves("table3", smoke=True, only="1-collapipe"), tmp_path)
    finish(wanted)
    monkeypatch.setattr(table3, "load_model", lambda run_dir, family: SimpleNamespace(spec=None))
    monkeypatch.setattr(table3, "model_costs", lambda spec, **_: SimpleNamespace(block_memory=30e6))
    row = table3._row(wanted[0])
    # Four TEBs in the last round, above what the process had before.
    assert (row["tebs"], row["whole_tebs"], row["batch"]) == (4, 12, 12)
    assert row["measured_mb"] == pytest.approx(200.000004)
    assert row["mean_measured_mb"] == pytest.approx(150.0000025)
    assert row["modelled_mb"] == pytest.approx(120)


def test_the_grid_trains_even_segments_with_the_wanted_micro_batches(tmp_path):
    [curve] = load_curves("fig9", smoke=True, only="3-S4")
    config = grid._training(curve, 0, 4, tmp_path).config
    plans = json.loads((tmp_path / "plans" / "3-S4-m4.json").read_text())["clusters"]
    assert config.plan.endswith("3-S4-m4.json") and len(plans) == 2
    assert all(sorted(plan["delta"]) == [1, 1, 1, 1] and plan["m"] == 4 for plan in plans)
    assert check_new_run(config) == 2


def test_table3_compares_the_largest_devices():
    row = {"whole_tebs": 12, "batch": 8, "width": 64}
    rows = [
        row | {"curve": "1", "label": "CollaPipe", "what": "collapipe", "seed": seed, "tebs": 3 + seed}
        | {"measured_mb": 100.0, "modelled_mb": 50.0}
        for seed in (0, 1)
    ]  # fmt: skip
    rows += [
        {**r, "curve": "2", "label": "VanillaFL", "what": "vanilla-fl", "tebs": 12, "measured_mb": 400.0} for r in rows
    ]
    first, second = table3.findings(rows)
    assert "3 to 4 of 12 TEBs" in first.what and "12 of 12" in second.what
    assert "CollaPipe needs 25 % (measured), 100 % (modelled)" in second.ours
    table3.draw(rows)


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


def test_the_theorems_round_averages_as_the_strategy_does(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)
    weights = [torch.randn(5, dtype=torch.float64) for _ in range(3)]
    asked = [Message(RecordDict(), dst_node_id=n + 1, message_type=MessageType.TRAIN) for n in range(3)]
    replies = [
        Message(reply_content({"w": w}, weight=7, loss=0.0, steps=1, wall_s=0.0, report={}), reply_to=message)
        for w, message in zip(weights, asked, strict=True)
    ]
    arrays, _ = averaging_strategy(ServerOptimizerConfig()).aggregate_train(1, replies)
    assert torch.allclose(to_tensors(arrays)["w"], torch.stack(weights).mean(dim=0), rtol=1e-12)


def test_theorem1_refuses_a_problem_that_it_does_not_know(convex):
    curve, _ = convex
    wrong = replace(curve, figure={**curve.figure, "problem": "concave"})
    with pytest.raises(ValueError, match="figure.problem: expected one of convex, transformer, found 'concave'"):
        list(theorem1.run([wrong], None, quiet))


# Sessions and files.


def test_a_session_trains_run_after_run_and_stops_at_the_first_that_fails(tmp_path, monkeypatch):
    """Each run has a configuration and control units of its own, though processes and node state are shared."""
    wanted = training.trainings([replace(curves()[0], seeds=3)], tmp_path / "out")
    for one in wanted:
        one.run_dir.mkdir(parents=True)
        write_config(one.run_dir, one.config)
    session = tmp_path / "session"
    session.mkdir()
    (session / session_app.RUNS).write_text(
        json.dumps([{"run-dir": str(one.run_dir), "resume": False} for one in wanted])
    )
    state, seen = RecordDict(), []
    context = Context(40, 1, {"partition-id": 0}, state, {"run-dir": str(session)})

    def train(config, grid):
        session_run = session_app._of_current_run(context)
        seen.append((session_run.run_id, session_run.run_config["seed"]))
        assert session_run.state is state and session_run.node_config == {"partition-id": 0}
        if config.seed == 1:
            raise RuntimeError("out of memory")
        write_summary(Path(config.run_dir), FINISHED)

    monkeypatch.setattr(actor_start, "start_actors", lambda config, grid: None)
    monkeypatch.setattr(prepared_run, "prepare", lambda config, run_dir: config)
    monkeypatch.setattr(training_run, "train_prepared", train)
    with pytest.raises(RuntimeError, match="seed1: out of memory"):
        session_app.train_runs(None, context)
    assert seen == [(40, 0), (41, 1)]
    assert [(read_summary(one.run_dir) or {}).get("status") for one in wanted] == [FINISHED, FAILED, None]
    assert "seed1: out of memory" in read_summary(session)["error"]


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


def test_means_leave_out_the_first_quarter_of_each_curve_and_seed(tmp_path):
    rows = [
        {"curve": "a", "seed": s, "round": t, "x": 1 / 3 + 10 * s + t, "n": t % 2, "label": "A"}
        for s in (0, 1)
        for t in (1, 2, 3, 4)
    ]
    write_table(mean_rows(rows), tmp_path / "means.csv")
    lines = (tmp_path / "means.csv").read_text().split()
    assert lines == ["curve,seed,rows,x,n", "a,0,3,3.33333,0.333333", "a,1,3,13.3333,0.333333"]
