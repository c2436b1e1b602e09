"""With ``costs = "model"`` the planner's bytes are those that are sent: counted on real streams, links and messages."""

from dataclasses import replace

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import with_tail
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import update_codec
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.system.costs import model_costs
from helpers.federated_rounds import PLANS, control_units, federated_round
from helpers.tiny_models import CLASSIC, tiny_batch, tiny_spec
from strategies.records import ARRAYS, reply_content, to_tensors

ADAMW = OptimizerConfig(name="adamw", lr=0.01)
STEPS = 2
LABELS_STAY = with_tail(tiny_spec("llama", "causal-lm", dropout=0.0), {}, True)[0]
CASES = {
    "plain translation": (CLASSIC, {}),
    # A family whose TEBs are not alike.
    "tied masked-lm, fp16": (tiny_spec("modernbert", "masked-lm"), {"update": "fp16", "activations": "fp16"}),
    "adapters, int8": (
        replace(tiny_spec("bert", "sequence-classification"), lora=LoraConfig(rank=2)),
        {"update": "int8", "activations": "int8"},
    ),
    "adapters, top-k": (
        replace(tiny_spec("bert", "token-classification"), lora=LoraConfig(rank=2)),
        {"update": "top-k"},
    ),
    "adapters, int4": (
        replace(tiny_spec("llama", "causal-lm"), lora=LoraConfig(rank=2)),
        {"update": "int4"},
    ),
    # The gradients of the server's states go up, too, and no labels.
    "labels that stay": (LABELS_STAY, {}),
    "labels that stay, int8": (LABELS_STAY, {"activations": "int8"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_planned_bytes_are_the_bytes_that_are_sent(served, case):
    spec, options = CASES[case]
    compression = CompressionConfig(**options)
    batch = tiny_batch(spec, size=7, length=6, seed=1, padded=False)
    service, weights = served(ADAMW, "step", spec, codec=ActivationCodec(compression.activations))
    base = build_parts(spec, seed=1).frozen_weights()
    units = control_units(
        [batch], ADAMW, f"bytes-{case}", local_steps=STEPS, spec=spec, compression=compression, frozen=base
    )
    codec = update_codec(compression)
    begun = {name: value for name, value in weights.items() if not name.startswith("head.")}
    try:
        joined, (result,) = federated_round(units, service, weights, local_steps=STEPS, codec=codec)
    finally:
        units[0].close()
    assert joined.keys() == weights.keys() and any(not joined[name].equal(begun[name]) for name in begun)
    costs = model_costs(spec, sequence_length=6, batch_size=7, local_steps=STEPS, compression=compression)
    content = reply_content(result.weights, weight=1, loss=0.0, steps=STEPS, wall_s=0.0, report={})
    message = sum(tensor.nbytes for tensor in to_tensors(content[ARRAYS]).values())
    payload = result.report["payload_bytes"]
    assert payload["update"] == message == costs.upload_energy_bits / 8
    assert payload["up"] + payload["update"] == costs.upload_time_bits / 8
    # Each link carries the activations of all samples there, and the gradients back.
    links = len(PLANS[0].order) - 1
    assert result.report["link_bytes"] == STEPS * 7 * links * (costs.z_bits + costs.g_bits) / 8
    # What is not counted: headers of the stream's frames, at most 1 kB each.
    frames = STEPS * (PLANS[0].m + 1 + 8) + 2
    assert payload["up"] < result.report["stream_bytes"]["up"] < payload["up"] + 1024 * frames
