"""All counted costs of one small model at once: a change of any of them shows."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from client_pipeline.partition.spec import LoraConfig
from client_pipeline.system.costs import TebCosts, model_costs, teb_costs
from client_pipeline.system.live_memory import PassMemory, pass_memory, waiting_for_weights
from helpers.tiny_models import tiny_spec

LLAMA = replace(tiny_spec("llama", "causal-lm", dropout=0.0), lora=LoraConfig(rank=2), base_dtype="int8")


def test_a_teb_of_a_sliceable_model_with_adapters_on_packed_matrices():
    found = teb_costs(LLAMA, 5)
    # q, k, v and o of 16 -> 16, 8, 8, 16; three matrices of 16 x 32; adapters of rank 2 on q and v; scores and values.
    matrices = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32
    adapters = 2 * (16 + 16) + 2 * (16 + 8)
    assert found.forward_flop == 2 * 5 * (matrices + adapters) + 2 * 2 * 5 * 5 * 16
    assert found.num_parameters == matrices + adapters + 2 * 16
    assert found.trained_bytes == 4 * adapters and found.weight_flop == 2 * 5 * adapters
    # A byte a number and a float a row, norms and adapters whole.
    rows = 16 + 8 + 8 + 16 + 32 + 32 + 16
    assert found.parameter_bytes == matrices + 4 * (rows + adapters + 2 * 16)
    assert found.attention_flop == 3 * 2 * 2 * 5 * 5 * 16
    # Keys and values of two key-value heads of 4; three of five tokens are in the first slice.
    assert found.later_keys_bytes == 2 * 8 * 5 * 4
    assert found == TebCosts(
        forward_flop=25760,
        backward_flop=28480,
        num_parameters=2448,
        parameter_bytes=3392,
        trained_bytes=448,
        saved_bytes=4200,
        weight_flop=1120,
        pass_bytes=4096,
        pass_sample_bytes=640,
        activation_bits=32 * 5 * 16,
        attention_flop=4800.0,
        kept_keys_bytes=896,
        later_keys_bytes=320,
        waiting_share=960 / 4040,
    )
    again = teb_costs(LLAMA, 5, recompute=True)
    assert again == found._replace(backward_flop=28480 + 25760, attention_flop=4800.0 + 1600.0)
    # One token has no slices.
    alone = teb_costs(replace(LLAMA, base_dtype="float32"), 1)
    assert (alone.kept_keys_bytes, alone.later_keys_bytes, alone.pass_bytes, alone.saved_bytes) == (0, 0, 0, 840)


def test_the_costs_of_a_round_are_sums_over_its_parts():
    costs = model_costs(LLAMA, sequence_length=5, batch_size=3, local_steps=3, gradient_accumulation=2)
    adapters, held = 5 * 448, 3392 + 448 * (1 + 2)
    stream = 3 * 2 * 3 * (5 * 16 * 4 + 5 * (1 + 8))
    assert asdict(costs) == {
        "o_f": 25760.0,
        "o_b": 28480.0,
        "o_b_scaling": "sample",
        "t0": 0.0,
        "teb_shares": (),
        "z_bits": 2560.0,
        "g_bits": 2560.0,
        "act_scaling": "sample",
        "lat": 0.0,
        "downlink_rate": 0.0,
        "decoder_s": 0.0,
        "weight_share": 1120 / 28480,
        "attention_share": 4800 / (25760 + 28480),
        "kept_keys_share": 896 / 4200,
        "memory": {
            "held_bytes": held,
            "saved_sample_bytes": 4200,
            "activation_sample_bytes": 320.0,
            "pass_bytes": 4096,
            "pass_sample_bytes": 640,
            "kept_keys_sample_bytes": 896,
            "later_keys_sample_bytes": 320,
            "waiting_share": 960 / 4040,
            "recompute": False,
        },
        "upload_time_bits": 8.0 * (adapters + stream),
        "upload_energy_bits": 8.0 * adapters,
        "upload_activation_bits": 0.0,
        "block_memory": held + 3 * 4200,
        "activation_memory": 3 * 4200,
        "device_memory": 4096 + 3 * (640 + 2 * 320),
    }


def test_matrices_that_the_decoder_reads_go_up_for_every_step_but_the_first():
    t5 = tiny_spec("t5", "seq2seq")

    def stream_bits(steps):
        costs = model_costs(t5, sequence_length=5, batch_size=3, local_steps=steps)
        return costs.upload_time_bits - costs.upload_energy_bits

    # The embedding of 40 words.
    assert stream_bits(3) == 3 * stream_bits(1) + 2 * 32 * 40 * 16


class TwoLayers(nn.Module):
    """As a TEB is called."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x_BTD, mask_BT):
        return self.outer(torch.relu(self.inner(x_BTD)))


@pytest.mark.parametrize("trained", [True, False])
def test_the_memory_of_two_layers_by_hand(trained):
    with torch.device("meta"):
        block = TwoLayers().requires_grad_(trained)
    row, inner_row = 2 * 3 * 4 * 4, 2 * 3 * 8 * 4
    found = pass_memory(block, (2, 3, 4))
    saved_bytes = (row if trained else 0) + inner_row
    assert found.saved_bytes == saved_bytes
    assert waiting_for_weights(block, (2, 3, 4)) == (2 * (row + inner_row) if trained else 0)
    # The outputs of three operations, and the gradients of the first two.
    assert found == PassMemory(saved_bytes, row + 4 * inner_row)
