"""Tiny models of text and images, saved as the library saves them."""

import torch

_TEXT = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_VISION = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
)
_QWEN_VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    patch_size=8,
    out_hidden_size=16,
    num_position_embeddings=4,
)
_LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)

MULTIMODAL = {
    "gemma3": dict(
        text_config={**_TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config=_VISION,
        mm_tokens_per_image=4,
    ),
    "internvl": dict(text_config={**_TEXT, "model_type": "qwen2"}, vision_config=_VISION),
    "llava": dict(
        text_config={**_TEXT, "model_type": "llama"}, vision_config={**_VISION, "model_type": "clip_vision_model"}
    ),
    "mistral3": dict(text_config={**_TEXT, "model_type": "mistral"}, vision_config={**_VISION, "head_dim": 8}),
    "qwen3_5": dict(
        text_config={**_TEXT, **_LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2},
        vision_config=_QWEN_VISION,
    ),
}


def save_multimodal(folder, model_type, **text_changes):
    """Save a tiny model; returns it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = MULTIMODAL[model_type]
    settings = {**settings, "text_config": {**settings["text_config"], **text_changes}}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **settings))
    model.save_pretrained(folder)
    return model.eval()
