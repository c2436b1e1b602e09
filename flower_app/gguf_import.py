"""``collapipe import-gguf``: a model in a GGUF file, quantised or not, as a folder that ``model.pretrained`` takes.

A run whose ``model.pretrained`` is such a file imports it once, to a folder that is named by the file's SHA-256.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client_pipeline import durable
from client_pipeline.runtime.stage.memory import give_freed_memory_back
from flower_app.config.run_config import RunConfig

_ENDING = ".gguf"
_MAGIC = b"GGUF"


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """Result of an import."""

    folder: Path
    model_type: str
    """Model type of the transformers library: the ``model.family``."""
    num_parameters: int
    files: list[str]


def import_gguf(file: Path, folder: Path) -> ImportedModel:
    """Write configuration, tokenizer and float32 weights of a GGUF file, by transformers' own reader.

    It needs memory for the model twice, here and once.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no whole GGUF file or of an unsupported model, the package ``gguf`` is missing, the folder is in use,
        or the disk has no room.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; name one that ends with .gguf")
    with file.open("rb") as content:
        if (start := content.read(len(_MAGIC))) != _MAGIC:
            raise ValueError(f"{file}: expected a GGUF file, which begins with {_MAGIC!r}; found {start!r}")
    durable.check_new_folder(folder)
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{file}: the package gguf, which reads it, is missing; install it: pip install 'collapipe[gguf]'"
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from client_pipeline.families.registry import library_family

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _reading(file):
        config = AutoConfig.from_pretrained(**place, trust_remote_code=False)
    library_family(config.model_type, str(file))
    with _reading(file):
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
    # The library takes it for a quantised model, which it does not save; its weights are float32 by now.
    del model.config.quantization_config
    model.hf_quantizer = None
    _write(model, tokenizer, folder)
    return ImportedModel(
        folder=folder,
        model_type=config.model_type,
        num_parameters=model.num_parameters(),
        files=sorted(path.name for path in folder.iterdir()),
    )


def with_gguf_imported(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """Put the folder of the imported model where ``model.pretrained`` is a GGUF file; another value stays as it is.

    The folder is made once for a machine's user. Of several processes that need it at a time one makes it; what one
    that was killed has left is removed.

    Raises
    ------
    ValueError
        Naming the key, if the file cannot be imported or the folder not be made.
    """
    file = Path(config.model.pretrained)
    if not (file.name.endswith(_ENDING) and file.is_file()):
        return config
    # Not above: a run asks this, and needs torch for nothing else.
    from client_pipeline.weights.base_weights import WEIGHT_CACHE

    cache = Path(WEIGHT_CACHE).expanduser() / "gguf"
    try:
        folder = cache / durable.file_digest(file)
        if folder.is_dir():
            say(f"model.pretrained: {file} was imported before: {folder}")
        else:
            say(f"model.pretrained: {file} is imported, once, to {folder}")
            with _alone(cache):
                if not folder.is_dir():
                    import_gguf(file, folder)
            # The whole model was in memory, and this process goes on.
            gc.collect()
            give_freed_memory_back()
    except (OSError, ValueError) as error:
        raise ValueError(f"model.pretrained: {error}") from error
    return replace(config, model=replace(config.model, pretrained=str(folder)))


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Wait for other processes that import; the system lets go for one that was killed."""
    descriptor = os.open(durable.make_folders(cache), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in cache.glob(".*"):
            durable.disk.remove(leftover)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Of a file that was cut the readers raise what the place of the cut happens to give.
        raise ValueError(f"{file}: transformers cannot read it: {error!r}; fetch the file again") from error


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model's folder in one step; raises ``ValueError`` if the disk has no room."""
    from safetensors import SafetensorError

    durable.make_folders(folder.parent)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if (free_bytes := shutil.disk_usage(folder.parent).free) < num_bytes:
        raise _full(folder, num_bytes, f"{free_bytes} are free")
    try:
        with made_aside(folder) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
    except (OSError, SafetensorError) as error:
        raise _full(folder, num_bytes, str(error)) from error


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Make a folder whose content appears in one step, when the context ends without an error."""
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield aside
        aside.chmod(0o755)
        durable.adopt_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _full(folder: Path, num_bytes: int, reason: str) -> ValueError:
    return ValueError(
        f"{folder}: cannot be written: the model takes {num_bytes} bytes, {reason}; make room and try again"
    )
