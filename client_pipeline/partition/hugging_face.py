"""What the adapters of Hugging Face models share: configurations in a specification and back, and model classes.

A family's name is the library's model type. Nothing here knows how a model is cut.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from client_pipeline.partition.spec import (
    CAUSAL_LM,
    MASKED_LM,
    SEQ2SEQ,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    ModelSpec,
)
from client_pipeline.quick_imports import quick_import

AUTO_MODELS = {
    SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    MASKED_LM: "AutoModelForMaskedLM",
    CAUSAL_LM: "AutoModelForCausalLM",
    SEQ2SEQ: "AutoModelForSeq2SeqLM",
}
"""Head -> the library's class that builds and loads it."""
_CLASSES = {
    SEQUENCE_CLASSIFICATION: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    TOKEN_CLASSIFICATION: "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    MASKED_LM: "MODEL_FOR_MASKED_LM_MAPPING",
    CAUSAL_LM: "MODEL_FOR_CAUSAL_LM_MAPPING",
    SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
}
"""Head -> the library's classes by the class of their configuration."""

CLASS_WEIGHTS = "class_weights"
"""Key of a specification: the factor of each class's loss; absent: all 1."""
SERVER_LAYERS = "server_layers"
"""Key of a causal model's specification: blocks on the server; absent: 0."""
_MODELS = "transformers.modeling_utils"
_HAS_SCIPY = "is_scipy_available"
TRAINED_LOGITS_BIAS = "trained_logits_bias"
"""Key of a BART's or Marian's specification: the bias of the logits is a parameter. The library has it as a buffer,
zero in new models."""
OWN_LM_HEAD = "own_lm_head"
"""Key of a T5's specification: the output layer is not the shared embedding (T5 1.1)."""
LABEL_SMOOTHING = "label_smoothing"
"""Key of a sequence-to-sequence model's specification: of the training loss; absent: 0."""
OUR_KEYS = (LABEL_SMOOTHING, CLASS_WEIGHTS, SERVER_LAYERS, TRAINED_LOGITS_BIAS, OWN_LM_HEAD)
"""Keys of a specification that are not the library's."""

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "seq_classif_dropout",
    "embd_pdrop",
    "attn_pdrop",
    "resid_pdrop",
    "dropout_rate",
)
_NOT_KEPT = ("problem_type", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype")
_LABELS = ("id2label", "label2id", "num_labels")


def import_models_library() -> None:
    """Import what all models of the library have in common, but SciPy, which a loss of object detectors asks for.

    SciPy is optional to the library. Without it the import takes a seventh less time and memory: a third of a second
    and 23 MB of every control unit and device with a process of its own.
    """
    if _MODELS in sys.modules:
        return
    import transformers.utils as utils

    original = getattr(utils, _HAS_SCIPY, None)
    if original is not None:
        setattr(utils, _HAS_SCIPY, lambda: False)
    try:
        quick_import(_MODELS)
    finally:
        if original is not None:
            setattr(utils, _HAS_SCIPY, original)


def spec_from_config(config: Any, head: str, **our_settings: Any) -> ModelSpec:
    """Build a specification from a library configuration.

    Parameters
    ----------
    config : such as a ``BertConfig``
    head : one of :data:`client_pipeline.partition.spec.HEADS`
    our_settings : values of :data:`OUR_KEYS`
    """
    library_settings = {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in _NOT_KEPT and key not in _LABELS and not key.startswith("_")
    }
    # A default of the library, that others read as well.
    library_settings["vocab_size"] = config.vocab_size
    if head in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        library_settings["num_labels"] = config.num_labels
    return ModelSpec(family=config.model_type, head=head, config={**library_settings, **our_settings})


def spec_from_model(model: Any, head: str, **our_settings: Any) -> ModelSpec:
    """Build the specification of a library model; the arguments are those of :func:`spec_from_config`."""
    return spec_from_config(model.config, head, **our_settings)


def sized_config(
    family: str,
    *,
    vocab_size: int,
    width: int,
    num_heads: int,
    feed_forward: int,
    num_layers: int,
    dropout: float,
    max_length: int,
    pad_id: int,
    bos_id: int,
    eos_id: int,
    decoder_layers: int = 0,
    key_value_heads: int = 0,
) -> Any:
    """Build a library configuration from sizes, whatever the family calls them.

    Parameters
    ----------
    family : the library's model type
    vocab_size : tokens
    width : D
    num_heads : of attention
    feed_forward : inner width of the feed-forward layers
    num_layers : all blocks, of an encoder-decoder those of the encoder
    dropout : rate, wherever the family has one but right before a classifier
    max_length : longest sequence
    pad_id, bos_id, eos_id : special tokens
    decoder_layers : blocks of an encoder-decoder's decoder
    key_value_heads : of keys and values, where a family tells them apart; 0: ``num_heads``
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    if family in ("roberta", "xlm-roberta"):
        # Their positions begin after the padding's.
        max_length += pad_id + 1
    values = {
        "vocab_size": vocab_size,
        **dict.fromkeys(("hidden_size", "embedding_size", "pooler_hidden_size"), width),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": key_value_heads or num_heads,
        "head_dim": width // num_heads,
        **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner"), feed_forward),
        **dict.fromkeys(_DROPOUTS, dropout),
        "max_position_embeddings": max_length,
        "pad_token_id": pad_id,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), bos_id),
        **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), eos_id),
        # Of encoder-decoders.
        "decoder_vocab_size": vocab_size,
        **dict.fromkeys(("decoder_layers", "num_decoder_layers"), decoder_layers),
        "decoder_attention_heads": num_heads,
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), feed_forward),
    }
    names = {name: default.attribute_map.get(name, name) for name in values}
    settings = {names[name]: value for name, value in values.items() if hasattr(default, names[name])}
    if default.is_encoder_decoder:
        # BART's decoder begins with the end of a sentence, the others' with padding.
        settings["decoder_start_token_id"] = eos_id if family == "bart" else pad_id
    if family == "marian":
        # Its positions are sinusoids of amplitude 1, beside which fresh embeddings would be nothing.
        settings["scale_embedding"] = True
    return AutoConfig.for_model(family, **settings)


def config_from_spec(spec: ModelSpec, heads: Collection[str], attention: str = "sdpa") -> Any:
    """Build the library's configuration of a specification.

    Parameters
    ----------
    spec : its family is the library's model type
    heads : what the family has
    attention : name of the library's attention function. Blocks are also built alone, without the model class that
        would choose it.

    Raises
    ------
    ValueError
        For another head.
    """
    if spec.head not in heads:
        raise ValueError(f"model.family {spec.family} has the heads {', '.join(heads)}, found {spec.head!r}")
    library_settings = {key: value for key, value in spec.config.items() if key not in OUR_KEYS}
    # A copy, as models keep and change theirs.
    config = copy.deepcopy(_checked_config(spec.family, json.dumps(library_settings)))
    config._attn_implementation = attention
    return config


@lru_cache(maxsize=16)
def _checked_config(family: str, settings_json: str) -> Any:
    """Build the library's configuration, which checks every value: ten times what a copy takes.

    Each part that is built asks for one, and so does whoever wants to know a model's width.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **json.loads(settings_json))


def auto_model(head: str) -> Any:
    """Return the library's ``AutoModelFor...`` class of a head."""
    import transformers

    return getattr(transformers, AUTO_MODELS[head])


def model_class(head: str, config: Any) -> Any:
    """Return the library's own class of a head and a configuration."""
    import transformers

    return getattr(transformers, _CLASSES[head])[type(config)]


def fresh_model(spec: ModelSpec, config: Any) -> Any:
    """Build the library's own model with fresh weights."""
    return auto_model(spec.head).from_config(config)
