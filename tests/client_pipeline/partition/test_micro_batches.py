"""Micro-batches are as equal as possible, and dropout depends on what is computed, not on who computes it."""

import itertools

import pytest
import torch

from client_pipeline.partition.dropout_seed import EMBEDDING_UNIT, StepId
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.plan import micro_batch_sizes


@pytest.mark.parametrize("batch_size", range(1, 14))
def test_sizes_are_as_equal_as_possible_and_larger_ones_come_first(batch_size):
    for m in range(1, batch_size + 1):
        sizes = micro_batch_sizes(batch_size, m)
        assert (len(sizes), sum(sizes)) == (m, batch_size)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1 and sizes[-1] >= 1


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
    # What is random in the data is no unit's.
    seeds += [StepId(seed=0, round=number, step=1, cluster=0).data_seed for number in (1, 2)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dropout_on_a_gpu_is_that_of_the_unit_of_work():
    step, ones = StepId(seed=7, round=1, step=1, cluster=0), torch.ones(1000, device="cuda")

    def draw(unit):
        with step.dropout(unit, 0):
            return torch.nn.functional.dropout(ones, 0.5)

    first, other = draw(0), draw(1)
    assert torch.equal(first, draw(0)) and not torch.equal(first, other)
