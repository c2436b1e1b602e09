"""A cluster's own decoder behind the link's protocol: order, ends, and what is refused."""

import threading

import pytest
import torch
from torch import nn

from client_pipeline.link.base import LinkError, NotFiniteLink
from client_pipeline.partition.micro_batches import StepId
from client_pipeline.runtime.decoder_update import HeadTrainer
from client_pipeline.runtime.local_decoder import LocalDecoder
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from helpers.recovery_cases import within

MASK_BT = torch.ones(1, 2, dtype=torch.bool)
SECONDS = 30.0


class Scale(nn.Module):
    """The loss is w times the sum of the activations."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, x_BTD, mask_BT, targets):
        return self.w * x_BTD.sum()


def step(number=1, round_=1):
    return StepId(seed=0, round=round_, step=number, cluster=3)


def rows(value):
    return torch.full((1, 2, 1), value)


@pytest.fixture
def decoder():
    # The rate grows with the step: what is applied says which global step it was.
    optimizer = OptimizerConfig(name="sgd", lr=1.0, warmup_steps=100)
    made = LocalDecoder(HeadTrainer(Scale(), optimizer, unit=1), local_steps=4, timeout_s=SECONDS)
    yield made
    made.close()


def run(decoder, number=1, round_=1, values=(1.0, 2.0), scale=1.0):
    decoder.begin_step(step(number, round_), len(values), 4.0)
    for i, value in enumerate(values):
        decoder.send(i, rows(value), MASK_BT, {})
    found = [decoder.receive() for _ in values]
    decoder.end_step(scale)
    return found


def test_gradients_come_in_order_and_the_last_one_brings_the_norm(decoder):
    first, last = run(decoder)
    assert (first.micro_batch, last.micro_batch) == (0, 1)
    assert (first.loss_sum, last.loss_sum) == (4.0, 8.0)
    assert torch.equal(first.tensor, rows(2.0 / 4.0)) and torch.equal(last.tensor, rows(2.0 / 4.0))
    # Of w: (2 + 4) / 4.
    assert first.norm_sq is None and last.norm_sq == pytest.approx(1.5**2)


@pytest.mark.parametrize(("round_", "number", "global_step"), [(1, 1, 1), (1, 4, 4), (3, 2, 10)])
def test_a_step_is_taken_at_once_with_the_rounds_number_and_its_clipping(decoder, round_, number, global_step):
    run(decoder, number, round_, scale=0.5)
    assert float(decoder.trainer.parameters["w"]) == pytest.approx(2.0 - global_step / 100 * 0.5 * 1.5)


def test_there_is_no_network_that_could_be_cut(decoder):
    run(decoder)
    decoder.cut(3.0)
    assert not decoder.is_remote and decoder.cuts == ()
    assert decoder.bytes_up == decoder.bytes_down == decoder.payload_up == decoder.payload_down == 0


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_batch_without_a_target_is_refused(decoder, weight):
    with pytest.raises(LinkError, match="carries no target: expected a total weight above 0"):
        decoder.begin_step(step(), 1, weight)


def test_calls_out_of_order_are_refused(decoder):
    with pytest.raises(LinkError, match="send before begin_step"):
        decoder.send(0, rows(1.0), MASK_BT, {})
    with pytest.raises(LinkError, match="end_step after 0 of 0"):
        decoder.end_step(1.0)
    decoder.begin_step(step(), 2, 4.0)
    decoder.send(0, rows(1.0), MASK_BT, {})
    decoder.receive()
    with pytest.raises(LinkError, match="end_step after 1 of 2 micro-batches"):
        decoder.end_step(1.0)
    with pytest.raises(LinkError, match="receive_tied after 1 of 2 micro-batches"):
        decoder.receive_tied()
    decoder.send(1, rows(1.0), MASK_BT, {})
    decoder.receive()
    assert decoder.receive_tied() == {}
    decoder.end_step(1.0)
    with pytest.raises(LinkError, match="receive_tied after"):
        decoder.receive_tied()


def test_activations_that_do_not_come_are_missed_by_number(decoder):
    decoder.timeout_s = 0.01
    decoder.begin_step(step(), 2, 4.0)
    decoder.send(0, rows(1.0), MASK_BT, {})
    decoder.receive()
    with pytest.raises(LinkError, match=r"no activations of micro-batch 1 came within 0\.01 s"):
        decoder.receive()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_are_told_apart(decoder, value):
    decoder.begin_step(step(), 1, 4.0)
    decoder.send(0, rows(value), MASK_BT, {})
    with pytest.raises(NotFiniteLink, match="loss or gradient of micro-batch 0 holds NaN or Inf"):
        decoder.receive()


def test_a_gradient_that_is_not_finite_is_found_though_the_loss_is(decoder):
    with torch.no_grad():
        decoder.trainer.parameters["w"].fill_(float("inf"))
    decoder.begin_step(step(), 1, 4.0)
    decoder.send(0, torch.zeros(1, 2, 1), MASK_BT, {})
    with pytest.raises(NotFiniteLink):
        decoder.receive()


def test_a_step_that_is_dropped_or_begun_again_counts_for_nothing(decoder):
    for _ in range(2):
        decoder.begin_step(step(), 2, 4.0)
        decoder.send(0, rows(9.0), MASK_BT, {})
        decoder.receive()
    decoder.drop_step()
    assert decoder.trainer.gradient_norm_sq(3) == 0.0
    _, last = run(decoder)
    assert last.norm_sq == pytest.approx(1.5**2)


def test_activations_of_a_step_that_was_dropped_are_not_those_of_the_next(decoder):
    decoder.begin_step(step(1), 1, 4.0)
    decoder.send(0, rows(9.0), MASK_BT, {})
    decoder.begin_step(step(2), 1, 4.0)
    decoder.send(0, rows(1.0), MASK_BT, {})
    assert decoder.receive().loss_sum == 4.0


@pytest.mark.parametrize("end", ["drop_step", "close", "abort"])
def test_whoever_waits_is_freed(decoder, end):
    decoder.begin_step(step(), 1, 4.0)
    threading.Timer(0.05, getattr(decoder, end)).start()
    with pytest.raises(LinkError, match="closed while a gradient was awaited"):
        within(SECONDS, decoder.receive)
