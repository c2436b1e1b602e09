"""Cut anywhere, or without space for any write, a run goes on from its last committed round, or says why it cannot.

The files are real, and so are writer and reader; training is arithmetic.
"""

import copy

import numpy as np
import pytest
import torch

from client_pipeline import durable
from client_pipeline.families.families import build_parts
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.control_unit import cluster_checkpoint
from client_pipeline.runtime.control_unit.cluster_checkpoint import ClusterCheckpoint
from client_pipeline.runtime.stage.moved_block import MovedBlock
from flower_app.config.run_config import RunConfig
from flower_app.node import kept_setup
from flower_app.runs import run_checkpoints, run_directory
from flower_app.saved_model import load_model, save_model
from flower_app.training.releases import Releases, state_after
from helpers.crash_model import LOSSES, DiskModel, FullDisk, RecordingDisk
from helpers.tiny_models import SMALL_TRANSFORMER
from strategies.aggregation.accountant import PrivacyAccountant, Sent
from strategies.checkpoint import Checkpoint

CONFIG = RunConfig(num_rounds=5)
NOISY = PrivacyConfig(update_clip=1.0, update_noise=1.0, activation_clip=1.0, activation_noise=1.0)
IDENTITY = RunIdentity("a-run", "its-config")
NUM_EXAMPLES = {0: 64, 1: 64}
SAVED = (1, 2, 4)
"""Rounds whose model is the best so far."""
PARTS = build_parts(SMALL_TRANSFORMER, 1).weights()


class Training:
    """Two clusters and their server: the writes of a run in their order, with numbers that tell the round."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.accountant, self.sent = PrivacyAccountant(NOISY, NUM_EXAMPLES), {}
        self.round, self.weights, self.drawn = 0, {"w": torch.zeros(3)}, [0, 0]
        self.committed = 0

    def releases(self):
        return Releases(self.run_dir, self.accountant, self.sent, examples=8, length=4, run=IDENTITY.run)

    def prepare(self):
        for cluster in (0, 1):
            kept_setup.write(self.folder(cluster), {"cluster": cluster}, {"frozen": np.full((2,), float(cluster))})

    def folder(self, cluster):
        return self.run_dir / "clusters" / f"cluster-{cluster}"

    def train(self, last):
        for round_ in range(self.round + 1, last + 1):
            # In round 3 the second cluster rests.
            clusters = [0] if round_ == 3 else [0, 1]
            self.releases().begin_round(round_, clusters)
            for cluster in clusters:
                self.drawn[cluster] += 8 * round_
                states = {"embedding": MovedBlock({"a": torch.full((2,), float(round_))})}
                drawn, seen = self.drawn[cluster], self.sent.setdefault(cluster, Sent())
                cluster_checkpoint.write_checkpoint(
                    self.folder(cluster), ClusterCheckpoint(round_, drawn, states, identity=IDENTITY)
                )
                seen.add((round_, 1), 0, torch.ones(8, 4, dtype=torch.bool))
            self.weights = {"w": 1.5 * self.weights["w"] + round_}
            if round_ in SAVED:
                values = {name: torch.full_like(value, float(round_)) for name, value in PARTS.items()}
                save_model(self.run_dir, SMALL_TRANSFORMER, values, "{}", {"round": round_}, round_)
                run_checkpoints.keep_models(self.run_dir)
            self.accountant.count_round(clusters, [], self.sent)
            run_directory.append_round(self.run_dir, {"round": round_, "loss": 1 / round_})
            state = {"privacy": self.accountant.state()}
            after = Checkpoint(round_, self.weights, {"d": torch.ones(1)}, {}, state, IDENTITY)
            run_checkpoints.commit_round(self.run_dir, after, CONFIG, INPUTS)
            self.round = self.committed = round_


INPUTS = run_checkpoints.input_digests(CONFIG)


def resumed(run_dir):
    """The training that goes on from what a crash has left, read by the code that ``--resume`` runs."""
    found = run_checkpoints.reopened(run_dir, CONFIG)
    training = Training(run_dir)
    training.round = training.committed = found.round
    training.weights = found.weights
    for cluster in (0, 1):
        read = cluster_checkpoint.read_checkpoint(training.folder(cluster), found.round, found.identity)
        training.drawn[cluster] = read.drawn if read else 0
    state = found.state["privacy"]
    training.sent = training.accountant.restore(
        state_after(run_dir, found.round, state, NUM_EXAMPLES, found.identity.run)
    )
    return training


ROUND_BY_FILES = {}


def loaded_round(run_dir):
    """Round of a run's model, which loads. The same files, after a thousand crashes, load as they did."""
    files = tuple((path.name, path.read_bytes()) for path in sorted((run_dir / "model").iterdir()))
    if files not in ROUND_BY_FILES:
        ROUND_BY_FILES[files] = load_model(run_dir).task["round"]
    return ROUND_BY_FILES[files]


def describe(training):
    """Return what must equal the undisturbed run's; the model is that of the newest of its rounds."""
    lines, _ = run_directory.read_rounds(training.run_dir)
    model = training.run_dir / "model"
    assert model.exists() == model.is_symlink()
    saved = loaded_round(training.run_dir) if model.exists() else 0
    return training.round, training.weights["w"].tolist(), list(training.drawn), lines, saved


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The record of a run that nothing disturbs, and what it is after each round."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_dir.mkdir()
    Training(run_dir).prepare()
    begun = DiskModel(run_dir)
    training, after, ends = Training(run_dir), {}, {}
    recorder = durable.disk = RecordingDisk(run_dir)
    try:
        for round_ in range(1, CONFIG.num_rounds + 1):
            training.train(round_)
            after[round_] = describe(training)
            ends[round_] = len(recorder.operations)
    finally:
        durable.disk = durable.Disk()
    return begun, recorder.operations, after, ends, training.accountant


def check_goes_on(run_dir, after, least, where):
    """Hold a crashed run against the undisturbed one; returns the training that goes on, None if it is refused."""
    try:
        training = resumed(run_dir)
    except FileNotFoundError as error:
        assert least == 0 and "no checkpoint; the run ended before its first round was done" in str(error), where
        return None
    assert training.round >= least, where
    assert describe(training) == after[training.round], where
    assert not list(run_dir.rglob(".*.aside-*")), where
    for cluster in (0, 1):
        told, frozen = kept_setup.read(training.folder(cluster))
        assert told["cluster"] == cluster == frozen["frozen"][0], where
    return training


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_prefix_of_a_runs_writes_goes_on(undisturbed, tmp_path, loss):
    begun, operations, after, ends, accountant = undisturbed
    model, final = copy.deepcopy(begun), after[CONFIG.num_rounds]
    refused = 0
    assert len(operations) > 170
    for done in range(len(operations) + 1):
        run_dir = tmp_path / str(done)
        model.write(run_dir, loss)
        committed = max((round_ for round_, end in ends.items() if end <= done), default=0)
        training = check_goes_on(run_dir, after, committed, (loss, done, operations[done - 1][:2]))
        refused += training is None
        if training is not None and done % 23 == 0:
            training.train(CONFIG.num_rounds)
            assert describe(training) == final
            # What the lost rounds may have released is counted, never left out.
            spent, expected = training.accountant.record(), accountant.record()
            for kind in ("updates", "activations"):
                assert spent[kind]["epsilon"] >= expected[kind]["epsilon"]
        if done < len(operations):
            model.apply(operations[done])
    assert 0 < refused < ends[1] + 1


@pytest.mark.slow
def test_a_run_without_space_for_any_one_write_goes_on(undisturbed, tmp_path):
    """A full disk ends the run with its error; when there is space again, it goes on."""
    _, operations, after, _, _ = undisturbed
    writes = sum(operation.kind in FullDisk.WRITES for operation in operations)
    assert writes > 170
    for fails_at in range(1, writes + 1):
        run_dir = tmp_path / str(fails_at)
        run_dir.mkdir()
        training = Training(run_dir)
        training.prepare()
        durable.disk = FullDisk(fails_at)
        try:
            with pytest.raises(OSError, match="No space left on device"):
                training.train(CONFIG.num_rounds)
        finally:
            durable.disk = durable.Disk()
        again = check_goes_on(run_dir, after, training.committed, fails_at)
        if again is not None and fails_at % 29 == 0:
            again.train(CONFIG.num_rounds)
            assert describe(again) == after[CONFIG.num_rounds]
