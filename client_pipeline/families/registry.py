"""The model families that can be split, by name.

Decoder-only models of the transformers library need no entry: :mod:`client_pipeline.families.causal` cuts any of them,
and :mod:`client_pipeline.families.proof` says before a run whether the cut is the whole.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import cast

from client_pipeline.families.family import Family
from client_pipeline.families.hugging_face import LibraryFamily
from client_pipeline.near_names import did_you_mean
from client_pipeline.partition.spec import BASE_DTYPES, HEADS, OUR_OWN, is_outside
from client_pipeline.plugins import class_named

_IMPORTING = threading.Lock()
_CAUSAL = "causal:Causal"
_CLASSES = {
    "transformer": "transformer:Transformer",
    "bart": "bart:Bart",
    "bert": "bert:Bert",
    "blenderbot": "bart:Bart",
    "camembert": "bert:Roberta",
    "data2vec-text": "bert:Roberta",
    "deberta-v2": "deberta_v2:DebertaV2",
    "distilbert": "bert:DistilBert",
    "electra": "bert:Electra",
    "ernie": "bert:Bert",
    "gpt2": _CAUSAL,
    "llama": _CAUSAL,
    "marian": "bart:Bart",
    "mistral": _CAUSAL,
    "modernbert": "modernbert:ModernBert",
    "mt5": "t5:T5",
    "pegasus": "bart:Bart",
    "qwen2": _CAUSAL,
    "qwen3": _CAUSAL,
    "roberta": "bert:Roberta",
    "t5": "t5:T5",
    "xlm-roberta": "bert:Roberta",
}
"""Module of this package and class of each family; the transformers library's have its model types as names."""
_RELATIVES = {
    "albert": ("bert", "all its layers are one, and a TEB has weights of its own"),
    "big_bird": ("roberta", "its attention is in blocks that are drawn for the whole model"),
    "blenderbot-small": ("bart", "its positions are embedded in another form"),
    "convbert": ("electra", "its layers mix attention and convolutions in a form of their own"),
    "deberta": ("deberta-v2", "its attention has another form"),
    "longformer": ("roberta", "its attention is in windows that are laid out for the whole model"),
    "longt5": ("t5", "its attention is in blocks that are laid out for the whole model"),
    "m2m_100": ("marian", "its decoder begins with the language of the target"),
    "mbart": ("bart", "its decoder begins with the language of the target"),
    "megatron-bert": ("bert", "it has the norm before each layer, and one behind the last"),
    "mobilebert": ("bert", "its output layer has two matrices, one of them the embedding's"),
    "mpnet": ("roberta", "all its layers share one table of relative positions"),
    "mvp": ("bart", "its attention has prompts of its own"),
    "nystromformer": ("bert", "its attention is approximated"),
    "plbart": ("bart", "its decoder begins with the language of the target"),
    "rembert": ("bert", "its output layer has another width"),
    "roberta-prelayernorm": ("roberta", "it has the norm before each layer, and one behind the last"),
    "roformer": ("bert", "it turns queries and keys by tables that are made for the whole model"),
    "switch_transformers": ("t5", "the loss of its routers needs all layers in one place"),
    "umt5": ("mt5", "each of its layers has a table of relative positions of its own"),
    "xlm-roberta-xl": ("xlm-roberta", "it has the norm before each layer, and one behind the last"),
    "xmod": ("xlm-roberta", "its layers choose adapters by the language"),
}
"""Relative that can be split of each model type that cannot, and the difference."""


def families() -> list[str]:
    """Names of the families with a cut of their own, and of the most used decoder-only ones."""
    return sorted(_CLASSES)


def library_families() -> list[str]:
    """Names of the families whose models the transformers library loads and saves."""
    return [family for family in families() if family not in OUR_OWN]


def is_library(family: str) -> bool:
    """Return whether a family's models are the transformers library's."""
    return family in library_families() or family in decoder_only_types()


@cache
def decoder_only_types() -> frozenset[str]:
    """Return the library's model types that have a causal language model, and that no other family here cuts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    ours = {family for family, place in _CLASSES.items() if place != _CAUSAL}
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - ours - _RELATIVES.keys()


def is_decoder_only(family: str) -> bool:
    """Return whether a family is one of the library's decoder-only models."""
    return not is_outside(family) and family in decoder_only_types()


def check_base_dtype(base_dtype: str, trainable: str, pretrained: str, family: str) -> None:
    """Raise ``ValueError`` for an unknown ``model.base-dtype``, or one for weights that no machine has part by part."""
    if base_dtype not in BASE_DTYPES:
        raise ValueError(f"model.base-dtype: expected one of {', '.join(BASE_DTYPES)}, found {base_dtype!r}")
    if base_dtype != BASE_DTYPES[0] and not (trainable == "lora" and (pretrained or is_decoder_only(family))):
        raise ValueError(
            f"model.base-dtype: {base_dtype} is of what is never trained: expected model.trainable = lora and a "
            f"model.pretrained, or fresh weights of a decoder-only family, found {trainable!r}, {pretrained!r} and "
            f"model.family = {family}"
        )


@cache
def family_named(name: str) -> Family:
    """Return a family by its name or ``module:Class``.

    Raises
    ------
    ValueError
        For an unknown family; the message lists the supported ones and says where to add one. For a class that cannot
        be imported, or is no family.
    """
    if is_outside(name):
        return _outside_family(name)
    if name not in _CLASSES and name not in decoder_only_types():
        raise ValueError(
            f"model family {name!r} is not supported; expected one of {', '.join(families())}, or a decoder-only model "
            f"type of the transformers library. {_how_to_add(name)}, or "
            f"name a class of your own: module:Class{nearest_family(name) or did_you_mean(name, families())}"
        )
    if name not in OUR_OWN:
        with _IMPORTING:
            # Of two threads that import it at once, one gets a module without its classes.
            import_module("transformers")
    module, _, class_name = _CLASSES.get(name, _CAUSAL).partition(":")
    return cast(Family, getattr(import_module(f"{__package__}.{module}"), class_name)())


def library_family(model_type: str, source: str = "model") -> LibraryFamily:
    """Return the family of one of the library's model types.

    Raises
    ------
    ValueError
        For an unknown type; the message lists the supported ones and names the file to add.
    """
    if not is_library(model_type) or model_type in _RELATIVES:
        raise ValueError(
            f"{source}: model type {model_type!r} is not supported{nearest_family(model_type)}; expected one of "
            f"{', '.join(library_families())}, or a decoder-only model type of the transformers library. "
            f"{_how_to_add(model_type)}"
        )
    return cast(LibraryFamily, family_named(model_type))


def nearest_family(model_type: str) -> str:
    """Return why a relative of a family cannot be split, and the family, for messages; empty: it is none."""
    if model_type not in _RELATIVES:
        return ""
    relative, difference = _RELATIVES[model_type]
    return f": {difference}; the nearest that can be split is {relative!r}"


def _outside_family(name: str) -> Family:
    family = cast(type[Family], class_named("model.family", name, Family))()
    heads = getattr(family, "HEADS", None)
    if not isinstance(heads, tuple) or not heads or not set(heads) <= set(HEADS):
        raise ValueError(f"model.family: {name!r}: HEADS: expected a tuple of {', '.join(HEADS)}, found {heads!r}")
    return family


def _how_to_add(name: str) -> str:
    return (
        f"To add it, write a LibraryFamily in client_pipeline/families/{name.replace('-', '_')}.py and name it in "
        "client_pipeline/families/registry.py"
    )
