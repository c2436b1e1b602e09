"""The loss over a vocabulary in pieces is that of all scores at once, and so are its gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from client_pipeline.families import vocabulary_loss as module
from client_pipeline.families.vocabulary_loss import vocabulary_loss

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


def test_what_fits_is_computed_as_ever_bit_for_bit():
    states_ND, output, labels_N = case(8)
    for value, other in zip(
        outcome(vocabulary_loss, states_ND, output, labels_N),
        outcome(at_once, states_ND, output, labels_N),
        strict=True,
    ):
        assert torch.equal(value, other)
