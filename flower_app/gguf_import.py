"""``collapipe import-gguf``: a model in a GGUF file, quantised or not, as a folder that ``model.pretrained`` takes."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from client_pipeline import durable
from client_pipeline.partition.families import library_adapter

_MAGIC = b"GGUF"


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """What was written."""

    folder: Path
    model_type: str
    """Of the transformers library: the ``model.family``."""
    num_parameters: int
    files: list[str]


def import_gguf(file: Path, folder: Path) -> ImportedModel:
    """Write configuration, tokenizer and float32 weights of a GGUF file, by transformers' own reader.

    It needs memory for the model twice, here and once.

    Parameters
    ----------
    file : of a causal language model of a supported family
    folder : where to; it must not exist, or be empty

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no GGUF file or of an unsupported model, the package ``gguf`` is missing, or the folder is in use.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; name one that ends with .gguf")
    with file.open("rb") as content:
        if (start := content.read(len(_MAGIC))) != _MAGIC:
            raise ValueError(f"{file}: expected a GGUF file, which begins with {_MAGIC!r}; found {start!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is there already; give a folder that does not exist or is empty")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("import-gguf: the package gguf is missing; install it: pip install 'collapipe[gguf]'")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**place, trust_remote_code=False)
        library_adapter(config.model_type, str(file))
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
    except (OSError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file}: transformers cannot read it: {error!r}") from error
    # The library takes it for a quantised model, which it does not save; its weights are float32 by now.
    del model.config.quantization_config
    model.hf_quantizer = None
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        model.save_pretrained(temporary_folder)
        tokenizer.save_pretrained(temporary_folder)
        temporary_folder.chmod(0o755)
        durable.adopt_folder(temporary_folder, folder)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return ImportedModel(
        folder=folder,
        model_type=config.model_type,
        num_parameters=model.num_parameters(),
        files=sorted(path.name for path in folder.iterdir()),
    )
