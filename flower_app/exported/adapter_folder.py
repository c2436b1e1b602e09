"""Adapters, and what was trained whole, as a folder that ``PeftModel.from_pretrained`` loads over the base model."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from client_pipeline.partition.spec import CAUSAL_LM, SEQ2SEQ, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from flower_app.exported.library_folder import LibraryTensors
from flower_app.saved_model import StoredModel
from flower_app.tokenizer_files import file_object, read_files

_TASK_TYPES = {
    CAUSAL_LM: "CAUSAL_LM",
    SEQ2SEQ: "SEQ_2_SEQ_LM",
    SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    TOKEN_CLASSIFICATION: "TOKEN_CLS",
}
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.(default\.)?weight")


def write_adapters(stored: StoredModel, tensors: LibraryTensors, base_model: str, folder: Path) -> None:
    """Write the adapters by peft's names, and then their configuration.

    Parameters
    ----------
    stored : of a model with adapters
    tensors : of the same
    base_model : folder or hub id, which the configuration names
    folder : to write to

    Raises
    ------
    ValueError
        If the base model is a multi-modal one, or a trained weight is none of a module that peft can save.
    """
    from peft import LoraConfig as PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers.pytorch_utils import Conv1D

    lora = stored.spec.lora
    assert lora is not None
    _check_text_model(base_model, stored)
    library_names = {global_name: name for name, global_name in tensors.global_names.items()}
    layers = {
        library_names[f"{match[1]}.weight"].removesuffix(".weight"): match[1]
        for match in map(_FACTOR.fullmatch, stored.weights)
        if match
    }
    if not layers:
        raise ValueError(
            f"--adapter: the run has no adapters, found lora.first-block = {lora.first_block} and a head that was "
            "trained whole; leave out --adapter: the whole model has it"
        )
    heads = {name for name, global_name in tensors.global_names.items() if global_name.startswith("head.")}
    whole = set() if lora.freezes_head else heads
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(layers),
        modules_to_save=_modules_of(whole, tensors.reference) or None,
        # GPT-2's layers have their matrices the other way round.
        fan_in_fan_out=isinstance(tensors.reference.get_submodule(next(iter(layers))), Conv1D),
        task_type=_TASK_TYPES.get(stored.spec.head),
        inference_mode=True,
    )
    model: Any = get_peft_model(copy.deepcopy(tensors.reference), config, low_cpu_mem_usage=True)
    values: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for key in get_peft_model_state_dict(model, save_embedding_layers=False):
        name = key.removeprefix(_PREFIX)
        if factor := _FACTOR.fullmatch(name):
            values[key] = stored.weights[f"{layers[factor[1]]}.lora_{factor[2]}.default.weight"]
        else:
            values[key] = tensors[name]
        if values[key].data_ptr() in addresses:
            # Tied to another: a file has no two names for one tensor.
            values[key] = values[key].clone()
        addresses.add(values[key].data_ptr())
    missing = whole - {key.removeprefix(_PREFIX) for key in values}
    if missing or 2 * len(layers) != sum(1 for key in values if _FACTOR.fullmatch(key)):
        raise ValueError(
            f"--adapter: a PEFT folder has no place for {sorted(missing)[:3] or 'some of the adapters'}, which the run "
            "has trained; leave out --adapter: the whole model has them"
        )
    save_file({key: value.contiguous() for key, value in values.items()}, folder / _WEIGHTS, {"format": "pt"})
    # After the model is built: peft writes the name of the built one, which has none, in its place.
    config.base_model_name_or_path = base_model
    config.save_pretrained(str(folder))


def _check_text_model(base_model: str, stored: StoredModel) -> None:
    model_type = file_object(read_files(base_model, ["config.json"]), "config.json").get("model_type")
    if model_type is not None and model_type != stored.spec.family:
        raise ValueError(
            f"--adapter: {base_model} is of type {model_type}, of which the run has trained the text model alone "
            f"({stored.spec.family}): its layers have other names in the whole; leave out --adapter"
        )


def _modules_of(names: set[str], model: nn.Module) -> list[str]:
    """Return the largest modules that hold nothing but these parameters; else those that hold them directly."""
    modules: list[str] = []
    for name in sorted(names):
        *owners, _ = name.split(".")
        paths = [".".join(owners[: end + 1]) for end in range(len(owners))]
        if not paths or any(path in modules for path in paths):
            continue
        modules.append(next((path for path in paths if _is_trained(path, names, model)), paths[-1]))
    return [path for path in modules if not any(path.startswith(f"{other}.") for other in modules)]


def _is_trained(path: str, names: set[str], model: nn.Module) -> bool:
    module = model.get_submodule(path)
    parameters = module.named_parameters(prefix=path, remove_duplicate=False)
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and all(name in names for name, _ in parameters)
