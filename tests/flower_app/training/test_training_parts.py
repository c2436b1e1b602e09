"""The parts of a training, each alone: what is prepared, and what happens before and after a round. No grid, no Ray."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.link.privacy_config import PrivacyConfig
from flower_app.config.run_config import RunConfig
from flower_app.launch.preflight import check_run
from flower_app.runs import run_checkpoints
from flower_app.runs.run_directory import read_rounds
from flower_app.training import round_closer
from flower_app.training.prepared_run import prepare
from flower_app.training.round_closer import RoundClock, RoundCloser, RunStanding
from flower_app.training.training_run import decoder_service
from helpers.clocks import Clock
from helpers.saved_runs import TWO_CLUSTERS
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.grid.update_receipts import UpdateReceipts
from strategies.records import to_arrays, to_tensors

FLAT = TWO_CLUSTERS | {
    "num-rounds": 4,
    "evaluate-every": 1,
    "strategy": "FedAvg",
}
WEIGHTS = {"w": torch.ones(2)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    threads = torch.get_num_threads()
    run_dir = tmp_path_factory.mktemp("run")
    yield prepare(RunConfig.from_flat(FLAT | {"run-dir": str(run_dir)}), run_dir)
    torch.set_num_threads(threads)


@pytest.fixture
def fresh(run, tmp_path):
    """The prepared run in a directory of its own."""
    return replace(run, run_dir=tmp_path)


class Models:
    """Finds one loss after the other."""

    def __init__(self, *losses):
        self.losses, self.saved = list(losses), []

    def take(self, arrays):
        pass

    def forget(self):
        pass

    def score(self, split):
        return {"loss": self.losses.pop(0), "bleu": 0.0}, ""

    def save(self, run_dir, task, round_):
        self.saved.append(round_)

    def whole(self, arrays):
        return to_tensors(arrays)


class Exchanges:
    """Rounds in which nobody has trained, and some clusters may have failed."""

    def __init__(self, failed):
        self.receipts, self.last_reports = UpdateReceipts([0, 1]), []
        self.failed = [{"cluster": cluster} for cluster in failed]

    def take_round(self):
        return {"clusters": [], "failed": self.failed, "faults": [], "train_loss": 1.5}


def closer_of(run, models, failed=(), **more):
    standing, clock = RunStanding(run), RoundClock(run)
    faults = SimpleNamespace(records=lambda server_round: [])
    accountant = PrivacyAccountant(run.config.privacy, {0: 20, 1: 20})
    closer = RoundCloser(
        run,
        standing,
        clock,
        models,
        exchanges=Exchanges(failed),
        strategy=None,
        accountant=accountant,
        faults=faults,
        **more,
    )
    return closer, standing


def test_a_mistake_is_found_before_any_node_is_asked(tmp_path):
    config = RunConfig.from_flat(FLAT | {"selection.metric": "accuracy", "run-dir": str(tmp_path)})
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ValueError, match="selection.metric: expected one of"):
            prepare(config, tmp_path)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def unaccounted(monkeypatch):
    """Leave out the system model's costs, which need reports."""
    monkeypatch.setattr(RoundCloser, "_planned_and_spent", lambda self, server_round: {})


def test_a_round_leaves_its_line_its_timeline_and_its_checkpoint(fresh, unaccounted):
    closer, standing = closer_of(fresh, Models(3.0, 2.0), setup_bytes=7)
    assert closer.close(0, to_arrays(WEIGHTS)) is None and read_rounds(fresh.run_dir)[0] == []
    assert dict(closer.close(1, to_arrays(WEIGHTS)))["loss"] == 3.0
    closer.close(2, to_arrays(WEIGHTS))
    lines, _ = read_rounds(fresh.run_dir)
    assert [line["round"] for line in lines] == [1, 2] == list(range(1, standing.last_round + 1))
    # What went down before round 1 is counted once.
    assert [line["setup_bytes"] for line in lines] == [7, 0]
    assert lines[0]["wall_s"] >= lines[0]["round_s"] > 0
    assert json.loads((fresh.run_dir / "timeline.json").read_text()) == {"round": 2, "clusters": []}
    kept = run_checkpoints.newest(fresh.run_dir, fresh.config)
    assert kept.round == 2 and kept.state["selection"]["best-round"] == 2


NOISE = PrivacyConfig(update_clip=1.0, update_noise=1.0)


def test_a_run_that_goes_on_has_the_privacy_spent_and_the_time_of_its_newest_checkpoint(
    fresh, unaccounted, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(round_closer, "time", clock)
    config = replace(fresh.config, privacy=NOISE, checkpoint_every=2, evaluate_every=0)
    began = replace(fresh, config=config, started=clock.now)
    closer, standing = closer_of(began, Models(), failed=[0, 1])
    assert standing.privacy is None
    for number in (1, 2, 3):
        clock.now += 10.0 * number
        closer.close(number, to_arrays(WEIGHTS))
    lines, _ = read_rounds(fresh.run_dir)
    assert [line["privacy"]["updates"]["releases"] for line in lines] == [1, 2, 3]
    assert standing.privacy == lines[2]["privacy"]
    # The process dies here: the third round, and its time, are lost.
    clock.now += 1000.0
    kept = run_checkpoints.newest(fresh.run_dir, config)
    resumed = replace(began, resumed=kept, started=clock.now)
    standing, rounds = RunStanding(resumed), RoundClock(resumed)
    assert (standing.last_round, standing.privacy) == (2, lines[1]["privacy"])
    assert rounds.wall_s == 30.0
    clock.now += 4.0
    rounds.begin_first_round()
    clock.now += 5.0
    assert rounds.next_round() == {"round_s": 5.0, "wall_s": 39.0} and rounds.round_s == 5.0
    clock.now += 7.0
    assert rounds.next_round() == {"round_s": 7.0, "wall_s": 46.0} and rounds.wall_s == 46.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_server_without_the_accelerator_of_its_decoder_is_refused_before_anything_starts(tmp_path):
    config = RunConfig.from_flat({**FLAT, "strategy": "collapipe", "runtime.accelerator": "cuda"})
    with pytest.raises(ValueError, match="runtime.accelerator: expected cuda, found the processor alone"):
        check_run(config)
    # The server app asks again, as soon as it makes the decoder's service: before it tells any node of the run.
    prepared = prepare(replace(config, runs_dir=str(tmp_path)), tmp_path)
    with pytest.raises(ValueError, match="runtime.accelerator: expected cuda"):
        decoder_service(prepared)
