"""TEB costs of real models against counts by hand."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_block, build_parts
from client_pipeline.families.registry import family_named
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, update_codec
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from client_pipeline.system.costs import model_costs, teb_costs
from client_pipeline.system.live_memory import pass_memory
from client_pipeline.system.scenario import load_scenario
from helpers.tiny_models import CONFIGS, tiny_spec
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy

BERT_BASE = ModelSpec(
    family="bert",
    head="sequence-classification",
    config={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "num_labels": 2,
    },
)


def by_hand(width, feed_forward, length):
    """Matrix products of one TEB: four of the attention, two of the feed-forward net, scores and their use."""
    return 2 * length * (4 * width**2 + 2 * width * feed_forward) + 4 * length**2 * width


@pytest.mark.parametrize("length", [1, 20, 64])
def test_flop_of_a_classic_teb_are_those_of_its_matrix_products(length):
    spec = transformer.spec(vocab_size=100, width=64, num_heads=4, feed_forward=160, encoder_layers=3)
    costs = teb_costs(spec, length)
    assert costs.forward_flop == by_hand(64, 160, length)
    assert costs.backward_flop == 2 * costs.forward_flop
    again = teb_costs(spec, length, recompute=True)
    assert again._replace(backward_flop=0, attention_flop=0) == costs._replace(backward_flop=0, attention_flop=0)
    assert again.backward_flop == 3 * costs.forward_flop
    assert costs.num_parameters == sum(p.numel() for p in build_parts(spec, 0).blocks[0].parameters())
    assert costs.activation_bits == 32 * length * 64


@pytest.mark.parametrize(("width", "heads", "feed_forward", "length"), [(64, 4, 160, 20), (32, 2, 48, 7)])
def test_what_waits_for_weight_gradients_is_inputs_and_output_gradients_of_all_layers(
    width, heads, feed_forward, length
):
    """Inputs: of query, key and value the same one, of the output, of both feed-forward layers. Gradients: of each."""
    spec = transformer.spec(vocab_size=100, width=width, num_heads=heads, feed_forward=feed_forward, encoder_layers=3)
    inputs, gradients = 3 * width + feed_forward, (1 + 2 + 1) * width + feed_forward + width
    with torch.device("meta"):
        block = build_block(spec, 0)
    one, two = (pass_memory(block, (samples, length, width)).saved_bytes for samples in (1, 2))
    assert teb_costs(spec, length).waiting_share == pytest.approx(4 * length * (inputs + gradients) / (two - one))


def test_flop_and_parameters_of_bert_base():
    costs = teb_costs(BERT_BASE, 128)
    assert costs.forward_flop == by_hand(768, 3072, 128)
    assert costs.num_parameters == 7_087_872
    assert costs.parameter_bytes == 4 * 7_087_872


@pytest.mark.parametrize(
    "spec",
    [
        transformer.spec(vocab_size=100, width=64, num_heads=4, feed_forward=160, encoder_layers=1, dropout=0.0),
        # Its bias learns, which the processor's kernel cannot.
        tiny_spec("t5", "seq2seq", dropout=0.0),
    ],
    ids=["transformer", "t5"],
)
def test_saved_bytes_are_those_that_a_real_forward_pass_keeps(spec):
    block, storages = build_parts(spec, 0).blocks[0], {}
    weights = {p.data_ptr() for p in block.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    family = family_named(spec.family)
    shape = (1 + family.carried_examples(spec), 30, family.width(spec))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(torch.randn(*shape, requires_grad=True), None)
    real = sum(storage.nbytes() for storage in storages.values())
    assert y.requires_grad
    # Attention is counted as the processor's kernel computes it.
    assert teb_costs(spec, 30).saved_bytes == pytest.approx(real, rel=0.02)


def test_memory_counts_optimizer_state_and_all_micro_batches():
    teb = teb_costs(BERT_BASE, 128)

    def memory(**changes):
        return model_costs(BERT_BASE, **{"sequence_length": 128, "batch_size": 16, **changes}).block_memory

    assert memory(optimizer="adamw") - memory(optimizer="sgd") == 2 * teb.parameter_bytes
    assert memory(batch_size=17) - memory() == teb.saved_bytes
    assert memory() == pytest.approx(0.25e9, rel=0.3)
    assert model_costs(BERT_BASE, sequence_length=128, batch_size=16).activation_memory == 16 * teb.saved_bytes


def test_uploads_count_the_encoder_and_the_activations_of_the_local_steps():
    costs = model_costs(BERT_BASE, sequence_length=128, batch_size=16, local_steps=3)
    embedding = (30522 + 512 + 2) * 768 + 2 * 768
    assert costs.upload_energy_bits == 32 * (embedding + 12 * 7_087_872)
    # Of each token its activations and its mask, of each sample its label.
    assert costs.upload_time_bits - costs.upload_energy_bits == 3 * 16 * (128 * (768 * 32 + 8) + 64)
    alone = model_costs(BERT_BASE, sequence_length=128, batch_size=16, local_steps=3, trains_head=True)
    head = 768 * 768 + 768 + 2 * 768 + 2
    assert alone.upload_time_bits == alone.upload_energy_bits == costs.upload_energy_bits + 32 * head


@pytest.mark.parametrize(("local_steps", "accumulation"), [(1, 4), (3, 2), (4, 1)])
def test_all_batches_of_all_local_steps_go_to_the_decoder(local_steps, accumulation):
    def stream_bits(**more):
        costs = model_costs(BERT_BASE, sequence_length=16, batch_size=8, **more)
        return costs.upload_time_bits - costs.upload_energy_bits

    found = stream_bits(local_steps=local_steps, gradient_accumulation=accumulation)
    assert found == local_steps * accumulation * stream_bits()


def test_adapters_of_bert_base_are_all_that_goes_up_and_all_that_has_gradients():
    lora = replace(BERT_BASE, lora=LoraConfig(rank=8))
    full, costs = (model_costs(spec, sequence_length=128, batch_size=16) for spec in (BERT_BASE, lora))
    # Query and value of 12 TEBs, A [8, 768] and B [768, 8].
    assert costs.upload_energy_bits == 32 * 12 * 2 * 2 * 8 * 768
    # Frozen matrices have no gradient of their own: the backward pass does little more than the forward pass.
    assert costs.o_f > full.o_f and costs.o_b < 1.05 * full.o_f
    block = teb_costs(lora, 128)
    trained, frozen = 4 * 2 * 2 * 8 * 768, 4 * 7_087_872
    assert costs.block_memory == frozen + 4 * trained + 16 * block.saved_bytes


@pytest.mark.parametrize(
    ("update", "size"), [("fp16", 2 * 6144 + 4), ("int8", 6144 + 4), ("int4", 3264 + 4), ("top-k", 8 * 62)]
)
def test_compressed_bytes_are_what_is_planned_with(update, size):
    lora = replace(BERT_BASE, lora=LoraConfig(rank=8))
    compression = CompressionConfig(update=update, density=0.01, activations="int8")
    costs = model_costs(lora, sequence_length=128, batch_size=16, compression=compression)
    assert costs.upload_energy_bits == 8 * 12 * 4 * size
    assert costs.z_bits == costs.g_bits == 8 * 128 * (768 + 4)


@pytest.mark.parametrize(
    ("name", "update", "lora"),
    [(name, "top-k", None) for name in (*CONFIGS, "modernbert-mean", "deberta-v2-relative", "t5-1.1")]
    + [("modernbert", "none", None), ("deberta-v2", "fp16", None)]
    + [(name, "int8", LoraConfig(rank=2, targets="all-linear")) for name in ("modernbert", "deberta-v2", "marian")],
)
def test_planned_uploads_of_every_family_are_the_bytes_of_its_encoder(name, update, lora):
    # Once TEB 0 stood for all: ModernBERT's norms before the attention were missing, DeBERTa's convolution was there
    # as often as there are TEBs.
    spec, compression = replace(tiny_spec(name), lora=lora), CompressionConfig(update=update, density=0.1)
    weights, codec = build_parts(spec, seed=0).weights(head=False), update_codec(compression)
    start = {key: torch.zeros_like(value) for key, value in weights.items()}
    sent = ErrorFeedback(codec).compress(start, weights) if codec else weights
    planned = model_costs(spec, sequence_length=6, batch_size=2, compression=compression).upload_energy_bits / 8
    assert planned == sum(tensor.nbytes for tensor in sent.values())


def test_c8_of_table2_lets_adapters_up_and_not_the_encoder():
    scenario = load_scenario("table2")
    answers = []
    for lora in (None, LoraConfig(rank=8)):
        spec = replace(BERT_BASE, lora=lora)
        costs = model_costs(spec, sequence_length=32, batch_size=64)
        network = replace(scenario, costs=costs, planner=replace(scenario.planner, num_blocks=12, batch_size=64))
        decision = RoundPlanner(network, make_policy("dssda")).plan(1, [math.inf] * 3)
        answers.append(decision.answer)
    full, adapters = answers
    assert not any(c.selected for c in full.clusters)
    assert {i.constraint for i in full.infeasible} == {"C8"}
    assert adapters.status == "optimal" and all(c.selected for c in adapters.clusters)
    assert max(c.uplink_energy_j for c in adapters.clusters) <= 10.0
    with pytest.raises(ValueError, match="optimizer: expected one of sgd, momentum, adamw, found 'lion'"):
        model_costs(BERT_BASE, sequence_length=8, batch_size=1, optimizer="lion")


@pytest.mark.slow
def test_the_planner_imports_neither_torch_nor_flower_nor_ray_and_cvxpy_only_to_solve():
    script = (
        "import sys, flower_app.planning.plan, flower_app.compare.planned, client_pipeline.system.costs\n"
        "print([m for m in ('torch', 'flwr', 'ray', 'cvxpy', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.strip() == "[]"
