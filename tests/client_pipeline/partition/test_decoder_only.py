"""Any decoder-only model of the library, cut, is the library's model: outputs, loss and every gradient."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from client_pipeline.families.families import build_embedding, build_parts
from client_pipeline.families.hugging_face import SERVER_LAYERS, sized_config, spec_from_config
from client_pipeline.families.proof import check_cut, cut_difference
from client_pipeline.families.registry import is_decoder_only, library_family
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.system.costs import teb_costs
from helpers.decoder_only import small_spec

FIRST = "cohere gemma2 gemma3_text gpt2 gpt_neox granite llama olmo2 phi3 qwen3_moe".split()
OTHERS = """
    afmoe arcee biogpt bloom codegen cohere2 deepseek_v3 diffllama ernie4_5 exaone4 falcon falcon_mamba gemma glm4
    gpt_bigcode gpt_neo gpt_oss gptj granitemoe helium hunyuan_v1_dense mamba2 minicpm3 ministral mistral mixtral mpt
    nemotron olmo opt persimmon phi qwen2 qwen3 smollm3 stablelm starcoder2
""".split()
ADAPTERS = LoraConfig(rank=2, targets="all-linear")
OWN_TARGETS = {"falcon_mamba": "in_proj,x_proj,out_proj"}
"""Of types with a linear layer that the library does not call."""


def check(model_type, cut, attention="", lora=None):
    """Compare a small model whose server has this share of the layers that it may have."""
    spec = small_spec(model_type)
    most = library_family(model_type).library_config(spec).num_hidden_layers - 1
    changes = {SERVER_LAYERS: round(cut * most)} | ({"attn_implementation": attention} if attention else {})
    if lora and model_type in OWN_TARGETS:
        lora = replace(lora, targets=OWN_TARGETS[model_type])
    parts = build_parts(replace(spec, config=spec.config | changes, lora=lora), seed=0)
    if attention:
        assert parts.reference.config._attn_implementation == attention
    assert cut_difference(parts) == ""
    return parts


@pytest.mark.parametrize("model_type", FIRST)
def test_a_cut_model_is_the_whole_one(model_type):
    check(model_type, cut=0.5)


# The most used ones, in all ways; the others, in two of them.
WAYS = [(model_type, *way) for model_type in FIRST for way in (("eager", None), ("", ADAPTERS))]
WAYS += [(model_type, *way) for model_type in FIRST + OTHERS for way in (("", None), ("eager", ADAPTERS))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "attention", "lora"),
    WAYS,
    ids=lambda value: "adapters" if isinstance(value, LoraConfig) else value or "",
)
def test_each_cut_is_the_whole_model_with_its_factors_caps_and_windows(model_type, attention, lora):
    for cut in (0, 0.5, 1):
        parts = check(model_type, cut, attention, lora)
        adapters = [parameter for name, parameter in parts.named_parameters() if ".lora_" in name]
        assert bool(adapters) == (lora is not None)
        if lora:
            # The whole model has the same ones, none of them zero, and nothing else but the head is trained.
            in_whole = {id(parameter) for parameter in parts.reference.parameters()}
            assert all(id(parameter) in in_whole and parameter.any() for parameter in adapters)
            assert all(".lora_" in name or name.startswith("head.") for name, _ in parts.named_parameters())


def test_an_embedding_keeps_nothing_of_the_batches_that_it_has_seen():
    embedding = build_embedding(small_spec("llama"))
    mask_BT = torch.ones(5, 11, dtype=torch.bool)
    mask_BT[0, -3:] = False
    for _ in range(3):
        embedding({"input_ids": torch.zeros(5, 11, dtype=torch.long), "attention_mask": mask_BT})
    kept = [found for found in gc.get_objects() if type(found) is torch.Tensor and found.shape == (5, 1, 11, 11)]
    assert not kept


def test_what_a_model_drops_in_its_loop_is_dropped_while_it_trains():
    spec = small_spec("xglm")
    embedding = build_embedding(replace(spec, config=spec.config | {"dropout": 0.5}))
    with torch.no_grad():
        embedding.embed_tokens.weight.fill_(1.0)
    ids = {"input_ids": torch.full((4, 9), 7), "attention_mask": torch.ones(4, 9, dtype=torch.bool)}
    assert 0.3 < float((embedding.train()(ids) == 0).float().mean()) < 0.7
    assert not (embedding.eval()(ids) == 0).any()
    with pytest.raises(ValueError, match=r"'xglm' cannot be split: it skips whole layers at random, .* set it to 0"):
        check_cut(replace(spec, config=spec.config | {"layerdrop": 0.1}))


@pytest.mark.slow
def test_adapters_that_no_gradient_reaches_and_layers_that_are_never_called_are_refused_by_name():
    spec = small_spec("falcon_mamba")
    with pytest.raises(ValueError, match=r"^lora.targets: no gradient reaches adapters of dt_proj: "):
        check_cut(replace(spec, lora=ADAPTERS))
    chosen = replace(spec, lora=replace(ADAPTERS, targets=OWN_TARGETS["falcon_mamba"]))
    check_cut(chosen)
    with pytest.raises(ValueError, match=r"^model.base-dtype: int8: model type 'falcon_mamba' does not train with it"):
        check_cut(replace(chosen, base_dtype="int8"))


def test_a_head_holds_no_graph_after_its_scores():
    parts = build_parts(small_spec("gemma2"), seed=0)
    states_BTD = torch.randn(2, 5, library_family("gemma2").width(parts.spec), requires_grad=True)
    parts.head.scores(states_BTD).sum().backward()
    copy.deepcopy(parts.head)


def test_a_refusal_names_the_model_type():
    config = AutoConfig.for_model("nanochat", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=61)
    with pytest.raises(ValueError, match=r"^model type 'nanochat' cannot be split: its closing norm"):
        build_parts(spec_from_config(config, "causal-lm"), seed=0)
    assert is_decoder_only("opt") and not is_decoder_only("big_bird")


def test_tebs_whose_values_are_narrower_than_their_queries_are_counted():
    spec = small_spec("deepseek_v3")
    config = library_family("deepseek_v3").library_config(spec)
    query, value, heads = config.qk_head_dim, config.v_head_dim, config.num_attention_heads
    assert query != value
    # Scores and values of T tokens with T tokens, beyond what grows with T alone.
    at_8, at_16 = (teb_costs(spec, length).forward_flop for length in (8, 16))
    assert at_16 - 2 * at_8 == 2 * heads * (query + value) * (16**2 - 2 * 8**2)


@pytest.mark.parametrize("family", ["opt", "xglm", "falcon"])
def test_fresh_models_have_the_sizes_that_are_asked_for(family):
    sizes = {"vocab_size": 61, "width": 32, "num_heads": 4, "feed_forward": 48, "num_layers": 2, "dropout": 0.0}
    config = sized_config(family, **sizes, max_length=16, pad_id=0, bos_id=1, eos_id=2)
    parts = library_family(family).unfilled_parts(spec_from_config(config, "causal-lm", server_layers=1))
    assert 48 in {size for parameter in parts.blocks[0].parameters() for size in parameter.shape}
