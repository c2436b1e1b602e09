"""Tied matrices over real gRPC streams: rows there, gradients back, and what is refused."""

import pytest
import torch

from client_pipeline.link.stream import DecoderStream
from client_pipeline.link.tied import TiedRows, pieces
from client_pipeline.partition.parts import IGNORED_LABEL, own_parameters, target_weight
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
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


def test_rows_that_do_not_fit_are_refused_by_name():
    rows, one = TiedRows({NAME: (3, 2)}), torch.ones(1, 2)
    rows.add(NAME, 0, one)
    for name, start, values, text in (
        ("x", 0, one, "tied matrix x: expected one of"),
        (NAME, 0, one, "expected rows from 1 on, found rows from 0 on"),
        (NAME, 1, one.double(), "expected float32, found torch.float64"),
        (NAME, 1, torch.ones(3, 2), r"expected at most 2 rows of shape \[2\], found \[3, 2\]"),
        (NAME, 1, torch.ones(0, 2), r"expected at most 2 rows of shape \[2\], found \[0, 2\]"),
        (NAME, 1, torch.ones(1, 3), r"found \[1, 3\]"),
        (NAME, 1, one * torch.inf, "output.weight holds NaN or Inf"),
    ):
        with pytest.raises(ValueError, match=text):
            rows.add(name, start, values)
    assert rows.missing == NAME
    rows.add(NAME, 1, 2 * torch.ones(2, 2))
    assert rows.missing is None and rows.values[NAME].tolist() == [[1.0] * 2, [2.0] * 2, [2.0] * 2]


BROKEN = matrix()
BROKEN[4000, 0] = torch.nan
