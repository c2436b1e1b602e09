"""The global model of a run as files: safetensors, its specification, its tokenizer and its task.

Nothing here unpickles: a model folder may come from anybody.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from client_pipeline.partition.families import build_parts
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import ModelSpec

FOLDER = "model"
WEIGHTS = "model.safetensors"
SPEC = "spec.json"
TOKENIZER = "tokenizer.json"
TASK = "task.json"


@dataclass(frozen=True)
class SavedModel:
    """A model folder, read and checked."""

    parts: ModelParts
    tokenizer_json: str
    """Text of a ``tokenizers`` tokenizer."""
    task: dict[str, Any]
    """What the task wants to remember: JSON values."""

    @property
    def spec(self) -> ModelSpec:
        """Architecture."""
        return self.parts.spec


def save_model(
    run_dir: Path, spec: ModelSpec, weights: Mapping[str, Tensor], tokenizer_json: str, task: Mapping[str, Any]
) -> Path:
    """Write the model folder of a run; one that is there is replaced as a whole.

    Parameters
    ----------
    run_dir : the run directory
    spec : architecture
    weights : every parameter under its global name, frozen ones too
    tokenizer_json : text of the tokenizer
    task : what the task wants to remember: JSON values

    Returns
    -------
    The model folder.
    """
    from safetensors.torch import save_file

    folder = run_dir / FOLDER
    aside = Path(tempfile.mkdtemp(dir=run_dir, prefix=f".{FOLDER}-"))
    try:
        save_file({name: value.detach().contiguous() for name, value in weights.items()}, aside / WEIGHTS)
        (aside / SPEC).write_text(spec.to_json(), encoding="utf-8")
        (aside / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
        (aside / TASK).write_text(json.dumps(dict(task), ensure_ascii=False, indent=2), encoding="utf-8")
        for file in aside.iterdir():
            file.chmod(0o644)
        aside.chmod(0o755)
        replaced = run_dir / f".{FOLDER}-replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            # A folder cannot be renamed over one that is not empty.
            os.replace(folder, replaced)
        os.replace(aside, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def load_model(run_dir: Path) -> SavedModel:
    """Read the model of a run.

    Raises
    ------
    FileNotFoundError
        If the run has no model; the message says what that means.
    ValueError
        If a file is damaged or the weights have another shape; the message names the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = run_dir / FOLDER
    for name in (WEIGHTS, SPEC, TOKENIZER, TASK):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; the run has not saved a model (did it finish?)")
    try:
        parts = build_parts(ModelSpec.from_json((folder / SPEC).read_text(encoding="utf-8")), seed=0)
        task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    try:
        weights = load_file(folder / WEIGHTS)
        frozen = parts.frozen_weights().keys()
        parts.load_frozen({name: value for name, value in weights.items() if name in frozen})
        parts.load({name: value for name, value in weights.items() if name not in frozen})
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: {error}") from error
    return SavedModel(parts=parts, tokenizer_json=(folder / TOKENIZER).read_text(encoding="utf-8"), task=task)
