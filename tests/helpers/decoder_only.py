"""Small configurations of decoder-only model types, whose factors are never 1."""

from functools import cache

from transformers import AutoConfig

from client_pipeline.families.decoder_table import MISSING_SETTINGS
from client_pipeline.families.hugging_face import spec_from_config
from client_pipeline.families.proof import small_copy

FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
    "logit_scale": 0.4,
    "final_logit_softcapping": 1.5,
    "attn_logit_softcapping": 2.0,
    "mup_enabled": True,
    "query_pre_attn_scalar": 5,
    "scale_emb": 3.0,
    "scale_attn_by_inverse_layer_idx": True,
    "lm_head_multiplier": 0.6,
    "norm_eps": 1e-3,
    "routed_scaling_factor": 1.7,
    "moe_routed_scaling_factor": 1.7,
    "router_scaling_factor": 1.7,
    "route_scale": 1.7,
    "logits_soft_cap": 1.5,
    "embedding_scale": 3.0,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.4,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8,
    "logits_mup_width_multiplier": 2.0,
    "scale_depth": 2.1,
    "attention_value_scale": 0.7,
    "swiglu_limit": 1.0,
    "scale_embedding": True,
}


@cache
def small_spec(model_type, server_layers=1, head="causal-lm"):
    """Give a small specification of a model type with factors, or say why there is none."""
    missing = MISSING_SETTINGS.get(model_type, {})
    default = AutoConfig.for_model(model_type, **missing)
    settings = default.to_dict()
    factors = {name: value for name, value in FACTORS.items() if settings.get(name) is not None}
    spec = spec_from_config(AutoConfig.for_model(model_type, **factors, **missing), head, server_layers=server_layers)
    small, reason = small_copy(spec)
    assert small is not None, reason
    return small
