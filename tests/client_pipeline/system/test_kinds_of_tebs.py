"""Costs of models whose TEBs are of several kinds: experts, windows, and layers without attention."""

from dataclasses import replace

import pytest

from client_pipeline.families.hugging_face import SERVER_LAYERS
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from client_pipeline.system import costs as costs_module
from client_pipeline.system.costs import all_teb_costs, model_costs, teb_costs
from helpers.tiny_models import tiny_spec

WIDTH, INNER, EXPERT, EXPERTS, VISITED = 32, 48, 16, 8, 2
MOE = ModelSpec(
    family="qwen3_moe",
    head=CAUSAL_LM,
    config={
        "vocab_size": 50,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": VISITED,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mlp_only_layers": [0, 3],
    },
)


def attention_flop(length):
    return 2 * length * WIDTH * (2 * WIDTH + 2 * WIDTH // 2) + 4 * length**2 * WIDTH


def test_a_dense_teb_among_those_of_experts_is_counted_as_one():
    costs = teb_costs(MOE, 10)
    assert costs.forward_flop == attention_flop(10) + 2 * 10 * 3 * WIDTH * INNER
    assert costs.backward_flop == 2 * costs.forward_flop


def test_a_token_works_with_the_experts_that_it_visits_and_memory_holds_all_of_them():
    length = 10
    costs = teb_costs(MOE, length, index=1)
    router = 2 * length * WIDTH * EXPERTS
    assert costs.forward_flop == attention_flop(length) + router + 2 * length * VISITED * 3 * WIDTH * EXPERT
    assert costs.backward_flop == 2 * costs.forward_flop
    norms, heads_norms = 2 * WIDTH, 2 * 8
    projections = WIDTH * (2 * WIDTH + 2 * WIDTH // 2)
    assert costs.num_parameters == norms + heads_norms + projections + EXPERTS * (WIDTH + 3 * WIDTH * EXPERT)
    assert costs.trained_bytes == costs.parameter_bytes == 4 * costs.num_parameters


def test_each_kind_of_teb_is_counted_once(monkeypatch):
    asked = []

    def counted(spec, length, *, index, **passes):
        asked.append(index)
        return f"costs of {index}"

    monkeypatch.setattr(costs_module, "teb_costs", counted)
    assert all_teb_costs(MOE, 10) == tuple(f"costs of {i}" for i in (0, 1, 1, 0))
    assert asked == [0, 1]
    with_server = replace(MOE, config=MOE.config | {SERVER_LAYERS: 2})
    assert all_teb_costs(with_server, 10) == ("costs of 0", "costs of 1")
    assert len(set(all_teb_costs(tiny_spec("llama", "causal-lm"), 10))) == 1
    assert set(all_teb_costs(tiny_spec("deberta-v2", "sequence-classification"), 10)) == {"costs of 0"}


def test_layers_with_a_window_are_a_kind_of_their_own(monkeypatch):
    monkeypatch.setattr(costs_module, "teb_costs", lambda spec, length, *, index, **passes: index)
    windows = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    dense = {key: value for key, value in MOE.config.items() if "exp" not in key and "mlp" not in key}
    spec = replace(MOE, family="qwen2", config=dense | windows)
    assert all_teb_costs(spec, 9) == (0, 1, 0, 1)


def test_costs_of_a_model_are_the_largest_of_its_tebs_and_shares_say_what_each_costs():
    sizes = {"sequence_length": 10, "batch_size": 4}
    costs, (dense, experts) = model_costs(MOE, **sizes), all_teb_costs(MOE, 10)[:2]
    assert dense.forward_flop > experts.forward_flop and experts.parameter_bytes > dense.parameter_bytes
    assert (costs.o_f, costs.o_b) == (dense.forward_flop, dense.backward_flop)
    share = experts.forward_flop / dense.forward_flop
    assert costs.teb_shares == pytest.approx((1.0, share, share, 1.0))
    assert costs.memory.held_bytes == 4 * experts.parameter_bytes
    assert model_costs(tiny_spec("llama", "causal-lm"), **sizes).teb_shares == ()


def test_a_teb_that_needs_data_to_be_counted_is_refused_with_the_remedy(monkeypatch):
    def fail(*_):
        raise RuntimeError("nonzero is not supported\nfor meta tensors")

    monkeypatch.setattr(costs_module, "_counted_teb", fail)
    expected = 'costs = "model": TEB 2 of model type \'qwen3_moe\' .* nonzero is not supported; set costs = "scenario"'
    with pytest.raises(ValueError, match=expected):
        teb_costs(MOE, 10, index=2)


def test_the_loss_of_routers_is_refused_where_the_configuration_asks_for_it():
    asking = replace(MOE, config=MOE.config | {"output_router_logits": True})
    with pytest.raises(ValueError, match="qwen3_moe: output_router_logits: expected false, found True: .* config.json"):
        teb_costs(asking, 10)
