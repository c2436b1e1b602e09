"""Micro-batches are as equal as possible, and dropout depends on what is computed, not on who computes it."""

import itertools
import threading

import pytest
import torch

from client_pipeline.partition.micro_batches import EMBEDDING_UNIT, StepId, split_batch
from client_pipeline.partition.plan import micro_batch_sizes


@pytest.mark.parametrize("batch_size", range(1, 14))
def test_sizes_are_as_equal_as_possible_and_larger_ones_come_first(batch_size):
    for m in range(1, batch_size + 1):
        sizes = micro_batch_sizes(batch_size, m)
        assert (len(sizes), sum(sizes)) == (m, batch_size)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1 and sizes[-1] >= 1


def test_the_papers_own_optimum_is_uneven():
    assert micro_batch_sizes(64, 14) == [5] * 8 + [4] * 6
    assert micro_batch_sizes(64, 9) == [8] + [7] * 8


@pytest.mark.parametrize("m", [0, -1, 5])
def test_sizes_that_do_not_fit_the_batch_are_refused(m):
    with pytest.raises(ValueError, match=rf"m = {m} micro-batches do not fit a batch of b = 4 .* 1 <= m <= 4: change"):
        micro_batch_sizes(4, m)


def test_a_split_batch_joins_again():
    batch = {
        "input_ids": torch.arange(21).reshape(7, 3),
        "attention_mask": torch.ones(7, 3, dtype=torch.bool),
        "labels": torch.arange(7),
    }
    pieces = split_batch(batch, 3)
    assert [len(piece["labels"]) for piece in pieces] == [3, 2, 2]
    for name, tensor in batch.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), tensor)


def test_dropout_seeds_differ_for_everything_that_names_a_unit_of_work():
    seeds = [
        StepId(seed=seed, round=number, step=step, cluster=cluster).dropout_seed(unit, micro_batch)
        for seed, number, step, cluster, unit, micro_batch in itertools.product(
            (0, 1), (1, 2, 11), (1, 2, 11), (0, 1), (EMBEDDING_UNIT, 0, 1, 11), (0, 1, 11)
        )
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_dropout_seeds_are_the_same_in_every_process_and_version():
    # Python's own hash() would differ from process to process: a literal value holds this down.
    assert StepId(seed=1, round=2, step=3, cluster=4).dropout_seed(5, 6) == 3159214728103084106


def test_units_in_several_threads_do_not_disturb_each_others_dropout():
    step = StepId(seed=7, round=1, step=1, cluster=0)

    def draw(unit):
        with step.dropout(unit, 0):
            return [torch.rand(100) for _ in range(20)]

    expected = {unit: draw(unit) for unit in range(4)}
    found = {}
    threads = [threading.Thread(target=lambda u=unit: found.update({u: draw(u)})) for unit in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for unit, tensors in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[unit], strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dropout_on_a_gpu_is_that_of_the_unit_of_work():
    step, ones = StepId(seed=7, round=1, step=1, cluster=0), torch.ones(1000, device="cuda")

    def draw(unit):
        with step.dropout(unit, 0):
            return torch.nn.functional.dropout(ones, 0.5)

    first, other = draw(0), draw(1)
    assert torch.equal(first, draw(0)) and not torch.equal(first, other)


@pytest.mark.parametrize("in_use", [False, True])
def test_gpu_generators_are_seeded_where_a_gpu_is_in_use_and_left_alone_elsewhere(monkeypatch, in_use):
    seeds = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    step = StepId(seed=7, round=1, step=1, cluster=0)
    with step.dropout(3, 2):
        drawn = torch.rand(5)
    assert seeds == ([step.dropout_seed(3, 2)] if in_use else [])
    torch.manual_seed(step.dropout_seed(3, 2))
    assert torch.equal(drawn, torch.rand(5))
