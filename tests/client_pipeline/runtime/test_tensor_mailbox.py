"""Tensors that come before, after and while they are asked for, and those that never come."""

import threading
from dataclasses import replace

import pytest
import torch

from client_pipeline.runtime.transport.tensor_mailbox import TensorKey, TensorMailbox
from client_pipeline.runtime.transport.transport import TransportError

KEY = TensorKey(peer=1, direction=0, tag=5)
BYTES = torch.arange(8, dtype=torch.uint8)


@pytest.fixture
def mailbox():
    return TensorMailbox(0.05)


def buffer(dtype=torch.float32, size=2):
    return torch.zeros(size, dtype=dtype)


def test_a_tensor_that_is_asked_for_first_is_written_where_it_is_wanted(mailbox):
    receive = mailbox.post(KEY, buffer())
    place = mailbox.place_for(KEY, 8)
    assert place is receive.tensor and not receive.has_arrived
    place.view(torch.uint8).copy_(BYTES)
    mailbox.arrived(KEY, place)
    assert receive.has_arrived and torch.equal(mailbox.take(KEY, receive).view(torch.uint8), BYTES)


@pytest.mark.parametrize("is_posted_first", [True, False])
def test_a_tensor_that_comes_first_is_kept_for_whoever_asks(mailbox, is_posted_first):
    if is_posted_first:
        receive = mailbox.post(KEY, buffer())
        mailbox.arrived(KEY, BYTES.clone())
    else:
        mailbox.arrived(KEY, BYTES.clone())
        receive = mailbox.post(KEY, buffer())
        # It is given once.
        with pytest.raises(TransportError, match="nothing came in 0.05 s"):
            mailbox.take(KEY, mailbox.post(KEY, buffer()))
    assert torch.equal(mailbox.take(KEY, receive).view(torch.uint8), BYTES)


@pytest.mark.parametrize("is_posted_first", [True, False])
def test_a_tensor_of_another_size_is_refused(mailbox, is_posted_first):
    if is_posted_first:
        mailbox.post(KEY, buffer(size=3))
        with pytest.raises(TransportError, match="expected a tensor of 12 bytes, found one of 8"):
            mailbox.place_for(KEY, 8)
        return
    mailbox.arrived(KEY, BYTES)
    with pytest.raises(TransportError, match="expected a tensor of 12 bytes, found one of 8"):
        mailbox.post(KEY, buffer(size=3))


def test_one_that_is_in_the_way_of_another_is_kept_aside():
    mailbox = TensorMailbox(20.0)
    other = replace(KEY, tag=6)
    receive, taken = mailbox.post(other, buffer()), []
    waiting = threading.Thread(target=lambda: taken.append(mailbox.take(other, receive)), daemon=True)
    waiting.start()
    # The other thread waits for tag 6, and tag 5 comes before it on the same connection.
    aside = mailbox.place_for(KEY, 8)
    assert aside.dtype == torch.uint8 and aside.shape == (8,)
    mailbox.arrived(KEY, aside.copy_(BYTES))
    mailbox.arrived(other, BYTES.flip(0))
    waiting.join(120)
    assert torch.equal(taken[0].view(torch.uint8), BYTES.flip(0))
    assert torch.equal(mailbox.take(KEY, mailbox.post(KEY, buffer())).view(torch.uint8), BYTES)


def test_whoever_waits_for_a_lost_peer_hears_the_first_reason(mailbox):
    mailbox.lose(1, 0, "it ended")
    mailbox.lose(1, 0, "again")
    with pytest.raises(TransportError, match="^it ended$"):
        mailbox.take(KEY, mailbox.post(KEY, buffer()))
    # The other direction, and other peers, are there.
    for key in (replace(KEY, direction=1), replace(KEY, peer=2)):
        with pytest.raises(TransportError, match="nothing came"):
            mailbox.take(key, mailbox.post(key, buffer()))
    # What had come before the loss is there, too.
    later = replace(KEY, tag=6)
    mailbox.arrived(later, BYTES)
    assert mailbox.take(later, mailbox.post(later, buffer())).nbytes == 8


def test_a_closed_mailbox_ends_all_waits(mailbox):
    receive = mailbox.post(KEY, buffer())
    mailbox.close()
    for call in (lambda: mailbox.take(KEY, receive), lambda: mailbox.place_for(replace(KEY, tag=9), 8)):
        with pytest.raises(TransportError, match="this member has left the group"):
            call()
