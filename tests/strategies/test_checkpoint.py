"""Checkpoints: written in one step, read back exactly, refused where they cannot be trusted."""

import json

import pytest
import torch
from torch import nn

from client_pipeline.run_identity import sealed
from client_pipeline.runtime.control_unit import cluster_checkpoint
from client_pipeline.runtime.control_unit.cluster_checkpoint import ClusterCheckpoint
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_inputs import input_digests
from strategies.checkpoint import Checkpoint, commit, last_committed
from strategies.decoder.trainer import DecoderTrainer
from strategies.registry import stock_strategies
from strategies.resumed import check_resumable, check_unchanged


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_control_unit_keeps_four_rounds_and_reads_the_newest_that_was_committed(tmp_path):
    for round_ in (3, 6, 7, 9, 12):
        states = {
            "block.0": MovedBlock({"a/w": torch.full((2,), float(round_))}),
            "embedding": MovedBlock(optimizer={"w/step": torch.tensor(3.0)}),
        }
        cluster_checkpoint.write_checkpoint(
            tmp_path, ClusterCheckpoint(round_, 10 * round_, states, {"a": torch.ones(1)})
        )
    # Of the three rounds that the server keeps, and of one that it may not commit.
    assert names(tmp_path) == [f"round-0000{round_}.safetensors" for round_ in ("06", "07", "09", "12")]
    # The server was killed before it committed round 12.
    found = cluster_checkpoint.read_checkpoint(tmp_path, committed=11)
    assert (found.round, found.drawn) == (9, 90)
    assert found.states.keys() == {"block.0", "embedding"}
    assert found.states["block.0"].weights["a/w"].tolist() == [9.0, 9.0] and not found.states["block.0"].optimizer
    assert found.states["embedding"].optimizer["w/step"].shape == () and not found.states["embedding"].weights
    assert found.residual["a"].tolist() == [1.0]
    assert names(tmp_path) == [f"round-0000{round_}.safetensors" for round_ in ("06", "07", "09")]
    assert cluster_checkpoint.read_checkpoint(tmp_path / "none", committed=4) is None


def checkpoint_of(round_, state=None):
    weights = {"head.w": torch.full((3,), float(round_))}
    tensors = ({"decoder/w/step": torch.tensor(2.0)}, {"m_t/w": torch.tensor([0.25], dtype=torch.float64)})
    return Checkpoint(round_, weights, *tensors, state or {"queues": [0.1, 1 / 3]})


def test_the_server_keeps_the_last_three_rounds_and_reads_the_newest(tmp_path):
    for round_ in (1, 2, 3, 4):
        commit(tmp_path, checkpoint_of(round_))
    assert names(tmp_path / "checkpoint") == ["round-000002", "round-000003", "round-000004"]
    found = last_committed(tmp_path)
    assert found.round == 4 and found.weights["head.w"].tolist() == [4.0] * 3
    assert found.state["queues"] == [0.1, 1 / 3] and found.decoder["decoder/w/step"] == 2


def test_of_two_committed_rounds_the_newer_is_read(tmp_path):
    """A crash may come before the older one is dropped; the number decides, not name or time."""
    for round_ in (1_000_001, 999_999):
        commit(tmp_path, checkpoint_of(round_))
    assert names(tmp_path / "checkpoint") == ["round-1000001", "round-999999"]
    assert last_committed(tmp_path).round == 1_000_001


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, flipped, lambda path: path.unlink()], ids=["torn", "flipped", "missing"])
@pytest.mark.parametrize("file", ["weights.safetensors", "decoder.safetensors", "server.safetensors", "state.json"])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_read(tmp_path, caplog, file, damage):
    for round_ in (1, 2):
        commit(tmp_path, checkpoint_of(round_))
    damage(tmp_path / "checkpoint" / "round-000002" / file)
    assert last_committed(tmp_path).round == 1
    assert "round-000002: expected a checkpoint" in caplog.text and "goes on from round 1 instead" in caplog.text
    damage(tmp_path / "checkpoint" / "round-000001" / file)
    with pytest.raises(ValueError, match="round-000002: .*round-000001: .*no checkpoint is whole: start the run anew"):
        last_committed(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_not_passed_over(tmp_path):
    for round_ in (1, 2):
        commit(tmp_path, checkpoint_of(round_))
    path = tmp_path / "checkpoint" / "round-000002" / "state.json"
    refused = []
    # As versions before wrote it, and as a later one may.
    for text in (json.dumps({"round": 2, "rounds-size": 0}), sealed({"format": "collapipe-checkpoint/9", "round": 2})):
        path.write_text(text)
        try:
            refused.append(f"no refusal: {last_committed(tmp_path).round}")
        except ValueError as error:
            refused.append(str(error))
    for message, found in zip(refused, ("none, as before", "collapipe-checkpoint/9"), strict=True):
        assert f"state.json: format: expected collapipe-checkpoint/2, found {found}" in message
        assert "resume with the version that wrote it, or start a new run" in message


@pytest.mark.parametrize("config", [OptimizerConfig(), OptimizerConfig(name="sgd", momentum=0.9)])
def test_an_optimizer_goes_on_from_its_named_state(config):
    def take(optimizer, parameters, steps):
        for step in steps:
            for i, p in enumerate(parameters.values()):
                p.grad = torch.full_like(p, 0.1 * step + i)
            optimizer.apply(step)

    straight = {"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2))}
    whole = PartOptimizer(straight, config)
    take(whole, straight, [1, 2])
    weights = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    saved = {name: value.clone() for name, value in whole.state().items()}
    take(whole, straight, [3, 4])
    again = PartOptimizer(weights, config)
    again.load_state(saved)
    take(again, weights, [3, 4])
    assert all(torch.equal(weights[name], straight[name]) for name in weights)
    with pytest.raises(ValueError, match="'other/step' belongs to no parameter here"):
        again.load_state({"other/step": torch.tensor(1.0)})


def test_the_decoder_goes_on_with_its_own_state_and_that_of_each_copy():
    def trainer():
        torch.manual_seed(0)
        return DecoderTrainer(HeadTrainer(nn.Linear(2, 2), OptimizerConfig(), unit=1), "round")

    ours = trainer()
    ours.copies.by_cluster[3] = HeadTrainer(nn.Linear(2, 2), OptimizerConfig(), unit=1)
    for own in (ours.copies.shared, ours.copies.by_cluster[3]):
        own.apply([Contribution(cluster=0, weight=1.0)], 1)
    state = ours.state()
    assert {key.split("/")[0] for key in state} == {"decoder", "copy-3"}
    theirs = trainer()
    theirs.restore(state, "round")
    assert theirs.decoder_sync == "round" and theirs.state().keys() == state.keys()
    assert all(torch.equal(theirs.state()[key], state[key]) for key in state)


def test_strategies_whose_memory_no_checkpoint_has_cannot_go_on():
    for name in ("FedAvg", "FedMedian", "Krum", "FedAdam", "FedAvgM"):
        assert name in stock_strategies()
        check_resumable(name, {})
    assert "QFedAvg" in stock_strategies()
    with pytest.raises(ValueError, match="resume: QFedAvg keeps state of its own from round to round"):
        check_resumable("QFedAvg", {})
    with pytest.raises(ValueError, match="fraction_train = 0.5 draws its clients without a seed"):
        check_resumable("FedAvg", {"fraction_train": 0.5})


def committed_run(run_dir, **flat):
    """A run that was stopped after its first round."""
    from flower_app.config.run_config import RunConfig
    from flower_app.runs import run_checkpoints
    from flower_app.runs.run_directory import append_round, write_config

    run_dir.mkdir()
    config = RunConfig.from_flat({"num-clusters": 3, "decoder-sync": "step", **flat})
    write_config(run_dir, config)
    append_round(run_dir, {"round": 1})
    inputs = run_checkpoints.input_digests(config)
    run_checkpoints.commit_round(run_dir, Checkpoint(1, {"w": torch.ones(1)}, {}, {}, {}), config, inputs)
    return config


def test_a_run_does_not_go_on_under_another_configuration(tmp_path):
    """A changed config.toml, or flwr run with other values, used to go on without a word."""
    from flower_app.config.run_config import RunConfig
    from flower_app.launch.single_run import continued_run
    from flower_app.runs.run_directory import write_config

    run_dir = tmp_path / "run"
    began = committed_run(run_dir, **{"run-dir": "/elsewhere"})
    for change in (
        {"optimizer.lr": 0.1},
        {"policy": "uniform"},
        {"num-rounds": began.num_rounds - 1},
        {"model.width": 32},
    ):
        write_config(run_dir, RunConfig.from_flat(began.to_flat() | change))
        [(key, value)] = change.items()
        with pytest.raises(ValueError, match=rf"the configuration has changed: {key} \(it was .*, is {value!r}\)"):
            continued_run(str(run_dir))
    free = {"runtime.timeout": 9.0, "decoder.step-timeout": 5.0, "tensorboard": True}
    write_config(run_dir, RunConfig.from_flat(began.to_flat() | free))
    found, config = continued_run(str(run_dir))
    assert found == run_dir and config.resume and config.runtime.timeout == 9.0 and config.run_dir == str(run_dir)


def test_a_run_of_another_release_names_it_and_the_remedy(tmp_path):
    began = committed_run(tmp_path / "run").to_flat()
    for old_values, key in (
        ({k: v for k, v in began.items() if k != "data.max-length"}, "data.max-length"),
        (began | {"planner.gone": 1}, "planner.gone"),
    ):
        with pytest.raises(ValueError, match=rf"another release of CollaPipe began this run: {key} .* model.from"):
            check_unchanged(old_values, began, ())
    check_unchanged(began, began, ())


@pytest.mark.parametrize("pattern", ["train-*.csv", "train-{cluster}-part*.csv"])
def test_a_run_does_not_go_on_with_another_shard(tmp_path, pattern):
    files = [tmp_path / pattern.replace("{cluster}", str(i)).replace("*", str(i)) for i in (0, 1)]
    for file in files:
        file.write_text("text,label\na,b\n")
    partition = {"data.partition": "files"} if "{cluster}" in pattern else {}
    config = RunConfig.from_flat(
        {"data.source": "files", "data.path": str(tmp_path), "data.train-source": pattern, "data.test-source": "t.csv"}
        | partition
    )
    before = input_digests(config)
    files[1].write_text("text,label\na,c\n")
    assert before != input_digests(config)
    files[1].unlink()
    assert before != input_digests(config)


def test_a_run_of_a_stateful_strategy_is_not_resumed(tmp_path):
    from flower_app.config.run_config import RunConfig
    from flower_app.launch.single_run import continued_run
    from flower_app.runs.run_directory import write_config

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(run_dir, RunConfig.from_flat({"strategy": "QFedAvg", "run-dir": str(run_dir)}))
    commit(run_dir, Checkpoint(1, {"w": torch.ones(1)}, {}, {}, {"rounds-size": 0}))
    with pytest.raises(ValueError, match="resume: QFedAvg keeps state of its own"):
        continued_run(str(run_dir))
    (run_dir / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 4}))
    with pytest.raises(ValueError, match="has finished its 4 rounds"):
        continued_run(str(run_dir))
