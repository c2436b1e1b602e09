"""Tiny specifications of every library family, and batches for them."""

import torch

NUM_BLOCKS = 5
NUM_LABELS = 4
VOCABULARY = 40
HEADS = ("sequence-classification", "token-classification")

_BERT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=NUM_BLOCKS,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    pad_token_id=0,
)

CONFIGS = {
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**_BERT, "pad_token_id": 1, "type_vocab_size": 1},
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
}

VARIANTS = {
    "electra-without-projection": ("electra", {"embedding_size": 16}),
    "deberta-v2-without-convolution": (
        "deberta-v2",
        {"conv_kernel_size": 0, "embedding_size": 8, "type_vocab_size": 2},
    ),
    "modernbert-mean": ("modernbert", {"classifier_pooling": "mean", "norm_bias": True}),
    "distilbert-sinusoidal": ("distilbert", {"sinusoidal_pos_embds": True}),
}

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "classifier_dropout",
)


def library_config(family, dropout=0.1, **more):
    """Give a configuration of the library; ``dropout`` everywhere."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**CONFIGS[family], **more})
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, dropout)
    return config


def tiny_spec(name, head, dropout=0.1):
    """Give the specification of a family or of one of its VARIANTS."""
    from client_pipeline.partition.encoder_classifier import spec_from_config

    family, more = VARIANTS.get(name, (name, {}))
    return spec_from_config(library_config(family, dropout, **more), head, NUM_LABELS)


def tiny_batch(spec, size=7, length=9, seed=0, padded=True):
    """Draw ids, padding of several lengths on the right, and labels of the head."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.bool)
    if padded:
        for row in range(size):
            mask[row, length - row % 4 :] = False
        ids = ids.masked_fill(~mask, spec.config.get("pad_token_id", 0))
    if spec.head == "seq2seq":
        labels = torch.randint(3, VOCABULARY, (size, 6), generator=generator)
        labels[1, 4:] = -100
    elif spec.head == "token-classification":
        labels = torch.randint(0, NUM_LABELS, (size, length), generator=generator).masked_fill(~mask, -100)
    else:
        labels = torch.randint(0, NUM_LABELS, (size,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
