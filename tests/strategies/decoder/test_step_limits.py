"""Limits of a cluster's frames: nothing honest is refused, and nothing larger is taken."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.families.registry import family_named
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.partition.packed_mask import PACKED
from client_pipeline.partition.parts import IGNORED_LABEL
from helpers.tiny_models import CONFIGS, VOCABULARY, tiny_batch, tiny_spec
from strategies.decoder.member import Refusal
from strategies.decoder.step_limits import StepLimits

CLASSIC = transformer.spec(vocab_size=13, width=8, num_heads=2, feed_forward=16, max_length=20)
LIMITS = StepLimits.of(CLASSIC, examples=4, longest=6)
CODECS = [ActivationCodec(name) for name in ("none", "fp16", "int8")]


def heads():
    return [
        replace(CLASSIC, config={**CLASSIC.config, "vocab_size": VOCABULARY}),
        *(tiny_spec(family, head) for family in CONFIGS for head in family_named(family).HEADS),
    ]


@pytest.mark.parametrize("spec", heads(), ids=lambda spec: f"{spec.family}-{spec.head}")
def test_a_batch_of_every_family_is_within_the_limits_of_its_model(spec):
    parts = build_parts(spec, seed=1)
    batch = tiny_batch(spec)
    with torch.no_grad():
        hidden, scores = parts.encode(batch), parts.logits(batch)
    limits = StepLimits.of(spec, examples=len(batch["labels"]), longest=batch["attention_mask"].shape[1])
    assert (limits.width, limits.classes) == (hidden.shape[-1], scores.shape[-1])
    for codec in CODECS:
        limits.check(codec.encode(hidden), batch["attention_mask"], codec)
        limits.check_targets({"labels": batch["labels"]}, len(hidden))
    # As long as the data may be, or the model, whichever is less.
    lengths = [StepLimits.of(spec, 1, longest).length for longest in (3, 10**6)]
    assert lengths[0] == 3 and lengths[1] <= 10**6


def test_the_shorter_of_data_and_model_bounds_a_sequence():
    assert [StepLimits.of(CLASSIC, 1, longest).length for longest in (6, 20, 50)] == [6, 20, 20]
    assert LIMITS.weight == 24


def tensors(**change):
    good = {
        "wire": torch.zeros(3, 5, 8),
        "mask_BT": torch.ones(3, 5, dtype=torch.bool),
        "labels": torch.tensor([[3, IGNORED_LABEL], [0, 12], [1, 1]]),
    }
    return {**good, **change}


def check(codec=CODECS[0], limits=LIMITS, **change):
    of = tensors(**change)
    limits.check(of["wire"], of["mask_BT"], codec)
    limits.check_targets({"labels": of["labels"]}, len(of["wire"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wire": torch.zeros(5, 5, 8)}, "at most 4 examples of at most 6 positions .* found 5 of 5"),
        ({"wire": torch.zeros(3, 7, 8)}, "found 3 of 7"),
        ({"wire": torch.zeros(3, 5, 9)}, "width 8"),
        ({"wire": torch.zeros(3, 40)}, r"hidden: expected floats \[B, T, D\]"),
        ({"wire": torch.zeros(3, 0, 8)}, r"found torch.float32 \[3, 0, 8\]"),
        ({"wire": torch.zeros(3, 5, 8).half()}, "found torch.float16"),
        ({"mask_BT": torch.ones(3, 5)}, "mask: expected bool"),
        ({"mask_BT": torch.ones(5, 3, dtype=torch.bool)}, r"mask: expected bool \[3, 5\]"),
        ({"mask_BT": torch.ones(3, 5, 1, dtype=torch.bool)}, r"mask: expected bool \[3, 5\]"),
        ({"labels": torch.ones(3, 2)}, "int64 labels"),
        ({"labels": torch.ones((), dtype=torch.int64)}, "expected 3 examples"),
        ({"labels": torch.ones(4, 2, dtype=torch.int64)}, "expected 3 examples"),
        ({"labels": torch.ones(3, 7, dtype=torch.int64)}, "at most 6 positions"),
        ({"labels": torch.ones(3, 2, 2, dtype=torch.int64)}, "expected 3 examples"),
        ({"labels": torch.full((3, 2), 13)}, "below 13, found 13"),
        ({"labels": torch.full((3, 2), -99)}, "from 0 on, or -100, found -99"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    check()
    check(labels=torch.tensor([1, 2, 3]))
    with pytest.raises(Refusal, match=message):
        check(**change)


@pytest.mark.parametrize("codec", CODECS[1:], ids=lambda codec: codec.name)
def test_packed_activations_are_refused_before_they_are_unpacked(codec):
    row = codec.row_bytes(8)
    check(codec, wire=torch.zeros(3, 5, row, dtype=torch.uint8))
    for shape, message in [((3, 5, row + 1), "width 8"), ((3, 50, row), "positions"), ((15, row), "of the codec")]:
        with pytest.raises(Refusal, match=message):
            check(codec, wire=torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(Refusal, match=f"of the codec {codec.name}, found torch.float32"):
        check(codec)


def test_other_targets_are_refused():
    of = tensors()
    for targets in ({}, {"labels": of["labels"], "more": of["labels"]}):
        with pytest.raises(Refusal, match="target.labels alone"):
            LIMITS.check_targets(targets, len(of["wire"]))


def test_a_step_weighs_no_more_than_its_examples_have_positions():
    LIMITS.check_weights(24, 24, 4)
    LIMITS.check_weights(0, None, 1)
    for weight, total, number in ((25, None, 1), (1, 24.5, 1), (1, 400_000, 1), (1, 1, 5)):
        with pytest.raises(Refusal, match="a step"):
            LIMITS.check_weights(weight, total, number)
    LIMITS.check_examples(4)
    with pytest.raises(Refusal, match="at most 4 examples, found 5"):
        LIMITS.check_examples(5)


def test_a_packed_mask_is_taken_where_sequences_are_packed_alone():
    numbers, packed = torch.ones(3, 5, dtype=PACKED), replace(LIMITS, are_packed=True)
    check(limits=packed, mask_BT=numbers)
    with pytest.raises(Refusal, match="mask: expected bool .*, found torch.int16"):
        check(mask_BT=numbers)
    with pytest.raises(Refusal, match="mask: expected int16 .*, found torch.bool"):
        check(limits=packed)
