"""Tiny specifications of every library family and head, and batches for them."""

import torch

from client_pipeline.families import transformer
from client_pipeline.families.hugging_face import spec_from_config
from client_pipeline.families.registry import family_named, is_decoder_only, library_families
from client_pipeline.partition.spec import ModelSpec

NUM_BLOCKS = 5
NUM_LABELS = 4
VOCABULARY = 40

_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=NUM_BLOCKS,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    pad_token_id=0,
)
_SEQ2SEQ = dict(
    vocab_size=VOCABULARY,
    d_model=16,
    encoder_layers=NUM_BLOCKS,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=24,
    max_position_embeddings=32,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    forced_eos_token_id=2,
    decoder_start_token_id=2,
)
_CAUSAL = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=NUM_BLOCKS + 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=32,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)

_T5 = dict(
    vocab_size=VOCABULARY,
    d_model=16,
    d_kv=6,
    d_ff=32,
    num_layers=NUM_BLOCKS,
    num_decoder_layers=2,
    num_heads=3,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    decoder_start_token_id=0,
)

CONFIGS = {
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "data2vec-text": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "ernie": _BERT,
    "distilbert": dict(
        vocab_size=VOCABULARY,
        dim=16,
        n_layers=NUM_BLOCKS,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=32,
        pad_token_id=0,
    ),
    "electra": {**_BERT, "embedding_size": 8},
    "deberta-v2": {
        **_BERT,
        "relative_attention": False,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
        "pooler_hidden_size": 16,
        "type_vocab_size": 0,
    },
    # Layers 0 and 3 attend everywhere, the others to one neighbour on each side.
    "modernbert": {**_BERT, "local_attention": 2, "global_attn_every_n_layers": 3},
    "bart": _SEQ2SEQ,
    "blenderbot": _SEQ2SEQ,
    "marian": {**_SEQ2SEQ, "decoder_vocab_size": VOCABULARY, "scale_embedding": True},
    "pegasus": {**_SEQ2SEQ, "scale_embedding": True, "decoder_start_token_id": 1},
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "gpt2": dict(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=NUM_BLOCKS + 2,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": _CAUSAL,
    "mistral": {**_CAUSAL, "sliding_window": 4},
    "qwen2": {**_CAUSAL, "tie_word_embeddings": True},
    "qwen3": {**_CAUSAL, "head_dim": 8},
}
assert sorted(CONFIGS) == library_families()

VARIANTS = {
    "electra-without-projection": ("electra", {"embedding_size": 16}),
    "deberta-v2-without-convolution": (
        "deberta-v2",
        {"conv_kernel_size": 0, "embedding_size": 8, "type_vocab_size": 2},
    ),
    # As DeBERTa-v3: 4 buckets on either side, so that far offsets share one in a batch of 9 tokens.
    "deberta-v2-relative": (
        "deberta-v2",
        {
            "relative_attention": True,
            "position_buckets": 4,
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "conv_kernel_size": 0,
        },
    ),
    "deberta-v2-relative-unshared": (
        "deberta-v2",
        {"relative_attention": True, "max_relative_positions": 6, "pos_att_type": ["c2p", "p2c"]},
    ),
    "modernbert-mean": ("modernbert", {"classifier_pooling": "mean", "norm_bias": True}),
    "distilbert-sinusoidal": ("distilbert", {"sinusoidal_pos_embds": True}),
    "bart-scaled": ("bart", {"scale_embedding": True}),
    "bart-untied": ("bart", {"tie_word_embeddings": False}),
    "marian-two-vocabularies": (
        "marian",
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCABULARY + 3},
    ),
    "marian-untied": ("marian", {"tie_word_embeddings": False}),
    "mt5-untied": ("mt5", {"tie_word_embeddings": False}),
    "t5-1.1": ("t5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-head-alone": ("llama", {"num_hidden_layers": NUM_BLOCKS}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}

CASES = [
    (name, head)
    for name, (family, _) in {**{name: (name, {}) for name in sorted(CONFIGS)}, **VARIANTS}.items()
    for head in family_named(family).HEADS
    if head == "causal-lm" or family in ("gpt2", "qwen3") or not is_decoder_only(family)
]
"""Every family and variant with each of its heads; classifiers on two of the decoder-only ones, which share a cut."""
FIRST_CASES = [(name, head) for name, head in CASES if name in CONFIGS]
"""The families themselves."""

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "dropout_rate",
    "attention_dropout",
    "activation_dropout",
    "seq_classif_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "classifier_dropout",
    "embd_pdrop",
    "attn_pdrop",
    "resid_pdrop",
)


def library_config(family, dropout=0.1, **more):
    """Give a configuration of the library; ``dropout`` everywhere."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**CONFIGS[family], "num_labels": NUM_LABELS, **more})
    if is_decoder_only(family):
        # Not in their configurations, but read from them.
        config.classifier_dropout = dropout
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)
    return config


def tiny_spec(name, head="", dropout=0.1):
    """Give the specification of a family or of one of its VARIANTS; without a head, with the family's first."""
    family, more = VARIANTS.get(name, (name, {}))
    head = head or family_named(family).HEADS[0]
    ours = {}
    if is_decoder_only(family):
        ours["server_layers"] = 0 if name == "llama-head-alone" else 2
        more = {"pad_token_id": 0, **more} if head == "sequence-classification" else more
    if name in ("mt5-untied", "t5-1.1"):
        ours["own_lm_head"] = True
    return spec_from_config(library_config(family, dropout, **more), head, **ours)


def tiny_batch(spec, size=7, length=9, seed=0, padded=True):
    """Draw ids, padding of several lengths on the right, and labels of the head; row 1 of translations is short."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    ids = draw(3, VOCABULARY, size, length)
    mask = torch.ones(size, length, dtype=torch.bool)
    if padded:
        for row in range(size):
            mask[row, length - row % 4 :] = False
        ids = ids.masked_fill(~mask, spec.config.get("pad_token_id") or 0)
    if spec.head == "seq2seq":
        labels = draw(3, VOCABULARY, size, 6)
        labels[1, 4:] = -100
    elif spec.head == "masked-lm":
        labels = draw(3, VOCABULARY, size, length).masked_fill((draw(0, 3, size, length) > 0) | ~mask, -100)
        labels[:, 0] = 5
    elif spec.head == "causal-lm":
        labels = ids.masked_fill(~mask, -100)
        labels[:, 0] = -100
    elif spec.head == "token-classification":
        labels = draw(0, NUM_LABELS, size, length).masked_fill(~mask, -100)
    else:
        labels = draw(0, NUM_LABELS, size)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def evaluation(parts):
    """Switch dropout off in all of a model."""
    for part in (parts.embedding, parts.blocks, parts.head, *([parts.reference] if parts.reference else [])):
        part.eval()
    return parts


CLASSIC = transformer.spec(
    vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=NUM_BLOCKS, decoder_layers=2, dropout=0.2
)


SMALL_TRANSFORMER = ModelSpec(
    family="transformer",
    head="seq2seq",
    config={
        "vocab_size": 11,
        "width": 8,
        "num_heads": 2,
        "feed_forward": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "max_length": 16,
    },
)
