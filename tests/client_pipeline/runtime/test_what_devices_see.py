"""Data that leaves the control unit for its devices: activations, gradients, masks, blocks; no token ids, no labels."""

import pickle

import torch

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.transport.transport import GlooTransport
from helpers import thread_ray
from helpers.recovery_cases import SPEC, Examples, control_unit, initial, train, within
from helpers.thread_ray import run_in_threads

ROWS = []
"""Token ids and labels of the examples that were drawn, one tensor an example."""


class RecordedExamples(Examples):
    def collate(self, indices, seed=0):
        batch = super().collate(indices, seed)
        ROWS.extend([*batch["input_ids"], *batch["labels"]])
        return batch


def spellings(row):
    """A row of numbers as it may stand among bytes."""
    types = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32)
    return [*(row.to(kind).numpy().tobytes() for kind in types), pickle.dumps(row.tolist())[2:-1]]


def test_no_token_id_and_no_label_reaches_a_device(monkeypatch):
    ROWS.clear()
    calls, tensors = [], []

    def recorded_message(value):
        data = message_of(value)
        calls.append(data)
        return data

    message_of, send = thread_ray.message_of, GlooTransport.send

    def recorded_send(self, tensor, peer, direction, micro_batch):
        tensors.append(tensor.detach().clone())
        send(self, tensor, peer, direction, micro_batch)

    run_in_threads(monkeypatch)
    monkeypatch.setattr(thread_ray, "message_of", recorded_message)
    monkeypatch.setattr(GlooTransport, "send", recorded_send)
    unit = control_unit("seen", load_data=RecordedExamples)
    weights = initial()
    try:
        within(60.0, train, unit, weights, (1,), ClusterPlan(delta=(2, 2, 0), order=(0, 1), m=3))
    finally:
        unit.close()
    # As there is a step in each direction to and from both, something was heard.
    assert len(ROWS) >= 12 and len(tensors) >= 12 and len(calls) > 10
    width = SPEC.config["width"]
    assert {(tensor.dtype, tensor.dim(), tensor.shape[-1]) for tensor in tensors} == {(torch.float32, 3, width)}
    heard = [*calls, *(tensor.numpy().tobytes() for tensor in tensors)]
    assert not [row for row in ROWS for spelling in spellings(row) if any(spelling in data for data in heard)]
    # Nor is a device told where the text is.
    assert not [data for data in calls if b"RecordedExamples" in data]
    # Of the model a device has its blocks: what is looked for would have been found.
    held = {name for name, value in weights.items() if any(value.numpy().tobytes() in data for data in calls)}
    blocks = {name for name in weights if name.startswith("block")}
    assert blocks <= held and not {name for name in held - blocks if weights[name].unique().numel() > 1}
