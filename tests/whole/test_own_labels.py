"""Labels that stay in the clusters: the server returns its blocks' states, and the round is that of the other split."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import with_tail
from client_pipeline.link.frames import decode
from client_pipeline.link.reopened_connection import DecoderConnection
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.federated_rounds import LR, central_gradient, control_units, federated_round
from helpers.tiny_models import tiny_batch, tiny_spec

pytestmark = pytest.mark.slow
PLANS = [
    ClusterPlan(delta=(2, 3), order=(1, 0), m=3, schedule="zb-h1"),
    ClusterPlan(delta=(1, 0, 4), order=(0, 2), m=2, schedule="1f1b"),
]
SIZES = [(7, 9), (5, 6)]
"""Examples and positions of each cluster's batch."""
ADAPTERS = LoraConfig(rank=2, targets="all-linear", head="adapters")


def cut(family, lora=None):
    """Return a tiny model whose tail is the control unit's, and the same with the server's."""
    spec = tiny_spec(family, "causal-lm", dropout=0.0)
    spec = replace(spec, config={**spec.config, "server_layers": 2}, lora=lora)
    return with_tail(spec, {}, True)[0], spec


def batches(spec):
    return [tiny_batch(spec, size=size, length=length, seed=n) for n, (size, length) in enumerate(SIZES, start=1)]


def one_round(served, spec, optimizer, run, local_steps):
    """One round; returns the weights before and after it, and the clusters' results."""
    service, start = served(optimizer, spec=spec)
    frozen = build_parts(spec, seed=1).frozen_weights()
    units = control_units(batches(spec), optimizer, run, spec=spec, local_steps=local_steps, frozen=frozen)
    try:
        return start, *federated_round(units, service, start, local_steps=local_steps, plans=PLANS)
    finally:
        for unit in units:
            unit.close()


def both_rounds(served, family, optimizer, lora=None, local_steps=1):
    """The round with labels in the clusters and the one with labels on the server, with the former's names."""
    own, other = cut(family, lora)
    start, joined, results = one_round(served, own, optimizer, f"own-{family}-{local_steps}", local_steps)
    there, sent, expected = one_round(served, other, optimizer, f"sent-{family}-{local_steps}", local_steps)
    there, sent = (with_tail(other, weights, True)[1] for weights in (there, sent))
    assert start.keys() == there.keys() and all(torch.equal(start[name], there[name]) for name in start)
    return own, start, joined, results, sent, expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_a_round_of_one_sgd_step_equals_the_other_split_and_one_central_step(served, family):
    """LLaMA's output layer is its own; GPT-2's and Qwen2's is the embedding, which gets both gradients here."""
    spec, start, joined, results, sent, expected = both_rounds(served, family, OptimizerConfig(name="sgd", lr=LR))
    gradients, _ = central_gradient(batches(spec), start, spec)
    assert joined.keys() == sent.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(joined[name], start[name] - LR * gradient, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(joined[name], sent[name], rtol=1e-5, atol=1e-6)
    for mine, others, (size, length) in zip(results, expected, SIZES, strict=True):
        assert mine.weight == others.weight and abs(mine.loss - others.loss) < 1e-5
        # Activations and the states' gradient with a mask go up, states and the activations' gradient come down.
        moved = 2 * size * length * 16 * 4
        assert mine.report["payload_bytes"]["up"] == moved + size * length
        assert mine.report["payload_bytes"]["down"] == moved


def test_with_adapters_more_steps_and_clipping_are_those_of_the_other_split(served):
    optimizer = OptimizerConfig(name="adamw", lr=0.01, clip_norm=0.05)
    _, start, joined, results, sent, expected = both_rounds(served, "qwen2", optimizer, ADAPTERS, local_steps=3)
    assert joined.keys() == sent.keys() and not any(name.startswith("embedding.") for name in joined)
    assert all(not torch.equal(joined[name], start[name]) for name in joined if "lora_B" in name)
    for name, value in sent.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-4, atol=1e-5)
    assert [r.loss for r in results] == pytest.approx([r.loss for r in expected], rel=1e-5)


def test_no_frame_holds_a_label_or_a_token(served, monkeypatch):
    frames, own = [], DecoderConnection.put
    monkeypatch.setattr(DecoderConnection, "put", lambda self, data, step: frames.append(data) or own(self, data, step))
    both_rounds(served, "llama", OptimizerConfig(name="sgd", lr=LR))
    kinds = {}
    for frame in map(decode, frames):
        kinds.setdefault(frame.kind, set()).update((name, t.dtype) for name, t in frame.tensors.items())
    # The round of the other split is recorded, too.
    assert ("target.labels", torch.int64) in kinds.pop("micro_batch")
    assert kinds["forward"] == {("hidden", torch.float32), ("mask", torch.bool)}
    assert kinds["states_gradient"] == {("gradient", torch.float32)}
    assert kinds.keys() == {"forward", "states_gradient", "step_end", "bye"} and not kinds["step_end"]
