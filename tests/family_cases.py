"""Tiny specifications of the families that need tied matrices or a decoder of the library's own, and batches."""

import torch
import transformers

from client_pipeline.partition import bart, bert, gpt2, llama, t5

VOCABULARY = 40
NUM_BLOCKS = 5

_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": NUM_BLOCKS,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "decoder_start_token_id": 2,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
_CAUSAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": NUM_BLOCKS + 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.1,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": NUM_BLOCKS,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}
_MARIAN = {"decoder_vocab_size": VOCABULARY}
_BERT = {"hidden_size": 16, "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 2, "intermediate_size": 32}


def _marian(**change):
    return bart.spec_from_config(transformers.MarianConfig(**{**_SEQ2SEQ, **_MARIAN, **change}))


def _bart(**change):
    return bart.spec_from_config(transformers.BartConfig(**{**_SEQ2SEQ, **change}))


def _t5(own_lm_head=False, **change):
    return t5.spec_from_config(transformers.T5Config(**{**_T5, **change}), own_lm_head)


def _gpt2(server_layers=2, **change):
    sizes = {"n_embd": 16, "n_layer": NUM_BLOCKS + server_layers, "n_head": 2, "n_positions": 32}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return gpt2.spec_from_config(transformers.GPT2Config(**{**sizes, **ids, **change}), server_layers)


def _llama(kind, server_layers=2, **change):
    config = getattr(transformers, f"{kind}Config")(**{**_CAUSAL, "tie_word_embeddings": False, **change})
    return llama.spec_from_config(config, server_layers)


def bert_masked():
    """BERT with the head of masked-language modelling."""
    return bert.spec_from_config(transformers.BertConfig(vocab_size=VOCABULARY, **_BERT), "masked-lm", 2)


FAMILIES = {
    "bert-masked": bert_masked(),
    "bart": _bart(),
    "bart-scaled": _bart(scale_embedding=True),
    "bart-untied": _bart(tie_word_embeddings=False),
    "marian": _marian(scale_embedding=True),
    "marian-two-vocabularies": _marian(share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCABULARY + 3),
    "marian-untied": _marian(tie_word_embeddings=False),
    "t5": _t5(),
    "t5-1.1": _t5(own_lm_head=True, tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
    "gpt2": _gpt2(),
    "gpt2-untied": _gpt2(tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "gpt2-head-alone": _gpt2(server_layers=0),
    "llama": _llama("Llama"),
    "llama-tied": _llama("Llama", tie_word_embeddings=True, attention_bias=True),
    "mistral-window": _llama("Mistral", sliding_window=4),
    "qwen2-tied": _llama("Qwen2", tie_word_embeddings=True),
    "qwen2-window": _llama("Qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=2),
    "qwen3": _llama("Qwen3", head_dim=8),
    "qwen3-tied": _llama("Qwen3", head_dim=8, tie_word_embeddings=True),
}


def family_batch(spec, size=7, length=9, seed=0, padded=True):
    """Ids, padding and the labels of the head; row 1 of translations is short."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    mask = torch.ones(size, length, dtype=torch.bool)
    if padded:
        for row in range(size):
            mask[row, length - row % 4 :] = False
    ids = draw(size, length)
    if spec.head == "seq2seq":
        labels = draw(size, 6)
        labels[1, 4:] = -100
    elif spec.head == "masked-lm":
        labels = draw(size, length)
        labels[torch.rand(size, length, generator=generator) > 0.3] = -100
        labels[0, 0] = 5
    else:
        labels = ids.masked_fill(~mask, -100)
        labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
