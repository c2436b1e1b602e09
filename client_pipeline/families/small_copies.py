"""Small copies of a model's own configuration: the same kinds of layers, factors and norms, in sizes that cost nothing.

Windows are shorter than the sequences that a copy is tried with, and each kind of layer is there twice where the model
has it twice. No rule knows all models: several copies are tried, and the first that the library runs is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from client_pipeline.families.causal import CannotSplit
from client_pipeline.families.families import without_dropout
from client_pipeline.families.hugging_face import SERVER_LAYERS
from client_pipeline.families.registry import library_family
from client_pipeline.partition.spec import SEQUENCE_CLASSIFICATION, ModelSpec

VOCABULARY = 61
PADDING = 0
_MOST_PARAMETERS = 30_000_000
"""Of a small copy: 120 MB of weights, and as much of gradients."""
_MOST_WIDTH = 1024
"""Of a copy that keeps the model's own: more would be too many parameters."""
_WIDTH = 32
_INNER = 48
_WINDOW = 4
"""Shorter than the sequence."""
_MOST_KINDS = 6
"""Kinds of layers in a list of a configuration; a list of more is of something else."""
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "local_attention",
    "attention_window_size",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
    "chunk_size",
    "mamba_chunk_size",
    "block_size",
)
_HEADS: dict[str, int] = {
    "hidden_size": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "num_attention_heads": 4,
    "head_dim": 8,
    "d_head": 8,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 8,
    "rotary_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "attention_head_dim": 16,
    "kv_channels": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": _WIDTH,
    # Of state spaces: twice the width is heads times their size.
    "num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "mamba_d_ssm": 2 * _WIDTH,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_dt_rank": 2,
    "time_step_rank": 2,
}
"""Sizes that fit together."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups", "kv_n_heads")
_FEED_FORWARD: dict[str, int] = {
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "dff", "attention_hidden_size"), _INNER),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp"), _INNER),
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "router_hidden_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2),
}


def smallest_that_runs(spec: ModelSpec, run: Callable[[ModelSpec], object]) -> tuple[ModelSpec | None, str]:
    """Return a small model of the same configuration, or none and what is said of the smallest.

    Parameters
    ----------
    spec : the model
    run : computes a copy once; raises for one that breaks a rule of the model
    """
    config = library_family(spec.family).library_config(spec)
    if config.to_dict().get("per_layer_config"):
        return None, "its layers have sizes of their own (per_layer_config)"
    reason = ""
    for changes in _smaller(config, spec):
        try:
            small = without_dropout(replace(spec, config={**spec.config, **changes}))
            shapes = library_family(spec.family).unfilled_parts(small)
            if (count := sum(p.numel() for _, p in shapes.all_parameters())) > _MOST_PARAMETERS:
                raise ValueError(f"its smallest copy has {count / 1e6:.0f} million parameters")
            run(small)
        except Exception as error:  # noqa: BLE001 (whatever a configuration's own checks and a model's shapes say)
            what = "" if type(error) in (ValueError, CannotSplit) else "a small copy does not run in the library: "
            reason = reason or what + first_line(error)
            continue
        return small, ""
    return None, reason


def first_line(error: Exception) -> str:
    """Return the first line of an error; an error that gives no reason is named."""
    text = error.reason if isinstance(error, CannotSplit) else str(error)
    line = next((line.strip() for line in text.splitlines() if line and not line.endswith(":")), "")
    is_named = type(error) in (ValueError, CannotSplit) or line.startswith("ValueError: ")
    return f"{'' if is_named else f'{type(error).__name__}: '}{line.removeprefix('ValueError: '):.160}"


def _smaller(config: Any, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Changes of a configuration that make it small: the smallest first, of which some break a rule of the model."""
    layers, lists = _layers(config)
    always = _named(config, {"vocab_size": VOCABULARY, **dict.fromkeys(_WINDOWS, _WINDOW)})
    always |= _named(config, {"num_hidden_layers": layers}) | lists | {SERVER_LAYERS: layers // 2}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        # A classifier of sequences finds the last token by the padding.
        if isinstance(getattr(config, name, None), int | list) or spec.head == SEQUENCE_CLASSIFICATION:
            always[name] = PADDING
    heads, inner = _named(config, _HEADS), _named(config, _FEED_FORWARD)
    for name in _KEY_HEADS:
        heads |= _named(config, {name: 4 if _value(config, name) == _value(config, "num_attention_heads") else 2})
    width = _value(config, "hidden_size")
    for name, size in inner.items():
        # Some are the width times a factor, by a rule of the model.
        if size == _INNER and width and _value(config, name) % width == 0:
            inner[name] = _value(config, name) // width * _WIDTH
    experts = _named(config, {name: size for name, size in _FEED_FORWARD.items() if size < _INNER})
    yield {**always, **heads, **inner}
    yield {**always, **heads}
    if not width or width <= _MOST_WIDTH:
        yield {**always, **experts}
        yield always


def _value(config: Any, name: str) -> Any:
    """Return a setting; None where the configuration has none, computes it, or has one for each layer."""
    name = config.attribute_map.get(name, name)
    if isinstance(getattr(type(config), name, None), property):
        return None
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 (the library's own, where layers differ)
        return None


def _named(config: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return those of some sizes that a configuration has, under its own names; those of its parts, too."""
    given: dict[str, Any] = {}
    for name, size in sizes.items():
        value = _value(config, name)
        if isinstance(value, int) and not isinstance(value, bool):
            given[config.attribute_map.get(name, name)] = min(size, value)
    for name in ("attn_config", "ffn_config"):
        if (part := _value(config, name)) is not None and (of_part := _named(part, sizes)):
            given[name] = {**part.to_diff_dict(), **of_part}
    return given


def _layers(config: Any) -> tuple[int, dict[str, list[Any]]]:
    """Return the number of layers of a small copy, each kind twice where the model has it twice, and its lists."""
    whole, lists = int(config.num_hidden_layers), {}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) >= whole and not name.startswith("mtp_"):
            lists[name] = value
    computed = list(getattr(config, "layers_block_type", None) or [])
    kinds = [value for value in (*lists.values(), computed) if len(set(map(str, value))) <= _MOST_KINDS]
    seen = max((kind.index(one) + 1 for kind in kinds for one in kind), default=1)
    dense = _value(config, "first_k_dense_replace") or 0
    layers = min(whole, max(4, 2 * seen, dense + 2))
    short = {name: value[:layers] for name, value in lists.items()}
    if isinstance(_value(config, "attention_types"), list) and "attention_layers" in short:
        short["attention_types"] = [[[kind], 1] for kind in short["attention_layers"]]
    return layers, short
