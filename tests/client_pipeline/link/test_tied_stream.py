"""Tied matrices over real gRPC streams: rows there, gradients back, and what is refused."""

import pytest
import torch

from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream
from client_pipeline.link.tied import TiedRows, pieces
from client_pipeline.partition.parts import IGNORED_LABEL, own_parameters, target_weight
from client_pipeline.runtime.decoder_update import HeadTrainer
from client_pipeline.runtime.local_decoder import LocalDecoder
from helpers.decoder_cases import SGD, all_at_once, cut, step_id
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

VOCABULARY, WIDTH = 4001, 8
NAME = "output.weight"


class TiedHead(torch.nn.Module):
    """An output layer of the embedding's weight, with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.output = torch.nn.Linear(WIDTH, VOCABULARY)
        self.tied = {NAME: "token.weight"}

    def forward(self, hidden, mask, targets):
        logits = self.output(hidden).flatten(0, 1)
        return torch.nn.functional.cross_entropy(
            logits, targets["labels"].flatten(), reduction="sum", ignore_index=IGNORED_LABEL
        )


def trainer():
    torch.manual_seed(1)
    return HeadTrainer(TiedHead(), SGD, unit=1)


def matrix(seed=0):
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed))


def batch_of(seed, examples=5):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, VOCABULARY, (examples, 3), generator=generator)
    labels[0, 1:] = IGNORED_LABEL
    hidden = torch.randn(examples, 3, WIDTH, generator=generator)
    return hidden, torch.ones(examples, 3, dtype=torch.bool), {"labels": labels}


@pytest.fixture
def service():
    # 65,536 bytes a frame: a matrix of 128 kB takes three.
    served = DecoderService(DecoderConfig(max_frame_bytes=2**16), DecoderTrainer(trainer(), "step"), 2)
    served.start()
    yield served
    served.stop()


def step_of(link, step, batch, value, num_micro_batches=2):
    found = cut(batch, num_micro_batches)
    link.begin_step(step, num_micro_batches, target_weight(batch[2]))
    link.send_tied({NAME: value})
    for i, piece in enumerate(found):
        link.send(i, *piece)
    answers = [link.receive() for _ in found]
    tied = link.receive_tied()
    link.end_step(1.0)
    return answers, {name: gradient.clone() for name, gradient in tied.items()}


def whole_gradient(weights, value, batch):
    """Activations', bias's and tied matrix's gradient of the mean loss, by plain autograd."""
    head = TiedHead()
    bias = weights["output.bias"].clone().requires_grad_()
    leaf, hidden = value.clone().requires_grad_(), batch[0].clone().requires_grad_()
    loss = torch.func.functional_call(head, {NAME: leaf, "output.bias": bias}, (hidden, *batch[1:]))
    return torch.autograd.grad(loss / target_weight(batch[2]), [hidden, bias, leaf])


def test_matrices_are_cut_into_frames_and_put_together_again():
    tied = {"a": matrix(), "b": torch.randn(7, 3, 2), "wide": torch.randn(2, 50_000)}
    found = list(pieces(tied, 2**16))
    assert [name for name, *_ in found] == ["a"] * 3 + ["b"] + ["wide"] * 2
    rows = TiedRows({name: value.shape for name, value in tied.items()})
    for piece in found:
        assert rows.missing is not None
        rows.add(*piece)
    assert rows.missing is None
    assert all(torch.equal(rows.values[name], value) for name, value in tied.items())


def test_every_step_computes_with_the_clusters_own_value_and_returns_its_gradient(service):
    address = service.open_round(1, [0], 2, {NAME: matrix(0)})[0]
    weights = {n: p.detach().clone() for n, p in own_parameters(service.trainer.head).items()}
    assert weights.keys() == {"output.bias"}
    with DecoderStream.open(address) as stream:
        for step in (1, 2):
            value, batch = matrix(step - 1), batch_of(step)
            hidden, bias, tied = whole_gradient(weights, value, batch)
            answers, found = step_of(stream, step_id(0, step), batch, value)
            torch.testing.assert_close(torch.cat([a.tensor for a in answers]), hidden, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(found[NAME], tied, atol=1e-7, rtol=1e-5)
            # The CU adds the tied gradient to its own: the decoder's norm leaves it out.
            assert answers[-1].norm_sq == pytest.approx(float(bias.square().sum()), rel=1e-4)
            weights["output.bias"] -= SGD.lr * bias
    summary = service.finish_round()
    assert summary.head.keys() == {"output.bias"} and summary.clusters[0].steps == 2
    torch.testing.assert_close(summary.head["output.bias"], weights["output.bias"], atol=1e-6, rtol=1e-5)


def test_clusters_do_not_see_each_others_values(service):
    addresses = service.open_round(1, [0, 1], 2, {NAME: matrix(0)})

    def train(cluster):
        with DecoderStream.open(addresses[cluster]) as stream:
            return [
                step_of(stream, step_id(cluster, step), batch_of(step), matrix(10 * cluster * (step - 1)))[1][NAME]
                for step in (1, 2)
            ]

    first, second = all_at_once(lambda: train(0), lambda: train(1))
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_a_cu_that_trains_alone_equals_one_behind_the_stream(service):
    alone = LocalDecoder(trainer(), local_steps=2, timeout_s=5.0)
    with DecoderStream.open(service.open_round(1, [0], 2, {NAME: matrix(0)})[0]) as stream:
        for step in (1, 2):
            found = [
                step_of(link, step_id(0, step), batch_of(step), matrix(step - 1))[1][NAME] for link in (alone, stream)
            ]
            assert torch.equal(*found)
    head = service.finish_round().head
    assert all(torch.equal(head[name], p) for name, p in alone.trainer.parameters.items())


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        (None, "tied matrix output.weight: missing"),
        ({NAME: torch.zeros(3, WIDTH)}, r"tied matrix output.weight: expected shape \[4001, 8\], found \[3, 8\]"),
        ({NAME: matrix(), "x": matrix()}, "tied matrix x: not one of this head's"),
    ],
)
def test_a_round_with_a_wrong_tied_matrix_is_refused_by_name(service, tied, message):
    with pytest.raises(ValueError, match=message):
        service.open_round(1, [0], 1, tied)


BROKEN = matrix()
BROKEN[4000, 0] = torch.nan


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(VOCABULARY, 7), r"tied matrix output.weight: expected at most 4001 rows of shape \[8\]"),
        (torch.zeros(VOCABULARY + 1, WIDTH), "tied matrix output.weight: expected at most .* rows"),
        (torch.zeros(VOCABULARY - 1, WIDTH), "tied matrix output.weight: step 2 began before it had come in full"),
        (matrix().double(), "tied matrix output.weight: expected float32"),
        (BROKEN, "tied matrix output.weight holds NaN or Inf"),
    ],
    ids=["width", "more rows", "fewer rows", "dtype", "NaN"],
)
def test_a_wrong_tied_matrix_of_a_later_step_is_refused_by_name(service, value, message):
    address = service.open_round(1, [0], 2, {NAME: matrix()})[0]
    with DecoderStream.open(address) as stream:
        step_of(stream, step_id(0), batch_of(1), matrix())
        with pytest.raises(LinkError, match=message):
            step_of(stream, step_id(0, 2), batch_of(2), value)
    assert service.finish_round().clusters[0].steps == 1


def test_a_tied_matrix_at_the_wrong_time_is_refused(service):
    address = service.open_round(1, [0], 2, {NAME: matrix()})[0]
    stream = DecoderStream.open(address)
    stream.begin_step(step_id(0), 1, 1)
    frame = {"kind": "tied", "round": 1, "step": 1, "name": NAME, "start": 0}
    stream._put(frame, {"rows": matrix()[:10]})
    with pytest.raises(LinkError, match="output.weight: not expected in step 1, a round's first step"):
        stream.receive()
    stream.close()


def test_a_gradient_of_another_shape_is_refused_by_name(service, monkeypatch):
    monkeypatch.setattr(HeadTrainer, "tied_gradient", lambda self, cluster: {NAME: torch.zeros(VOCABULARY, 3)})
    with DecoderStream.open(service.open_round(1, [0], 1, {NAME: matrix()})[0]) as stream:
        with pytest.raises(LinkError, match="gradient of the tied matrix output.weight: expected at most 4001 rows"):
            step_of(stream, step_id(0), batch_of(1), matrix())


def test_a_cu_that_trains_alone_is_told_of_a_wrong_tied_matrix_by_name():
    with pytest.raises(ValueError, match=r"tied matrix output.weight: expected shape \[4001, 8\], found \[4001, 3\]"):
        trainer().gradient(step_id(0), 0, *batch_of(1), 1.0, {NAME: torch.zeros(VOCABULARY, 3)})
    with pytest.raises(ValueError, match="tied matrix output.weight: missing"):
        trainer().gradient(step_id(0), 0, *batch_of(1), 1.0)
