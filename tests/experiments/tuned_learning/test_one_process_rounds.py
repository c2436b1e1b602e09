"""Rounds in one process are those of a run: the same losses and scores, for every way to join."""

from dataclasses import replace

import pytest
import torch

from experiments.base.training import Training, placed, train_all
from experiments.curves import load_curves
from experiments.tuned_learning.one_process_rounds import (
    FedAdamStep,
    OneProcessRounds,
    TrainingDiverged,
    joining_of,
    server_step_of,
)
from flower_app.runs.run_directory import read_rounds, read_summary
from flower_app.training.network import training_scenario
from strategies.aggregation.config import ServerOptimizerConfig

FED_ADAM = ServerOptimizerConfig(name="fedadam", lr=0.02)
WAYS = {
    "step": {"strategy": "collapipe"},
    "clipped": {"strategy": "collapipe", "clip_norm": 0.5},
    "step with FedAdam": {"strategy": "collapipe", "server_optimizer": FED_ADAM},
    "round": {"strategy": "collapipe", "decoder_sync": "round"},
    "vanilla-fl": {"strategy": "vanilla-fl"},
    "FedAdam": {"strategy": "FedAdam", "strategy_options": '{"eta": 0.02}'},
    "pipeline": {"strategy": "pipeline"},
}


def small(panel, way):
    """A run of two clusters, three rounds of two steps, without dropout: its masks go by micro-batches."""
    [curve] = load_curves("fig6-tuned", smoke=True, only=f"{panel}-1")
    changes = dict(WAYS[way])
    optimizer = replace(curve.config.optimizer, clip_norm=changes.pop("clip_norm", 0.0), warmup_steps=0)
    model = replace(curve.config.model, dropout=0.0)
    changes |= {"num_rounds": 3, "local_steps": 2, "evaluate_every": 1, "model": model, "optimizer": optimizer}
    return curve, replace(curve.config, **changes)


def made(config):
    return OneProcessRounds(config, training_scenario(config).data_shares)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_losses_and_scores_are_those_of_a_run(tmp_path):
    runs = {}
    for panel, way in [("classes", way) for way in WAYS] + [("translation", "step"), ("translation", "vanilla-fl")]:
        curve, config = small(panel, way)
        name = f"{panel}-{way}".replace(" ", "-")
        runs[panel, way] = Training(curve=curve, seed=0, config=placed(config, tmp_path, name))
    train_all(list(runs.values()), tmp_path, lambda _: None)
    last = {}
    for (panel, way), training in runs.items():
        rounds, lines = made(training.config), read_rounds(training.run_dir)[0]
        assert len(lines) == 3
        for line in lines:
            loss = rounds.train_round(line["round"], range(2))
            assert loss == pytest.approx(line["train_loss"], rel=1e-4), (panel, way, line["round"])
            metrics = rounds.score()
            assert metrics["loss"] == pytest.approx(line["metrics"]["loss"], rel=1e-4), (panel, way)
        assert rounds.score("test")["loss"] == pytest.approx(
            read_summary(training.run_dir)["metrics"]["loss"], rel=1e-4
        )
        last[panel, way] = metrics["loss"]
    # What is averaged when makes a difference far beyond that of rounding; where the decoder is trained makes none.
    losses = {way: loss for (panel, way), loss in last.items() if panel == "classes"}
    assert losses.pop("round") == pytest.approx(losses["vanilla-fl"], rel=1e-5)
    ordered = sorted(loss for way, loss in losses.items() if way != "clipped")
    assert min(b / a - 1 for a, b in zip(ordered, ordered[1:], strict=False)) > 3e-4


@pytest.mark.parametrize(("way", "joining"), [("step", "step"), ("round", "round"), ("vanilla-fl", "round")])
def test_how_clusters_join_goes_by_strategy_and_decoder_sync(way, joining):
    assert joining_of(small("classes", way)[1]) == joining
    assert server_step_of(small("classes", way)[1]) is None


def test_clusters_that_never_join_keep_what_they_have_and_others_go_on():
    config = small("classes", "pipeline")[1]
    rounds = made(config)
    assert joining_of(config) == "never"
    before = rounds.score(models=[1])
    rounds.train_round(1, [0])
    assert rounds.score(models=[1]) == before and rounds.score(models=[0]) != before
    both = rounds.score()
    assert both["loss"] == pytest.approx((before["loss"] + rounds.score(models=[0])["loss"]) / 2)


def test_fedadams_first_step_is_about_its_rate_in_every_weight():
    weights, mean = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    stepped = FedAdamStep(replace(FED_ADAM, tau=1e-9)).take(1, weights, mean)
    # Round 1 is corrected as Adam's second step is: Flower counts from 0 and adds one.
    rate = 0.02 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2) * 0.1 / 0.01**0.5
    assert stepped.tolist() == pytest.approx([rate, -rate, 0.0], rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run():
    config = small("classes", "vanilla-fl")[1]
    rounds = made(replace(config, optimizer=replace(config.optimizer, lr=1e30, warmup_steps=0)))
    with pytest.raises(TrainingDiverged, match=r"cluster \d: the loss is (nan|inf)"):
        for number in (1, 2):
            rounds.train_round(number, [0, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server_optimizer": ServerOptimizerConfig(name="fedyogi")}, "expected none or fedadam in one process"),
        ({"strategy": "FedAdam", "strategy_options": '{"fraction_train": 1}'}, "found 'fraction_train'"),
    ],
)
def test_what_one_process_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        server_step_of(replace(small("classes", "step")[1], **changes))
