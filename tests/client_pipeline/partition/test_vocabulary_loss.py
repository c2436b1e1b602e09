"""The loss over a vocabulary in pieces is that of all scores at once, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from client_pipeline.partition import vocabulary_loss as module
from client_pipeline.partition.vocabulary_loss import vocabulary_loss

WIDTH, VOCABULARY = 6, 11


def case(count, trained=True):
    generator = torch.Generator().manual_seed(count)
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    with torch.no_grad():
        output.weight.normal_(generator=generator)
    output.requires_grad_(trained)
    states_ND = torch.randn(count, WIDTH, generator=generator).requires_grad_()
    return states_ND, output, torch.randint(VOCABULARY, (count,), generator=generator)


def outcome(loss_of, states_ND, output, labels_N):
    states_ND.grad = output.weight.grad = None
    loss = loss_of(states_ND, output, labels_N)
    (loss / 3).backward()
    return loss.detach(), states_ND.grad, output.weight.grad


def at_once(states_ND, output, labels_N):
    return F.cross_entropy(output(states_ND), labels_N, reduction="sum")


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_pieces_have_the_loss_and_the_gradients_of_the_whole(monkeypatch, count, trained):
    monkeypatch.setattr(module, "MOST_SCORES", 3 * VOCABULARY + 1)
    states_ND, output, labels_N = case(count, trained)
    expected = outcome(at_once, states_ND, output, labels_N)
    for value, other in zip(outcome(vocabulary_loss, states_ND, output, labels_N), expected, strict=True):
        assert (value is None) == (other is None)
        if value is not None:
            torch.testing.assert_close(value, other)
    with torch.no_grad():
        torch.testing.assert_close(vocabulary_loss(states_ND, output, labels_N), expected[0])


def test_a_vocabulary_beyond_the_limit_goes_one_position_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "MOST_SCORES", 2)
    states_ND, output, labels_N = case(4)
    torch.testing.assert_close(
        outcome(vocabulary_loss, states_ND, output, labels_N), outcome(at_once, states_ND, output, labels_N)
    )


def test_what_fits_is_computed_as_ever_bit_for_bit():
    states_ND, output, labels_N = case(8)
    for value, other in zip(
        outcome(vocabulary_loss, states_ND, output, labels_N),
        outcome(at_once, states_ND, output, labels_N),
        strict=True,
    ):
        assert torch.equal(value, other)


def test_never_are_more_scores_there_than_the_limit_says(monkeypatch):
    monkeypatch.setattr(module, "MOST_SCORES", 3 * VOCABULARY)
    sizes, linear = [], F.linear
    monkeypatch.setattr(module.F, "linear", lambda x, weight: sizes.append(len(x)) or linear(x, weight))
    vocabulary_loss(*case(8)).backward()
    assert sizes == [3, 3, 2]


def test_products_are_in_the_precision_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(module, "MOST_SCORES", 3 * VOCABULARY)
    states_ND, output, labels_N = case(8)

    def mixed(loss_of):
        def computed(*arguments):
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(*arguments)

        return outcome(computed, states_ND, output, labels_N)

    for value, other in zip(mixed(vocabulary_loss), mixed(at_once), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, other.float(), rtol=0.05, atol=0.05)
