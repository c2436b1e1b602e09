"""Calls on a decoder's link out of their order: each is refused by name, by the stream and by the decoder at home."""

import pytest
import torch

from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from helpers.decoder_cases import batch_of, cut, head_trainer, service_of, step_id, train_step


def refused(message, call, *arguments):
    with pytest.raises(LinkError, match=message):
        call(*arguments)


def test_a_stream_refuses_what_comes_out_of_order():
    with service_of(num_clusters=1) as service:
        stream = DecoderStream.open(service.open_round(1, [0], 2)[0])
        (piece,) = cut(batch_of(0, 3), 1)
        refused("tied matrices were sent before begin_step", stream.send_tied, {})
        refused("a gradient of tied matrices was awaited before begin_step", stream.receive_tied)
        refused("a micro-batch was sent before begin_step", stream.send, 0, *piece)
        refused("a gradient was awaited before begin_step", stream.receive)
        refused("a step was closed before begin_step", stream.end_step, 1.0)
        stream.begin_step(step_id(0), 1, 1.0)
        refused("step 2 was begun while step 1 is open", stream.begin_step, step_id(0, 2), 1, 1.0)
        stream.drop_step()
        # What was dropped may begin anew; a stream without a step in progress is dropped without effect.
        stream.drop_step()
        gradients = train_step(stream, step_id(0), batch_of(0, 3), 1)
        assert [g.micro_batch for g in gradients] == [0] and gradients[0].norm_sq is not None
        train_step(stream, step_id(0, 2), batch_of(0, 3, seed=1), 1)
        assert stream.bytes_up > stream.payload_up > 0 and stream.bytes_down > stream.payload_down > 0
        stream.close()
        stream.close()
        stream.begin_step(step_id(0, 3), 1, 1.0)
        refused("the stream has ended; could not send a micro_batch frame", stream.send, 0, *piece)
        assert service.finish_round().clusters[0].steps == 2


def test_the_decoder_at_home_refuses_what_comes_out_of_order():
    local = LocalDecoder(head_trainer(), local_steps=2, timeout_s=0.05)
    (piece,) = cut(batch_of(0, 3), 1)
    refused("send before begin_step", local.send, 0, *piece)
    refused("end_step after 0 of 0 micro-batches", local.end_step, 1.0)
    refused("receive_tied after 0 of 0 micro-batches", local.receive_tied)
    refused("carries no target: expected a total weight above 0", local.begin_step, step_id(0), 1, 0.0)
    local.begin_step(step_id(0), 2, 12.0)
    refused("no activations of micro-batch 0 came within 0.05 s", local.receive)
    local.send(0, *piece)
    assert local.receive().norm_sq is None
    refused("end_step after 1 of 2 micro-batches", local.end_step, 1.0)
    refused("receive_tied after 1 of 2 micro-batches", local.receive_tied)
    local.send(1, *piece)
    second = local.receive()
    assert second.micro_batch == 1 and second.norm_sq > 0 and local.receive_tied() == {}
    local.end_step(1.0)
    refused("end_step after 2 of 2 micro-batches", local.end_step, 1.0)
    # Activations of a step that was dropped are forgotten with it.
    local.begin_step(step_id(0, 2), 1, 12.0)
    local.send(0, *piece)
    local.drop_step()
    refused("send before begin_step", local.send, 0, *piece)
    local.begin_step(step_id(0, 2), 1, 12.0)
    hidden, mask, targets = piece
    local.send(0, torch.full_like(hidden, torch.nan), mask, targets)
    refused("loss or gradient of micro-batch 0 holds NaN or Inf", local.receive)
    assert (local.is_remote, local.cuts, local.bytes_up, local.bytes_down) == (False, (), 0, 0)
    local.close()
