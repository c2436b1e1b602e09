"""Folders whose weights are there in another form than whole safetensors files: each is refused with its remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from client_pipeline.documents import json_value
from client_pipeline.weights.weight_files import INDEX, SINGLE, mapped_file, weight_file_names

_SAVE_AGAIN = (
    "pickled weights are never read; open the folder with the transformers library and save it again, which writes "
    f"{SINGLE}: AutoModel....from_pretrained(...).save_pretrained(...)"
)
_OTHER_FRAMEWORK = (
    f"weights of TensorFlow, Flax or Paddle are not read; take the model's {SINGLE}, or convert them with PyTorch"
)
_NOT_READ = f"this format is not read; take the model's {SINGLE}"
_INCOMPLETE = f"these are parts of a checkpoint or of a download; save or fetch the whole model as {SINGLE}"
_REMEDIES = (
    (
        r"(.*/)?consolidated.*",
        "these are in their maker's own format; take the folder in the transformers library's format",
    ),
    (r".*\.(onnx|onnx_data|tflite|mlmodel|mlpackage|npz|pt2)|(.*/)?(openvino|rust)_model.*", _NOT_READ),
    (r".*\.distcp|.*_(model|optim)_states\.pt|.*\.safetensors\..+", _INCOMPLETE),
    (r".*\.(bin|pt|pth|pkl)(\.index\.json)?", _SAVE_AGAIN),
    (r".*\.(h5|msgpack|ckpt.*|pb|pdparams|data-\d+-of-\d+)(\.index\.json)?", _OTHER_FRAMEWORK),
    (r".*\.gguf", "import the file first: collapipe import-gguf FILE FOLDER"),
    (
        r".*\.safetensors",
        f"a model is in {SINGLE}, or in the files that {INDEX} names; fetch or rename what is missing, or give the "
        "folder that holds it",
    ),
)
"""Names of files with weights that are not read, and what helps; the first that fits counts."""
_NO_WEIGHTS = re.compile(r"(.*/)?(training_args|optimizer|scheduler|rng_state.*|scaler)\.(bin|pt|pth)")
"""A trainer's own files beside a model."""
_QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Keys of ``config.json``; the last one is MLX's."""
_QUANTIZED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_ADAPTER = "adapter_config.json"


def check_folder(folder: Path) -> None:
    """Refuse a model's folder from which no weights would be read although some are there.

    A folder with a ``config.json`` and no weights of any form passes.

    Raises
    ------
    FileNotFoundError
        If it has no ``config.json``.
    ValueError
        For adapters, quantised weights, weights of another format, missing shards and files that are not whole.
    """
    paths = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    complete = INDEX in names or SINGLE in names
    if _ADAPTER in names and not complete:
        raise ValueError(_adapter_remedy(folder))
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder} has no config.json; give the folder of a Hugging Face model")
    for name in _QUANTIZED_FILES:
        if name in names:
            raise _quantized(str(folder), name, "")
    if complete:
        for name in weight_file_names(folder):
            mapped_file(folder / name)
        return
    for pattern, remedy in _REMEDIES:
        weights = [
            name for name in names if re.fullmatch(pattern, name, re.IGNORECASE) and not _NO_WEIGHTS.fullmatch(name)
        ]
        if weights:
            raise ValueError(f"{folder}: expected safetensors weights, found {_listed(weights)}: {remedy}")


def check_plain_numbers(source: str, config: Any) -> None:
    """Refuse a model whose configuration says that its weights are quantised.

    Raises
    ------
    ValueError
        With the method's name.
    """
    for key in _QUANTIZED:
        if settings := getattr(config, key, None):
            values = settings if isinstance(settings, dict) else settings.to_dict()
            kind = str(values.get("quant_method") or next((k for k in values if k.startswith("load_in_")), key))
            raise _quantized(source, "config.json", kind)


def _quantized(source: str, file: str, method: str) -> ValueError:
    return ValueError(
        f"{source}: {file} says that the weights are quantised{f' ({method})' if method else ''}, expected plain "
        "numbers; dequantise first (model.dequantize() in the transformers library, then save_pretrained), or take the "
        "model that it was made from; model.base-dtype then holds frozen weights in few bits"
    )


def _adapter_remedy(folder: Path) -> str:
    try:
        base = json_value((folder / _ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, OSError, AttributeError):
        base = None
    return (
        f"{folder}: expected a whole model, found adapters of PEFT ({_ADAPTER}) for the base model "
        f"{base or '(not named)'}; give the base model, or merge them first: "
        "AutoPeftModel....from_pretrained(...).merge_and_unload().save_pretrained(...)"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
