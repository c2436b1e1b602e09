"""The proof that the split model computes what the whole one does, with threads in the place of Ray's actors."""

import contextlib
import math

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.families.registry import family_named
from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit import verification
from client_pipeline.runtime.control_unit.verification import SPLIT_TOLERANCE, Verification, random_batch, verify_split
from helpers.thread_ray import run_in_threads
from helpers.tiny_models import CLASSIC, tiny_spec

SPEC = transformer.spec(
    vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=3, decoder_layers=1, dropout=0.2
)
TWO = ClusterPlan(delta=(1, 2), order=(1, 0), m=2, schedule="1f1b")
HEADS = ("seq2seq", "masked-lm", "causal-lm", "token-classification", "sequence-classification")


@pytest.fixture
def rays(monkeypatch):
    """Let a Ray begin and end in no time; says when one was there."""
    ray, entered = run_in_threads(monkeypatch), []

    @contextlib.contextmanager
    def private():
        entered.append("begun")
        yield
        entered.append("ended")

    monkeypatch.setattr(verification, "private_ray", private)
    return ray, entered


def found(**changes):
    return Verification(**{"output": 0.0, "loss": 0.0, "gradients": {"a": 0.0, "b": 0.0}, "reference": 0.0, **changes})


@pytest.mark.parametrize("where", ["output", "loss", "gradients", "reference"])
def test_the_largest_difference_anywhere_decides(where):
    def with_one(value):
        return found(**{where: {"a": 0.0, "b": value, "c": 0.0} if where == "gradients" else value})

    assert with_one(SPLIT_TOLERANCE * 0.99).passed
    assert with_one(0.25).worst == 0.25 and not with_one(0.25).passed
    assert not with_one(math.nan).passed
    assert found(reference=None).passed


def test_a_split_model_computes_what_the_whole_one_does_dropout_included(rays):
    ray, entered = rays
    result = verify_split(lambda: build_parts(SPEC, seed=1), TWO, random_batch(SPEC, 4, 5), seed=3)
    assert result.passed
    assert result.gradients.keys() == build_parts(SPEC, seed=1).weights().keys()
    assert result.reference is None
    assert entered == ["begun", "ended"]
    assert len(ray.actors) == 2 and all(actor.has_ended for actor in ray.actors.values())


def build_with(change):
    """Builds models of which the second, the one that is split, differs."""
    built = []

    def build():
        parts = build_parts(SPEC, seed=1)
        if built:
            with torch.no_grad():
                change(parts)
        built.append(parts)
        return parts

    return build


def test_another_decoder_is_found_in_loss_and_gradients_though_the_output_is_the_same(rays):
    batch = random_batch(SPEC, 4, 5)
    result = verify_split(build_with(lambda parts: parts.head.norm.bias.add_(0.1)), TWO, batch)
    assert not result.passed
    assert result.output <= SPLIT_TOLERANCE < min(result.loss, max(result.gradients.values()))
    # Relative to the whole model's: a few per cent, not a few of the sum.
    assert result.loss < 1.0


def test_another_embedding_is_found_in_the_output(rays):
    batch = random_batch(SPEC, 4, 5)
    assert verify_split(build_with(lambda parts: parts.embedding.token.weight.mul_(1.01)), TWO, batch).output > 1e-3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ClusterPlan(delta=(1, 1), order=(0, 1), m=2), r"delta \[1, 1\] sums to 2, expected the model's L = 3"),
        (ClusterPlan(delta=(1, 2), order=(0, 1), m=5), "m"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_starts(rays, plan, message):
    with pytest.raises(ValueError, match=message):
        verify_split(lambda: build_parts(SPEC, seed=1), plan, random_batch(SPEC, 4, 5))
    assert rays[1] == []


# Batches that are drawn.


@pytest.mark.parametrize("head", HEADS)
def test_a_drawn_batch_fits_its_head_and_every_example_has_a_target(head):
    family = {"seq2seq": "bart", "causal-lm": "gpt2"}.get(head, "bert")
    spec = CLASSIC if head == "seq2seq" else tiny_spec(family, head)
    assert head in family_named(spec.family).HEADS
    batch = random_batch(spec, 4096, 10, seed=2)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    assert ids.shape == mask.shape == (4096, 10) and mask.dtype == torch.bool
    # From 3 on: what comes before is padding and the like.
    assert 3 <= int(ids[mask].min()) and int(ids.max()) < 40
    lengths = mask.sum(1)
    assert int(lengths.min()) == 5 and int(lengths.max()) == 10
    assert torch.equal(mask, torch.arange(10) < lengths[:, None])
    if head == "sequence-classification":
        assert labels.shape == (4096,) and set(labels.tolist()) == set(range(spec.config["num_labels"]))
        return
    assert labels.shape == (4096, 10)
    real = labels != IGNORED_LABEL
    assert not (real & ~mask).any() and real.any(1).all()
    if head == "masked-lm":
        # The first token of each, and a fifth of the others: of thousands, four standard deviations.
        others = int(mask[:, 1:].sum())
        share = int(real[:, 1:].sum()) / others
        assert real[:, 0].all() and abs(share - 0.2) < 4 * (0.16 / others) ** 0.5
    elif head == "causal-lm":
        assert torch.equal(real, mask & (torch.arange(10) > 0)) and torch.equal(labels[real], ids[real])
    else:
        assert torch.equal(real, mask)
        most = spec.config["num_labels"] if head == "token-classification" else 40
        assert int(labels[real].min()) >= 0 and int(labels[real].max()) < most
