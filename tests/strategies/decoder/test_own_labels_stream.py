"""The decoder's service where labels stay in the clusters: its states, their gradients, and what it refuses."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import with_tail
from client_pipeline.link.base import LinkError, NotFiniteLink
from client_pipeline.link.privacy import NoiseSource, private_gradient
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.runtime.control_unit.own_labels import OwnLabels
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.decoder_cases import step_id
from helpers.tiny_models import tiny_batch, tiny_spec
from strategies.decoder.config import DecoderConfig
from strategies.decoder.round import Seat
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer

PLAIN = tiny_spec("llama", "causal-lm", dropout=0.0)
PLAIN = replace(PLAIN, config={**PLAIN.config, "server_layers": 2})
SPEC = with_tail(PLAIN, {}, True)[0]
SGD = OptimizerConfig(name="sgd", lr=0.5)
WIDTH = 16


@contextmanager
def service_of(sync="step"):
    parts = build_parts(SPEC, seed=1)
    trainer = DecoderTrainer(HeadTrainer(parts.head_on_server, SGD, unit=len(parts.blocks)), sync, 20.0, 20.0)
    with DecoderService(DecoderConfig(), trainer, 2, limits=StepLimits.of(SPEC, 64, 32)) as service:
        yield service, parts


def micro_batches(cluster=0, num=3):
    """Activations with masks and labels of a step's micro-batches."""
    pieces = []
    for i in range(num):
        batch = tiny_batch(SPEC, size=2, length=6 + i, seed=10 * cluster + i)
        generator = torch.Generator().manual_seed(100 * cluster + i)
        hidden = torch.randn(2, 6 + i, WIDTH, generator=generator)
        pieces.append((hidden, batch["attention_mask"], targets(batch)))
    return pieces


STEP = step_id(0)


def begin(link, pieces):
    # The same step, as a control unit begins it again.
    link.begin_step(STEP, len(pieces), sum(target_weight(labels) for _, _, labels in pieces))


def train(address, tail, pieces, between=lambda link, i: None):
    """One step as a control unit does it; returns its gradients."""
    with DecoderStream.open(address) as stream:
        link = OwnLabels(stream, tail, "float32")
        begin(link, pieces)
        for i, piece in enumerate(pieces):
            link.send(i, *piece)
        gradients = []
        for i in range(len(pieces)):
            between(link, i)
            gradients.append(link.receive())
        tied = link.receive_tied()
        link.end_step(1.0)
    return gradients, tied


def central(pieces):
    """The same of the whole head in this process."""
    head = build_parts(PLAIN, seed=1).head.train()
    total = sum(target_weight(labels) for _, _, labels in pieces)
    inputs = [hidden.clone().requires_grad_() for hidden, _, _ in pieces]
    losses = [head(x, mask, labels) for x, (_, mask, labels) in zip(inputs, pieces, strict=True)]
    (sum(losses) / total).backward()
    return [x.grad for x in inputs], [float(loss.detach()) for loss in losses], dict(head.named_parameters())


@pytest.mark.parametrize("sync", ["step", "round"])
@pytest.mark.parametrize("cut", [None, 0, 2])
def test_a_step_is_that_of_the_whole_head_also_across_a_cut(sync, cut):
    pieces = micro_batches()
    expected, losses, parameters = central(pieces)
    with service_of(sync) as (service, parts):
        address = service.open_round(1, [0], 1)[0]
        gradients, tied = train(address, parts.embedding.tail, pieces, lambda link, i: link.cut() if i == cut else None)
        summary = service.finish_round({0: 1.0})
    for found, gradient, loss in zip(gradients, expected, losses, strict=True):
        torch.testing.assert_close(found.tensor, gradient, rtol=1e-5, atol=1e-7)
        assert found.loss_sum == pytest.approx(loss, rel=1e-6)
    squares = sum(float(p.grad.square().sum()) for name, p in parameters.items() if name.startswith("blocks."))
    assert gradients[-1].norm_sq == pytest.approx(squares, rel=1e-4)
    for name in ("norm.weight", "lm_head.weight"):
        torch.testing.assert_close(tied[name], parameters[name].grad, rtol=1e-5, atol=1e-7)
    assert summary.head.keys() == {name for name in parameters if name.startswith("blocks.")}
    for name, value in summary.head.items():
        torch.testing.assert_close(value, parameters[name] - SGD.lr * parameters[name].grad, rtol=1e-5, atol=1e-6)
    (cluster,) = summary.clusters.values()
    assert cluster.steps == 1 and cluster.loss == 0


def test_a_step_that_is_begun_again_counts_once():
    pieces = micro_batches()
    with service_of() as (service, parts):
        address = service.open_round(1, [0], 1)[0]
        with DecoderStream.open(address) as stream:
            link = OwnLabels(stream, parts.embedding.tail, "float32")
            begin(link, pieces)
            for i, piece in enumerate(pieces):
                link.send(i, *piece)
            link.receive()
            link.drop_step()
            begin(link, pieces)
            for i, piece in enumerate(pieces):
                link.send(i, *piece)
            gradients = [link.receive() for _ in pieces]
            tied = link.receive_tied()
            link.end_step(1.0)
        head = service.finish_round().head
    expected, _, parameters = central(pieces)
    torch.testing.assert_close(gradients[0].tensor, expected[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(tied["norm.weight"], parameters["norm.weight"].grad, rtol=1e-5, atol=1e-7)
    for name, value in head.items():
        torch.testing.assert_close(value, parameters[name] - SGD.lr * parameters[name].grad, rtol=1e-5, atol=1e-6)


def test_gradients_are_sent_clipped_and_noised_also_of_tokens_without_a_loss(monkeypatch):
    seen, take = [], Seat.backward
    monkeypatch.setattr(
        Seat, "backward", lambda seat, *place, **more: seen.append(place[2]) or take(seat, *place, **more)
    )
    pieces = micro_batches(num=1)
    hidden, mask, labels = pieces[0]
    total = target_weight(labels)
    privacy = PrivacyConfig(gradient_clip=0.08, gradient_noise=0.1, seed=3)
    for config in (PrivacyConfig(), privacy):
        with service_of() as (service, parts):
            with DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream:
                link = OwnLabels(stream, parts.embedding.tail, "float32", config)
                begin(link, pieces)
                link.send(0, *pieces[0])
                link.receive()
                link.end_step(1.0)
    plain, sent = seen
    expected = private_gradient(plain * total, mask, privacy, NoiseSource(3), "gradient", 1, 1, 0, 0) / total
    torch.testing.assert_close(sent, expected)
    assert (plain * total).norm(dim=-1).max() > 0.08 and not sent[~mask].any()
    # The last token of a text foretells nothing; only the noise hides that.
    silent = (plain.norm(dim=-1) == 0) & mask
    assert silent.any() and bool((sent.norm(dim=-1)[silent] > 0).all())


class LateStates:
    """A stream with two states, of which the control unit sees the second after its step was begun again."""

    def __init__(self, stream):
        self.stream, self.begun_again, self.answers = stream, threading.Event(), None

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def receive_next(self):
        if self.answers is None:
            first, *self.answers = self.stream.receive_next(), self.stream.receive_next()
            return first
        if not self.answers:
            return self.stream.receive_next()
        assert self.begun_again.wait(120)
        return self.answers.pop()

    def begin_step(self, *step):
        self.stream.begin_step(*step)
        if self.answers is not None:
            self.begun_again.set()


def test_what_a_dropped_step_still_computes_is_neither_kept_nor_sent(monkeypatch):
    """A tail over a large vocabulary takes longer than a lost step is waited for."""
    pieces, begun, goes_on = micro_batches(num=2), threading.Event(), threading.Event()
    with service_of() as (service, parts):
        tail, own = parts.embedding.tail, type(parts.embedding.tail).forward

        def slow(self, *arguments):
            if not goes_on.is_set():
                begun.set()
                assert goes_on.wait(120)
            return own(self, *arguments)

        monkeypatch.setattr(type(tail), "forward", slow)
        with DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream, ThreadPoolExecutor(2) as threads:
            link = OwnLabels(LateStates(stream), tail, "float32")
            begin(link, pieces)
            for i, piece in enumerate(pieces):
                link.send(i, *piece)
            late = threads.submit(link.receive)
            assert begun.wait(120)
            again = threads.submit(lambda: (link.drop_step(), begin(link, pieces)))
            goes_on.set()
            again.result(120)
            with pytest.raises(LinkError, match="micro-batch 1 was dropped before its states came"):
                late.result(120)
            for i, piece in enumerate(pieces):
                link.send(i, *piece)
            gradients = [link.receive() for _ in pieces]
            tied = link.receive_tied()
            link.end_step(1.0)
    expected, _, parameters = central(pieces)
    for found, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found.tensor, gradient, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(tied["norm.weight"], parameters["norm.weight"].grad, rtol=1e-5, atol=1e-7)


def wrong_order(stream, pieces):
    stream.send_states_gradient(0, torch.zeros(2, 6, WIDTH))


def other_states(stream, pieces):
    stream.send_forward(0, *pieces[0][:2], 1.0)
    stream.receive_next()
    stream.send_states_gradient(1, torch.zeros(2, 6, WIDTH))


def other_shape(stream, pieces):
    stream.send_forward(0, *pieces[0][:2], 1.0)
    stream.receive_next()
    stream.send_states_gradient(0, torch.zeros(2, 5, WIDTH))


def too_wide(stream, pieces):
    stream.send_forward(0, *pieces[0][:2], 1.0)
    stream.receive_next()
    stream.send_states_gradient(0, torch.zeros(2, 6, 2 * WIDTH))


def too_heavy(stream, pieces):
    hidden, mask, _ = pieces[0]
    stream.send_forward(0, hidden, mask, float(mask.sum()) + 1)


def with_labels(stream, pieces):
    stream.send(0, *pieces[0])


def early_end(stream, pieces):
    stream.send_forward(0, *pieces[0][:2], 1.0)
    stream.receive_next()
    stream.end_step(1.0)
    stream.close()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (wrong_order, "expected the gradient of the states of micro-batch 0, of 0 that were given, found that of 0"),
        (other_states, "expected the gradient of the states of micro-batch 0, of 1 that were given, found that of 1"),
        (other_shape, r"expected the shape \[2, 6, 16\], found \[2, 5, 16\]"),
        (too_wide, "gradient: expected the model's width 16"),
        (too_heavy, "weight: expected at most the .* real tokens of the mask"),
        (with_labels, "expected a forward, step_end or bye frame, found micro_batch"),
        (early_end, "step 1 ended after 0 of 1 micro-batches"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_next_round_goes_on(act, words):
    pieces = micro_batches(num=1)
    with service_of() as (service, parts):
        stream = DecoderStream.open(service.open_round(1, [0], 1)[0])
        stream.begin_step(step_id(0), 1, 1.0)
        with pytest.raises(LinkError, match=words):
            act(stream, pieces)
            stream.receive_next()
        stream.abort()
        assert service.finish_round().clusters[0].steps == 0
        address = service.open_round(2, [0], 1)[0]
        with DecoderStream.open(address) as stream:
            link = OwnLabels(stream, parts.embedding.tail, "float32")
            link.begin_step(step_id(0, 1, 2), 1, target_weight(pieces[0][2]))
            link.send(0, *pieces[0])
            assert link.receive().norm_sq > 0
            link.end_step(1.0)
        assert service.finish_round().clusters[0].steps == 1


def test_a_loss_that_is_not_finite_is_found_here():
    pieces = micro_batches(num=1)
    with service_of() as (service, parts):
        parts.embedding.tail.norm.weight.data.fill_(float("nan"))
        with DecoderStream.open(service.open_round(1, [0], 1)[0]) as stream:
            link = OwnLabels(stream, parts.embedding.tail, "float32")
            begin(link, pieces)
            link.send(0, *pieces[0])
            with pytest.raises(NotFiniteLink, match="micro-batch 0 holds NaN or Inf"):
                link.receive()
            stream.abort()
