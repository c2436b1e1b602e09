"""Models and their parts, built from a specification, and what a specification says of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from client_pipeline.documents import json_value
from client_pipeline.families import lora
from client_pipeline.families.fresh_base import FreshBase
from client_pipeline.families.hugging_face import AUTO_MODELS, text_config
from client_pipeline.families.merged_weights import MergedWeights
from client_pipeline.families.registry import family_named, is_decoder_only, library_family
from client_pipeline.partition.dropout_seed import drawn_aside, undisturbed
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.foreign_weights import check_folder, check_plain_numbers
from client_pipeline.weights.hub_ids import check_source, is_offline, offline_remedy
from client_pipeline.weights.low_bits import compress, fill_low_bits
from client_pipeline.weights.on_demand import OnDemand
from client_pipeline.weights.unfilled import adopt

_OTHER_HEADS_DROPOUTS = ("qa_dropout", "summary_first_dropout", "summary_last_dropout")
"""Settings of heads that nobody trains here."""
_KINDS = {
    **dict.fromkeys(("id2label", "label2id", "text_config", "quantization_config"), (dict, "an object")),
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "problem_type"), (str, "a text")),
    "architectures": (list, "a list"),
    "num_labels": (int, "a whole number"),
}
"""Key of ``config.json`` whose value the library does not check itself -> its type, and that in words."""
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def dropouts(spec: ModelSpec) -> dict[str, float]:
    """Rates above 0 with which the model drops anything (outputs, layers, an adapter's input), by their keys."""
    # Settings of some types have their classifiers' rate whatever head a model has.
    others = (*_OTHER_HEADS_DROPOUTS, "classifier_dropout") if spec.head == CAUSAL_LM else _OTHER_HEADS_DROPOUTS
    rates = {
        key: rate
        for key, rate in family_named(spec.family).settings(spec).items()
        if "drop" in key and key not in others and type(rate) in (int, float) and rate > 0
    }
    return rates | ({"lora.dropout": spec.lora.dropout} if spec.lora and spec.lora.dropout else {})


def without_dropout(spec: ModelSpec) -> ModelSpec:
    """Return a model that drops nothing, and is the same otherwise."""
    lora = None if spec.lora is None else replace(spec.lora, dropout=0.0)
    plain = replace(spec, lora=lora)
    return replace(plain, config=plain.config | dict.fromkeys(dropouts(plain), 0.0))


def build_parts(spec: ModelSpec, seed: int) -> ModelParts:
    """Build a model with fresh weights that depend on ``seed`` alone, with its adapters if it has some."""
    with drawn_aside(seed):
        parts = family_named(spec.family).build_parts(replace(spec, lora=None))
    return parts if spec.lora is None else lora.adapt(parts, spec.lora, seed)


def build_embedding(spec: ModelSpec, base: FrozenBase | None = None) -> nn.Module:
    """Build the embedding alone, for a control unit; frozen beside adapters, over ``base`` if that is given."""
    embedding = _part(spec, "embedding", base)
    return embedding if spec.lora is None else embedding.requires_grad_(False)


def build_block(spec: ModelSpec, index: int, base: FrozenBase | None = None) -> nn.Module:
    """Build TEB ``index`` alone, for a device; with its adapters if the model has some, over ``base`` if given."""
    block = _part(spec, f"blocks.{index}", base)
    if spec.lora is not None:
        with undisturbed():
            block = lora.adapt_block(block, spec.lora, index)
    if base is not None and spec.low_bits:
        fill_low_bits(compress(block, spec.base_dtype), base)
        base.release()
    return block


def build_head(spec: ModelSpec, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Build the decoder or head alone, over weights by its own names if given.

    What it reads from a frozen embedding is a frozen parameter of its own.
    """
    head = _part(spec, "head", weights)
    if spec.lora is None:
        return head
    with undisturbed():
        return lora.adapt_head(head, spec.lora, family_named(spec.family).num_blocks(spec))


def _part(spec: ModelSpec, name: str, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """Build a part over weights by its own names; None: they are loaded later."""
    family = family_named(spec.family)
    with undisturbed():
        if weights is None:
            return family.build_part(spec, name)
        part = family.unfilled_part(spec, name)
    adopt(part, weights, name.replace("blocks.", "TEB "))
    return part


def build_over(spec: ModelSpec, base: FrozenBase, head: Mapping[str, Tensor], seed: int) -> ModelParts:
    """Build a model with adapters over frozen weights; the TEBs have theirs while they run alone.

    So has an embedding that is drawn, unless the head reads it: one in files is mapped, and costs nothing.

    Parameters
    ----------
    spec : with adapters
    base : by global name
    head : weights of the head under its own names, without what it reads of the embedding; they are copied, and those
        of ``base`` are used where the head is frozen beside adapters
    seed : draws the adapters, as :func:`build_parts` does

    Raises
    ------
    ValueError
        If weights are missing, or of another shape.
    """
    assert spec.lora is not None
    family, base = family_named(spec.family), base.check()
    plain = replace(spec, lora=None)
    embedding = build_embedding(spec, base.part("embedding."))
    blocks_base = [base.part(f"blocks.{index}.") for index in range(family.num_blocks(plain))]
    shared = {name: embedding.get_parameter(of).detach() for name, of in family.tied(plain).items()}
    if spec.lora.freezes_head:
        head = base.part("head.")
    else:
        head = {name: value.detach().clone() for name, value in head.items()}
    own_head = _part(plain, "head", {**head, **shared})
    blocks = nn.ModuleList(_emptied_block(plain, index, part) for index, part in enumerate(blocks_base))
    parts = ModelParts(plain, embedding, blocks, own_head, family.mask_form, base=base)
    adapted = lora.adapt(parts, spec.lora, seed)
    if isinstance(base, FreshBase) and not shared:
        OnDemand(embedding, base.part("embedding."))
    on_demand = []
    for block, part in zip(blocks, blocks_base, strict=True):
        on_demand.append(OnDemand(compress(block, spec.base_dtype) if spec.low_bits else block, part))
    return replace(adapted, spec=spec, on_demand=tuple(on_demand))


def _emptied_block(spec: ModelSpec, index: int, base: FrozenBase) -> nn.Module:
    """Build a TEB that will have its weights while it runs: over its files, which cost nothing, or over nothing."""
    if not isinstance(base, FreshBase):
        return build_block(spec, index, base)
    block = family_named(spec.family).unfilled_part(spec, f"blocks.{index}")
    # Not on the meta device: adapters go to that of their matrix.
    adopt(block, {name: torch.zeros(()).expand(p.shape) for name, p in block.named_parameters()}, f"TEB {index}")
    return block


def tied(spec: ModelSpec) -> dict[str, str]:
    """Return what the head reads from an embedding that is trained: the head's own name and the embedding's."""
    return family_named(spec.family).tied(spec) if spec.lora is None else {}


def merged(parts: ModelParts) -> ModelParts:
    """Return a model with its adapters merged into a plain one of its own; one without adapters as it is."""
    if parts.spec.lora is None:
        return parts
    plain = build_parts(replace(parts.spec, lora=None, base_dtype="float32"), seed=0)
    trained = dict(parts.named_parameters())
    frozen = parts.frozen_weights() if parts.base is None else {}
    plain.load(MergedWeights(parts.spec, {**frozen, **trained}, parts.base))
    return plain


def read_library_config(source: str) -> Any:
    """Read the configuration of a library model, of a multi-modal one that of its text model.

    Code that comes with a model is never run.

    Parameters
    ----------
    source : folder or hub id

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If its architecture is not supported, or a value is of another kind.
    """
    from transformers import AutoConfig, BertConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    check_source(source, "model.pretrained")
    if Path(source).is_file() and source.endswith(".gguf"):
        raise ValueError(
            f"{source}: expected a folder, found a GGUF file; import it first: collapipe import-gguf {source} FOLDER"
        )
    file, model_type = Path(source) / "config.json", ""
    if Path(source).is_dir():
        check_folder(Path(source))
        try:
            settings = json_value(file.read_text(encoding="utf-8"))
            model_type = settings.get("model_type")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file}: expected a JSON object, {error}") from error
        for key, (kind_of_value, words) in _KINDS.items():
            if settings.get(key) is not None and not isinstance(settings[key], kind_of_value):
                raise ValueError(f"{file}: {key}: expected {words}, found {repr(settings[key])[:60]}; correct it")
        if strange := [key for key in settings.get("id2label") or () if not key.isdecimal()]:
            raise ValueError(
                f"{file}: id2label: expected the numbers of classes as keys, found {strange[0]!r}; correct it"
            )
        if model_type is not None and model_type not in CONFIG_MAPPING_NAMES:
            library_family(str(model_type), source)
    try:
        # The first BERT checkpoints carry no model_type.
        kind = BertConfig if model_type is None else AutoConfig
        config = kind.from_pretrained(source, trust_remote_code=False, local_files_only=is_offline())
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{source!r} is neither a folder nor a hub id of a model that can be loaded: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{offline_remedy()}"
        ) from error
    except Exception as error:  # the library's checks of values raise kinds of their own
        raise ValueError(f"{file}: {' '.join(str(error).split())}; correct the value") from error
    text = text_config(config)
    for key in _SIZES:
        if isinstance(size := getattr(text, key, 1), int) and size < 1:
            raise ValueError(f"{file}: {key}: expected a number above 0, found {size}; correct it")
    if text is not config and not is_decoder_only(text.model_type):
        raise ValueError(
            f"{source}: model type {config.model_type!r} has a text model of type {text.model_type!r}, of which the "
            "transformers library has no causal language model; expected a model of text, or a multi-modal one with "
            "such a text model, as gemma3 and qwen3_5 have"
        )
    library_family(text.model_type, source)
    check_plain_numbers(source, config)
    return text


def max_length(spec: ModelSpec) -> int | None:
    """Return the longest sequence that a model has positions for; None: any length."""
    return family_named(spec.family).max_length(spec)


def head_of(config: Any) -> str:
    """Return the head that a library model was saved with; its family's default, where it was saved without one."""
    heads = library_family(config.model_type).HEADS
    endings = {head: AUTO_MODELS[head].removeprefix("AutoModel") for head in heads}
    saved = (config.architectures or [""])[0]
    return next((head for head in heads if saved.endswith(endings[head])), heads[0])
