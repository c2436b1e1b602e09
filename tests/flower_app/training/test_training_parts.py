"""The parts of a training, each alone: what is prepared, and what happens before and after a round. No grid, no Ray."""

import json
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.plan import uniform_plan
from flower_app.config.run_config import RunConfig
from flower_app.launch.preflight import check_run
from flower_app.runs import run_checkpoints
from flower_app.runs.run_directory import read_rounds
from flower_app.training import round_closer
from flower_app.training.prepared_run import prepare
from flower_app.training.round_closer import PatienceEnded, RoundClock, RoundCloser, RoundOpener, RunStanding
from flower_app.training.training_run import decoder_service
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.grid.update_receipts import UpdateReceipts
from strategies.records import to_arrays, to_tensors

FLAT = {
    "num-rounds": 4,
    "evaluate-every": 1,
    "num-clusters": 2,
    "strategy": "FedAvg",
    "data.num-examples": 40,
    "data.evaluation-examples": 4,
    "data.vocab-size": 300,
    "model.width": 16,
    "model.num-heads": 2,
    "model.feed-forward": 32,
    "model.encoder-layers": 2,
    "model.decoder-layers": 1,
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
    """Rounds in which nobody has trained."""

    def __init__(self):
        self.receipts, self.last_reports = UpdateReceipts([0, 1]), []

    def take_round(self):
        return {"clusters": [], "failed": [], "faults": [], "train_loss": 1.5}


def closer_of(run, models, **more):
    standing, clock = RunStanding(run), RoundClock(run)
    faults = SimpleNamespace(records=lambda server_round: [])
    accountant = PrivacyAccountant(run.config.privacy, {0: 20, 1: 20})
    closer = RoundCloser(
        run, standing, clock, models, exchanges=Exchanges(), strategy=None, accountant=accountant, faults=faults, **more
    )
    return closer, standing


def test_a_prepared_run_is_complete_and_stays_as_it_is(run):
    assert (run.num_clusters, run.completed, run.wall_before_s, run.frozen_digest) == (2, 0, 0.0, "")
    assert run.scenario.num_clusters == 2 and run.planner is None
    assert run.prepared_task.spec == run.parts.spec
    with pytest.raises(FrozenInstanceError):
        run.num_rounds = 3


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


def test_the_best_model_is_kept_and_patience_ends_the_run_after_its_commit(fresh, unaccounted):
    selection = replace(fresh.config.selection, load_best_at_end=True, patience=2)
    fresh = replace(fresh, config=replace(fresh.config, selection=selection))
    models = Models(3.0, 4.0, 5.0)
    closer, standing = closer_of(fresh, models)
    closer.close(1, to_arrays(WEIGHTS))
    closer.close(2, to_arrays(WEIGHTS))
    with pytest.raises(PatienceEnded):
        closer.close(3, to_arrays(WEIGHTS))
    assert models.saved == [1] and standing.last_round == 3 and standing.selection.best_round == 1
    assert run_checkpoints.newest(fresh.run_dir, fresh.config).round == 3


def test_a_continued_run_stands_where_its_checkpoint_says(fresh, unaccounted):
    closer, _ = closer_of(fresh, Models(3.0))
    closer.close(1, to_arrays(WEIGHTS))
    resumed = replace(fresh, resumed=run_checkpoints.newest(fresh.run_dir, fresh.config))
    standing = RunStanding(resumed)
    assert (standing.last_round, standing.selection.best, standing.privacy) == (1, 3.0, None)
    assert resumed.wall_before_s > 0 and RoundClock(resumed).wall_s > resumed.wall_before_s
    closer, standing = closer_of(resumed, Models(2.0))
    closer.close(1, to_arrays(WEIGHTS))
    assert standing.last_round == 2 and [line["round"] for line in read_rounds(fresh.run_dir)[0]] == [1, 2]


def test_a_line_goes_to_the_board_too_and_a_round_without_evaluation_has_no_metrics(fresh, unaccounted):
    fresh = replace(fresh, config=replace(fresh.config, evaluate_every=0))
    board = []
    closer, _ = closer_of(fresh, Models(), board=SimpleNamespace(write=board.append))
    assert closer.close(1, to_arrays(WEIGHTS)) is None
    assert [line["metrics"] for line in board] == [{}]


def test_the_plans_of_a_round_are_written_before_it_begins(fresh, monkeypatch):
    clock, begun = RoundClock(fresh), []
    monkeypatch.setattr(round_closer.time, "perf_counter", lambda: 5.0 + 2.0 * len(begun))
    clock.begin_first_round()
    faults = SimpleNamespace(begin_round=lambda server_round, usual_s: begun.append((server_round, usual_s)))
    opener = RoundOpener(fresh, faults, clock)
    plan = uniform_plan(speed=[1.0, 1.0], memory=[1e9, 1e9], block_memory=1.0, num_blocks=2, batch_size=4)
    opener.open(1, [plan])
    assert json.loads((fresh.run_dir / "plans" / "round-0001.json").read_text())["clusters"] == [plan.to_dict()]
    assert clock.next_round()["round_s"] == 2.0
    opener.open(2, [plan])
    assert begun == [(1, 0.0), (2, 2.0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_server_without_the_accelerator_of_its_decoder_is_refused_before_anything_starts(tmp_path):
    config = RunConfig.from_flat({**FLAT, "strategy": "collapipe", "runtime.accelerator": "cuda"})
    with pytest.raises(ValueError, match="runtime.accelerator: expected cuda, found the processor alone"):
        check_run(config)
    # The server app asks again, as soon as it makes the decoder's service: before it tells any node of the run.
    prepared = prepare(replace(config, runs_dir=str(tmp_path)), tmp_path)
    with pytest.raises(ValueError, match="runtime.accelerator: expected cuda"):
        decoder_service(prepared)


def test_data_shares_go_with_the_even_split_alone():
    config = RunConfig.from_flat({"scenario": "unequal", "data.partition": "dirichlet"})
    with pytest.raises(ValueError, match=r"data\.partition = dirichlet: the scenario gives its .* data-share 2, 1"):
        check_run(config)
