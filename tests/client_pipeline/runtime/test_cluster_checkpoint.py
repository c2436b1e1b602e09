"""A control unit's files: what is kept, what is dropped, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.control_unit.cluster_checkpoint import (
    CLUSTER_CHECKPOINT_FORMAT,
    ClusterCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from client_pipeline.runtime.stage.moved_block import MovedBlock

OURS = RunIdentity("run-a", "config-a")


def checkpoint(round_, value=0.0, identity=OURS, **more):
    """Weights that are not contiguous, and an optimizer's state of other types."""
    weights = {"w": torch.full((3, 2), value).T, "b": torch.tensor([value])}
    optimizer = {"w/exp_avg": torch.full((2, 3), -value, dtype=torch.float64), "w/step": torch.tensor(float(round_))}
    states = {"embedding": MovedBlock(weights, optimizer), "block.3": MovedBlock({"c": torch.ones(2)}, {})}
    return ClusterCheckpoint(round_, 100 + round_, states, identity=identity, **{"data": "feed", **more})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def file_of(round_):
    return f"round-{round_:06d}.safetensors"


def read(folder, committed, identity=OURS, data="feed"):
    return read_checkpoint(folder, committed, identity, data)


def assert_same(found, expected):
    plain = ("round", "drawn", "pending_round", "identity", "data")
    assert [getattr(found, name) for name in plain] == [getattr(expected, name) for name in plain]
    assert found.states.keys() == expected.states.keys()
    pairs = [(found.residual, expected.residual), (found.pending, expected.pending)]
    for name, state in expected.states.items():
        pairs += [(found.states[name].weights, state.weights), (found.states[name].optimizer, state.optimizer)]
    for tensors, others in pairs:
        assert tensors.keys() == others.keys()
        for name, value in others.items():
            assert tensors[name].dtype == value.dtype and torch.equal(tensors[name], value), name


def test_all_of_a_control_unit_comes_back(tmp_path):
    residual, pending = {"x": torch.arange(3.0)}, {"x": torch.arange(3.0) - 1, "y/z": torch.ones(1)}
    written = checkpoint(7, 0.5, residual=residual, pending=pending, pending_round=6)
    path = write_checkpoint(tmp_path / "a" / "b", written)
    assert path == tmp_path / "a" / "b" / file_of(7)
    assert_same(read(path.parent, 7), written)


def test_a_run_goes_on_from_the_newest_round_that_was_committed_and_drops_those_that_were_not(tmp_path):
    for round_ in (1, 2, 3, 4):
        write_checkpoint(tmp_path, checkpoint(round_, float(round_)))
    assert_same(read(tmp_path, 3), checkpoint(3, 3.0))
    assert names(tmp_path) == [file_of(round_) for round_ in (1, 2, 3)]


def test_a_cluster_that_missed_the_last_rounds_goes_on_from_its_own_last_one(tmp_path):
    write_checkpoint(tmp_path, checkpoint(2))
    assert read(tmp_path, 9).round == 2 and read(tmp_path, 9).pending_round == 0
    assert read(tmp_path, 1) is None
    assert names(tmp_path) == []


def test_files_of_another_run_go_and_older_ones_of_this_run_count(tmp_path):
    write_checkpoint(tmp_path, checkpoint(1, 1.0))
    write_checkpoint(tmp_path, checkpoint(2))
    write_checkpoint(tmp_path, checkpoint(2, identity=RunIdentity("run-b", "config-a")))
    write_checkpoint(tmp_path, checkpoint(3, identity=RunIdentity("run-b", "config-b")))
    assert_same(read(tmp_path, 3), checkpoint(1, 1.0))
    assert names(tmp_path) == [file_of(1)]


@pytest.mark.parametrize(
    ("identity", "data", "message"),
    [
        (
            RunIdentity("run-a", "c" * 64),
            "feed",
            "configuration: .*SHA-256 c{12}\\), found another .config-a",
        ),
        (OURS, "d" * 64, "data: .*SHA-256 d{12}\\), found another .feed"),
        (OURS, "", "data: .*SHA-256 none\\), found another .feed"),
    ],
)
def test_another_configuration_or_other_data_is_refused(tmp_path, identity, data, message):
    write_checkpoint(tmp_path, checkpoint(1))
    with pytest.raises(ValueError, match=message):
        read(tmp_path, 1, identity, data)
    assert names(tmp_path) == [file_of(1)]


def rewrite(path, tensors=None, **changes):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        head = json.loads(file.metadata()["collapipe"])
    save_file(tensors or load_file(path), path, metadata={"collapipe": json.dumps(head | changes)})


def test_a_tensor_that_has_changed_on_the_disk_is_refused_and_not_passed_over(tmp_path):
    write_checkpoint(tmp_path, checkpoint(1))
    path = write_checkpoint(tmp_path, checkpoint(2, 0.5))
    for change in (
        lambda tensors: tensors["embedding/weight/b"].add_(1e-6),
        lambda tensors: tensors.update({"embedding/weight/b": torch.tensor([[0.5]])}),
        lambda tensors: tensors.update({"embedding/weight/other": tensors.pop("embedding/weight/b")}),
        lambda tensors: tensors.update({"embedding/weight/b": torch.tensor([0.5]).view(torch.int32)}),
    ):
        write_checkpoint(tmp_path, checkpoint(2, 0.5))
        tensors = load_file(path)
        change(tensors)
        rewrite(path, tensors)
        with pytest.raises(ValueError, match=r"round-000002\.safetensors: .*SHA-256 of the tensors: .*restore"):
            read(tmp_path, 2)


def test_a_torn_file_and_one_of_another_format_are_named(tmp_path):
    path = write_checkpoint(tmp_path, checkpoint(1))
    rewrite(path, format="collapipe-cluster/1")
    with pytest.raises(ValueError, match=f"format: expected {CLUSTER_CHECKPOINT_FORMAT}, found collapipe-cluster/1"):
        read(tmp_path, 1)
    save_file({}, path)
    with pytest.raises(ValueError, match=r"round-000001\.safetensors: expected a control unit's checkpoint"):
        read(tmp_path, 1)
    path.write_bytes(b"\x01" * 40)
    with pytest.raises(ValueError, match=r"round-000001\.safetensors: expected a control unit's checkpoint"):
        read(tmp_path, 1)
