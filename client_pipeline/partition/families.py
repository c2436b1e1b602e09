"""The model families that can be split, and the way from a specification to its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from client_pipeline.near_names import did_you_mean
from client_pipeline.partition import lora
from client_pipeline.partition.base_weights import FrozenBase
from client_pipeline.partition.default_generator import drawn_aside, undisturbed
from client_pipeline.partition.family import Family
from client_pipeline.partition.fresh_base import FreshBase
from client_pipeline.partition.hub_ids import check_source
from client_pipeline.partition.hub_reach import offline_remedy
from client_pipeline.partition.hugging_face import AUTO_MODELS, import_models_library
from client_pipeline.partition.low_bits import compress, fill_low_bits
from client_pipeline.partition.on_demand import OnDemand
from client_pipeline.partition.parts import MaskForm, ModelParts
from client_pipeline.partition.spec import (
    HEADS,
    OUR_OWN,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    ModelSpec,
    is_outside,
)
from client_pipeline.partition.unfilled import adopt, no_storage
from client_pipeline.plugins import class_named
from client_pipeline.quick_imports import quick_import

_MODULES = {
    "transformer": "client_pipeline.partition.transformer",
    "bart": "client_pipeline.partition.bart",
    "bert": "client_pipeline.partition.bert",
    "deberta-v2": "client_pipeline.partition.deberta_v2",
    "distilbert": "client_pipeline.partition.distilbert",
    "electra": "client_pipeline.partition.electra",
    "gpt2": "client_pipeline.partition.gpt2",
    "llama": "client_pipeline.partition.llama",
    "marian": "client_pipeline.partition.bart",
    "mistral": "client_pipeline.partition.llama",
    "modernbert": "client_pipeline.partition.modernbert",
    "qwen2": "client_pipeline.partition.llama",
    "qwen3": "client_pipeline.partition.llama",
    "roberta": "client_pipeline.partition.roberta",
    "t5": "client_pipeline.partition.t5",
    "xlm-roberta": "client_pipeline.partition.roberta",
}
"""The transformers library's families have its model types as names."""


class Adapter(Protocol):
    """What a family's module provides, or anybody's class of :class:`~client_pipeline.partition.family.Family`."""

    HEADS: tuple[str, ...]
    """Its heads, of :data:`client_pipeline.partition.spec.HEADS`; the first is the default."""

    def build_parts(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model with fresh weights, drawn from torch's global generator."""
        ...

    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build the embedding alone, for a control unit."""
        ...

    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build TEB ``index`` alone, for a device."""
        ...

    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build the decoder or head alone, for the server."""
        ...

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return what the head reads from the embedding: the head's own name and the embedding's of each matrix."""
        ...

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Turn the padding mask into the form that the blocks take."""
        ...

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        ...

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        ...


class LibraryAdapter(Adapter, Protocol):
    """What a module of one of the transformers library's families provides beside that."""

    def library_config(self, spec: ModelSpec) -> Any:
        """Build the library's configuration; raises ``ValueError`` for one that cannot be cut."""
        ...

    def spec_from_model(self, model: Any, head: str) -> ModelSpec:
        """Build the specification of a library model."""
        ...

    def split(self, model: Any, spec: ModelSpec) -> ModelParts:
        """Split the library's model; the parts share its parameters and name it as their reference."""
        ...


def families() -> list[str]:
    """Names of the supported families."""
    return sorted(_MODULES)


def adapter(family: str) -> Adapter:
    """Return the adapter of a family, by its name or ``module:Class``.

    Raises
    ------
    ValueError
        For an unknown family; the message lists the supported ones and says where to add one. For a class that cannot
        be imported, or is no family.
    """
    if is_outside(family):
        return _adapter_of_class(family)
    if family not in _MODULES:
        raise ValueError(
            f"model family {family!r} is not supported; expected one of {', '.join(families())}. To add one, write "
            f"{_file_to_add(family)} with the functions of Adapter and name it in families.py, or name a class of "
            f"your own: module:Class{did_you_mean(family, families())}"
        )
    return cast(Adapter, quick_import(_MODULES[family]))


_OTHER_HEADS_DROPOUTS = ("qa_dropout", "summary_first_dropout", "summary_last_dropout")
"""Settings of heads that nobody trains here."""


def dropouts(spec: ModelSpec) -> dict[str, float]:
    """Rates above 0 with which the model drops anything (outputs, layers, an adapter's input), by their keys."""
    settings = spec.config
    library_config = getattr(adapter(spec.family), "library_config", None)
    if library_config is not None:
        # A specification leaves out the library's defaults, and these may drop.
        settings = library_config(spec).to_dict() | settings
    rates = {
        key: rate
        for key, rate in settings.items()
        if "drop" in key and key not in _OTHER_HEADS_DROPOUTS and type(rate) in (int, float) and rate > 0
    }
    return rates | ({"lora.dropout": spec.lora.dropout} if spec.lora and spec.lora.dropout else {})


@cache
def _adapter_of_class(family: str) -> Adapter:
    adapter = cast(type[Family], class_named("model.family", family, Family))()
    heads = getattr(adapter, "HEADS", None)
    if not isinstance(heads, tuple) or not heads or not set(heads) <= set(HEADS):
        raise ValueError(f"model.family: {family!r}: HEADS: expected a tuple of {', '.join(HEADS)}, found {heads!r}")
    return adapter


def _file_to_add(family: str) -> str:
    return f"client_pipeline/partition/{family.replace('-', '_')}.py"


def _builder(spec: ModelSpec) -> Adapter:
    """Return the adapter of a family that is about to be built, with the library that it takes its layers from."""
    if spec.family in library_families():
        import_models_library()
    return adapter(spec.family)


def build_parts(spec: ModelSpec, seed: int) -> ModelParts:
    """Build a model with fresh weights that depend on ``seed`` alone, with its adapters if it has some."""
    with drawn_aside(seed):
        parts = _builder(spec).build_parts(replace(spec, lora=None))
    return parts if spec.lora is None else lora.adapt(parts, spec.lora, seed)


def build_embedding(spec: ModelSpec, base: FrozenBase | None = None) -> nn.Module:
    """Build the embedding alone, for a control unit; frozen beside adapters, over ``base`` if that is given."""
    with undisturbed(), no_storage(base is not None):
        embedding = _builder(spec).build_embedding(spec)
    if base is not None:
        adopt(embedding, base, "embedding (frozen)")
    return embedding if spec.lora is None else embedding.requires_grad_(False)


def build_block(spec: ModelSpec, index: int, base: FrozenBase | None = None) -> nn.Module:
    """Build TEB ``index`` alone, for a device; with its adapters if the model has some, over ``base`` if given."""
    with undisturbed():
        with no_storage(base is not None):
            block = _builder(spec).build_block(spec, index)
        if base is not None:
            adopt(block, base, f"TEB {index} (frozen)")
        if spec.lora is not None:
            block = lora.adapt_block(block, spec.lora)
    if base is not None and spec.low_bits:
        fill_low_bits(compress(block, spec.base_dtype), base)
        base.release()
    return block


def build_head(spec: ModelSpec) -> nn.Module:
    """Build the decoder or head alone; what it reads from a frozen embedding is a frozen parameter of its own."""
    with undisturbed():
        head = _builder(spec).build_head(spec)
    return head if spec.lora is None else lora.adapt_head(head, spec.lora)


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
    family, base = adapter(spec.family), base.check()
    plain = replace(spec, lora=None)
    embedding = build_embedding(spec, base.part("embedding."))
    blocks_base = [base.part(f"blocks.{index}.") for index in range(family.num_blocks(plain))]
    with undisturbed(), no_storage():
        own_head = family.build_head(plain)
    shared = {name: embedding.get_parameter(of).detach() for name, of in family.tied(plain).items()}
    if spec.lora.freezes_head:
        adopt(own_head, {**base.part("head."), **shared}, "head (frozen)")
    else:
        adopt(own_head, {name: value.detach().clone() for name, value in head.items()} | shared, "head", trained=True)
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
    with undisturbed(), no_storage():
        block = _builder(spec).build_block(spec, index)
    # Not on the meta device: adapters go to that of their matrix.
    adopt(block, {name: torch.zeros(()).expand(p.shape) for name, p in block.named_parameters()}, f"TEB {index}")
    return block


def tied(spec: ModelSpec) -> dict[str, str]:
    """Return what the head reads from an embedding that is trained: the head's own name and the embedding's."""
    return adapter(spec.family).tied(spec) if spec.lora is None else {}


def merged(parts: ModelParts) -> ModelParts:
    """Return a model with its adapters merged into a plain one of its own; one without adapters as it is."""
    if parts.spec.lora is None:
        return parts
    plain = build_parts(replace(parts.spec, lora=None, base_dtype="float32"), seed=0)
    weights = lora.merged_weights(parts)
    plain.load({name: weights[name] for name, _ in plain.named_parameters()})
    return plain


def num_blocks_of(spec: ModelSpec) -> int:
    """L, the TEBs of a model."""
    return adapter(spec.family).num_blocks(spec)


def library_families() -> list[str]:
    """Names of the families whose models the transformers library loads and saves."""
    return [family for family in families() if family not in OUR_OWN]


def library_adapter(model_type: str, source: str = "model") -> LibraryAdapter:
    """Return the adapter of one of the library's model types.

    Raises
    ------
    ValueError
        For an unknown type; the message lists the supported ones and names the file to add.
    """
    if model_type not in library_families():
        raise ValueError(
            f"{source}: model type {model_type!r} is not supported; expected one of {', '.join(library_families())}. "
            f"To add it, write {_file_to_add(model_type)} with the functions of LibraryAdapter and name it in "
            "client_pipeline/partition/families.py"
        )
    return cast(LibraryAdapter, adapter(model_type))


def read_library_config(source: str) -> Any:
    """Read the configuration of a library model; code that comes with a model is never run.

    Parameters
    ----------
    source : folder or hub id

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If its architecture is not supported.
    """
    from transformers import AutoConfig, BertConfig

    check_source(source, "model.pretrained")
    if Path(source).is_file() and source.endswith(".gguf"):
        raise ValueError(
            f"{source}: expected a folder, found a GGUF file; import it first: collapipe import-gguf {source} FOLDER"
        )
    file = Path(source) / "config.json"
    if Path(source).is_dir() and not file.is_file():
        raise FileNotFoundError(f"{source} has no config.json; give the folder of a Hugging Face model")
    if file.is_file():
        try:
            model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file}: expected a JSON object, {error}") from error
        if model_type is None:
            # The first BERT checkpoints carry no model_type.
            return BertConfig.from_json_file(file)
        library_adapter(str(model_type), source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{source!r} is neither a folder nor a hub id of a model that can be loaded: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}{offline_remedy()}"
        ) from error
    library_adapter(config.model_type, source)
    return config


def carried_examples(spec: ModelSpec) -> int:
    """Return how many examples a micro-batch has beside its own between the CU and the last TEB.

    They carry what all TEBs read (DeBERTa's relative positions); 0 for most families.
    """
    count = getattr(adapter(spec.family), "carried_examples", None)
    return 0 if count is None else int(count(spec))


def is_library(family: str) -> bool:
    """Whether a family's models are the transformers library's."""
    return family in library_families()


def max_length(spec: ModelSpec) -> int | None:
    """Return the longest sequence that a model has positions for; None: any length."""
    if not is_library(spec.family):
        return int(spec.config["max_length"])
    config = library_adapter(spec.family).library_config(spec)
    positions = getattr(config, "max_position_embeddings", None)
    if spec.family in ("roberta", "xlm-roberta"):
        # Their positions begin after the padding's.
        return int(positions - config.pad_token_id - 1)
    return None if positions is None else int(positions)


def num_classes(spec: ModelSpec) -> int:
    """Return how many labels a model tells apart: tokens of what it writes, or classes."""
    if not is_library(spec.family):
        classifies = spec.head in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)
        return int(spec.config["num_labels" if classifies else "vocab_size"])
    config = library_adapter(spec.family).library_config(spec)
    if spec.head in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        return int(config.num_labels)
    # Marian may write other tokens than it reads.
    return int(getattr(config, "decoder_vocab_size", None) or config.vocab_size)


def head_of(config: Any) -> str:
    """Return the head that a library model was saved with; its family's default, where it was saved without one."""
    heads = library_adapter(config.model_type).HEADS
    endings = {head: AUTO_MODELS[head].removeprefix("AutoModel") for head in heads}
    saved = (config.architectures or [""])[0]
    return next((head for head in heads if saved.endswith(endings[head])), heads[0])
