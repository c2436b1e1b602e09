"""Families of the transformers library: configurations in a specification and back, and parts of the whole model.

A family's name is the library's model type. Its class says in ``split`` how the library's own model is cut, and nothing
else builds a part: a part alone is cut out of a whole model whose weights have shapes alone.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.families.family import Family
from client_pipeline.partition.dropout_seed import undisturbed
from client_pipeline.partition.parts import MaskForm, ModelParts, padding_mask
from client_pipeline.partition.spec import (
    CAUSAL_LM,
    CLASSIFIERS,
    MASKED_LM,
    SEQ2SEQ,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    ModelSpec,
)
from client_pipeline.weights.unfilled import NoStorage, adopt

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
CLUSTER_TAIL = "cluster_tail"
"""Key of a causal language model's specification: closing norm and output layer are the control unit's; absent: the
server's."""
TRAINED_LOGITS_BIAS = "trained_logits_bias"
"""Key of a BART's or Marian's specification: the bias of the logits is a parameter. The library has it as a buffer,
zero in new models."""
OWN_LM_HEAD = "own_lm_head"
"""Key of a T5's specification: the output layer is not the shared embedding (T5 1.1)."""
LABEL_SMOOTHING = "label_smoothing"
"""Key of a sequence-to-sequence model's specification: of the training loss; absent: 0."""
OUR_KEYS = (LABEL_SMOOTHING, CLASS_WEIGHTS, SERVER_LAYERS, CLUSTER_TAIL, TRAINED_LOGITS_BIAS, OWN_LM_HEAD)
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
    if head in CLASSIFIERS:
        library_settings["num_labels"] = config.num_labels
    return ModelSpec(family=config.model_type, head=head, config={**library_settings, **our_settings})


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
    if family in ("camembert", "data2vec-text", "roberta", "xlm-roberta"):
        # Their positions begin after the padding's.
        max_length += pad_id + 1
    values = {
        "vocab_size": vocab_size,
        **dict.fromkeys(("hidden_size", "embedding_size", "pooler_hidden_size"), width),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": key_value_heads or num_heads,
        "head_dim": width // num_heads,
        **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "ffn_hidden_size"), feed_forward),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), feed_forward),
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
    settings = {names[name]: value for name, value in values.items() if _is_setting(default, names[name])}
    if default.is_encoder_decoder:
        # BART's decoder begins with the end of a sentence, the others' with padding.
        settings["decoder_start_token_id"] = eos_id if family == "bart" else pad_id
    if family in ("marian", "pegasus"):
        # Its positions are sinusoids of amplitude 1, beside which fresh embeddings would be nothing.
        settings["scale_embedding"] = True
    return AutoConfig.for_model(family, **settings)


def _is_setting(config: Any, name: str) -> bool:
    """Return whether a configuration has a value of this name, and does not compute it."""
    computed = getattr(type(config), name, None)
    return hasattr(config, name) and not (isinstance(computed, property) and computed.fset is None)


def text_config(config: Any) -> Any:
    """Return the configuration of a multi-modal model's text model, with the whole's labels; any other as it is."""
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    if text is config:
        return config
    text = copy.deepcopy(text)
    text.architectures = config.architectures
    if hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    text.id2label, text.label2id = config.id2label, config.label2id
    return text


def has_setting(family: str, name: str) -> bool:
    """Return whether the library's configuration of a family has a setting."""
    from transformers import AutoConfig

    return hasattr(AutoConfig.for_model(family), name)


def config_from_spec(spec: ModelSpec, heads: Collection[str], attention: str | None = "sdpa") -> Any:
    """Build the library's configuration of a specification.

    Parameters
    ----------
    spec : its family is the library's model type
    heads : what the family has
    attention : name of the library's attention function; None: the model class chooses

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
    if attention is not None:
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


def has_head(head: str, config: Any) -> bool:
    """Return whether the library has a class for a head and a configuration."""
    import transformers

    return type(config) in getattr(transformers, _CLASSES[head])


def encoder_mask(mask_BT: Tensor) -> Tensor | None:
    """Bool mask [B, 1, T, T] of attention to the real tokens; None when nothing is padded."""
    mask = padding_mask(mask_BT)
    return None if mask is None else mask.expand(-1, 1, mask_BT.shape[1], -1)


class LibraryFamily(Family):
    """A family of the transformers library, which :meth:`split` alone says how to cut."""

    attention: str | None = "sdpa"
    """Name of the library's attention function; None: the model class chooses."""

    @abstractmethod
    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split the library's model; the parts share its parameters and name it as their reference."""

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
        config = config_from_spec(spec, self.HEADS, self.attention)
        if spec.head in CLASSIFIERS and config.num_labels < 2:
            raise ValueError(
                f"num_labels: expected at least 2 classes, found {config.num_labels}; regression is not supported"
            )
        return config

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Bool mask [B, 1, T, T] as the library gives it to its sdpa attention; None when nothing is padded."""
        del dtype
        return encoder_mask(mask_BT)

    def joined(self, model: Any, spec: ModelSpec, embedding: nn.Module, blocks: Any, head: nn.Module) -> ModelParts:
        """Join the parts of a model; blocks are modules in order."""
        if not isinstance(blocks, nn.ModuleList):
            blocks = nn.ModuleList(blocks)
        return ModelParts(
            spec=spec, embedding=embedding, blocks=blocks, head=head, mask_form=self.mask_form, reference=model
        )

    def spec_from_model(self, model: Any, head: str) -> ModelSpec:
        """Build the specification of a library model."""
        return spec_from_config(model.config, head)

    def build_parts(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model with fresh weights, drawn from torch's global generator."""
        model = auto_model(spec.head).from_config(self.library_config(spec))
        return self.split(_with_own_output(model, spec), spec)

    def unfilled_part(self, spec: ModelSpec, name: str) -> nn.Module:
        """Copy a part of the whole model, whose weights have shapes alone."""
        return copy.deepcopy(self.unfilled_parts(spec).part(name))

    def unfilled_model(self, spec: ModelSpec) -> ModelParts:
        """Copy the whole model, whose weights have shapes alone, with the library's own over the same parameters."""
        parts = self.unfilled_parts(spec)
        return replace(copy.deepcopy(parts), spec=spec, mask_form=parts.mask_form)

    def build_part(self, spec: ModelSpec, name: str) -> nn.Module:
        """Build a part whose weights are loaded next; what nobody trains is computed."""
        part = self.unfilled_part(spec, name)
        adopt(part, {key: torch.zeros(p.shape, dtype=p.dtype) for key, p in part.named_parameters()}, name)
        part.to(torch.get_default_device())
        self.initialise(part, spec)
        return part

    def initialise(self, part: nn.Module, spec: ModelSpec) -> None:
        """Fill a part's weights as the library fills them in a whole model, from torch's global generator."""
        part.apply(cast(Any, self.unfilled_parts(spec).reference)._init_weights)

    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build the control unit's part."""
        return self.build_part(spec, "embedding")

    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build TEB ``index``."""
        return self.build_part(spec, f"blocks.{index}")

    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build the server's part."""
        return self.build_part(spec, "head")

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return int(self.library_config(spec).num_hidden_layers)

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        return int(self.library_config(spec).hidden_size)

    def max_length(self, spec: ModelSpec) -> int | None:
        """Return the longest sequence that a model has positions for; None: any length."""
        positions = getattr(self.library_config(spec), "max_position_embeddings", None)
        return None if positions is None else int(positions)

    def num_classes(self, spec: ModelSpec) -> int:
        """Return the number of labels that a model tells apart: tokens that it writes, or classes."""
        config = self.library_config(spec)
        if spec.head in CLASSIFIERS:
            return int(config.num_labels)
        # Marian may write other tokens than it reads.
        return int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)

    def settings(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the configuration with the library's defaults, which a specification leaves out."""
        return self.library_config(spec).to_dict() | spec.config

    def unfilled_parts(self, spec: ModelSpec) -> ModelParts:
        """Cut the whole model, whose weights have shapes alone."""
        return _unfilled_parts(self, replace(spec, lora=None, base_dtype="float32").to_json())


@lru_cache(maxsize=4)
def _unfilled_parts(family: LibraryFamily, spec_json: str) -> ModelParts:
    """Cut the library's whole model; its weights have shapes alone, its buffers are there."""
    spec = ModelSpec.from_json(spec_json)
    config = family.library_config(spec)
    # Buffers stay on the host, whatever the device that a part is built for.
    with torch.device("cpu"), undisturbed(), NoStorage():
        return family.split(_with_own_output(model_class(spec.head, config)(config), spec), spec)


def _with_own_output(model: Any, spec: ModelSpec) -> Any:
    """Give a T5 an output layer of its own where the specification says so: the library ties every fresh one."""
    if spec.config.get(OWN_LM_HEAD):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model
