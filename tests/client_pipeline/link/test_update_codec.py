"""Updates in fewer bytes, error feedback, and what a server refuses."""

import pytest
import torch

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec, UpdateError, update_bytes, update_codec

KINDS = ["fp16", "int8", "int4", "top-k"]
START = {"a": torch.linspace(-1, 1, 60).reshape(5, 12), "b": torch.zeros(7), "c": torch.tensor(2.0)}


def codec(kind, density=0.1):
    return UpdateCodec(CompressionConfig(update=kind, density=density))


def trained(step, size=1e-6):
    """Weights after a small change, as small as those of a low learning rate."""
    generator = torch.Generator().manual_seed(step)
    return {n: v + size * torch.randn(v.shape, generator=generator) for n, v in START.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_as_planned_and_none_sends_the_weights(kind):
    update = ErrorFeedback(codec(kind)).compress(START, trained(1))
    for name, value in START.items():
        sent = sum(tensor.nbytes for key, tensor in update.items() if key.startswith(f"{name}/"))
        assert sent == update_bytes(codec(kind).config, value.numel())
    assert update_codec(CompressionConfig()) is None
    assert update_bytes(CompressionConfig(), 60) == 240
    assert [update_bytes(codec(k).config, 60) for k in KINDS] == [124, 64, 36, 48]
    # An odd number of halves fills its last byte.
    assert update_bytes(codec("int4").config, 7) == 4 + 1 + 4 and update_bytes(codec("int4").config, 0) == 6
    nothing = codec("int4").decode(codec("int4").encode(torch.zeros(0, 3)), torch.Size((0, 3)))
    assert nothing.shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_and_what_waits_is_what_was_learned(kind):
    """Over any number of rounds: sum of the decoded updates + residual = sum of the changes."""
    feedback, decoded, learned = ErrorFeedback(codec(kind)), dict.fromkeys(START, 0.0), dict.fromkeys(START, 0.0)
    for step in range(1, 9):
        end = trained(step, size=1.0)
        applied = codec(kind).apply(START, feedback.compress(START, end, step))
        feedback.settle(step)
        for name, value in START.items():
            assert applied[name].shape == value.shape and applied[name].dtype == value.dtype
            decoded[name] = decoded[name] + applied[name] - value
            learned[name] = learned[name] + end[name] - value
    for name in START:
        torch.testing.assert_close(decoded[name] + feedback.residual[name], learned[name], rtol=1e-4, atol=1e-4)
    if kind == "top-k":
        assert float(feedback.residual["a"].norm()) > 0


def test_top_k_sends_the_largest_changes_exactly():
    end = {"a": START["a"].clone()}
    end["a"][2, 3] += 0.5
    end["a"][4, 11] -= 0.25
    update = ErrorFeedback(codec("top-k", density=2 / 60)).compress({"a": START["a"]}, end)
    assert update["a/index"].tolist() == [27, 59]
    assert torch.equal(codec("top-k", density=2 / 60).apply({"a": START["a"]}, update)["a"], end["a"])


def test_what_waits_is_that_of_the_last_update_that_counted():
    """A residual that moved on with each update made lost the part of one that failed or was left out."""
    feedback, whole = ErrorFeedback(codec("top-k")), {"a": START["a"] + torch.linspace(-3, 5, 60).reshape(5, 12)}
    start = {"a": START["a"]}
    feedback.compress(start, whole, 1)
    assert feedback.residual == {}, "no answer has come back yet"
    feedback.settle(1)
    waiting = {name: value.clone() for name, value in feedback.residual.items()}
    assert float(waiting["a"].norm()) > 0
    # What fails afterwards, or the server leaves out, changes nothing; nor does a confirmation that comes twice.
    sent = [feedback.compress(start, whole, round_) for round_ in (2, 3)]
    assert all(torch.equal(sent[0][key], sent[1][key]) for key in sent[0])
    for confirmed in (1, 1, 0):
        feedback.settle(confirmed)
        assert torch.equal(feedback.residual["a"], waiting["a"])
    # What counted is taken off, all else goes on waiting.
    update = feedback.compress(start, start, 4)
    feedback.settle(4)
    decoded = codec("top-k").decode({"values": update["a/values"], "index": update["a/index"]}, start["a"].shape)
    torch.testing.assert_close(feedback.residual["a"] + decoded, waiting["a"])


def test_training_that_diverged_is_an_error_and_leaves_the_residual():
    feedback = ErrorFeedback(codec("int8"))
    feedback.compress(START, trained(1), 1)
    feedback.settle(1)
    before = {n: v.clone() for n, v in feedback.residual.items()}
    with pytest.raises(RuntimeError, match="c holds NaN or Inf: training diverged; lower optimizer.lr"):
        feedback.compress(START, trained(2) | {"c": torch.tensor(float("nan"))})
    assert all(torch.equal(feedback.residual[n], v) for n, v in before.items())


def broken(kind, **changes):
    update = ErrorFeedback(codec(kind)).compress(START, trained(1))
    update |= {key.replace("__", "/"): value for key, value in changes.items()}
    return {key: value for key, value in update.items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("int8", {"a__scale": None}, r"update of a \(int8\): expected the parts .*scale.*, found values"),
        ("int8", {"a__extra": torch.zeros(1)}, "found extra"),
        ("int8", {"z__values": torch.zeros(1)}, "'z/values' belongs to no tensor that was sent"),
        ("int8", {"a__values": torch.zeros(60)}, "values torch.float32"),
        ("int8", {"a__values": torch.zeros(6, dtype=torch.int8)}, r"torch.int8 \[6\]"),
        ("int8", {"a__scale": torch.tensor([float("inf")])}, "a .*NaN or Inf"),
        # Each part is finite, their product is not.
        ("int8", {"a__scale": torch.tensor([3e38])}, "a .*NaN or Inf"),
        ("int4", {"a__packed": torch.zeros(35, dtype=torch.uint8)}, r"packed torch.uint8 \[36\], found .*\[35\]"),
        ("int4", {"a__packed": torch.full((36,), 255, dtype=torch.uint8)}, "a .*NaN or Inf"),
        ("fp16", {"a__values": torch.full((60,), float("nan")).half()}, "a .*NaN or Inf"),
        ("top-k", {"a__index": torch.tensor([0, 1, 2, 3, 4, 60]).int()}, "rising indices from 0 to 59"),
        ("top-k", {"a__index": torch.tensor([-1, 1, 2, 3, 4, 5]).int()}, "rising indices"),
        ("top-k", {"a__index": torch.tensor([0, 1, 1, 3, 4, 5]).int()}, "rising indices"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_name(kind, changes, said):
    with pytest.raises(UpdateError, match=said):
        codec(kind).apply(START, broken(kind, **changes))
