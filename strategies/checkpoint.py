"""The server's part of a checkpoint: what the run needs to go on from a committed round as if it had never stopped.

::

    checkpoint/round-000007/    weights.safetensors    the global model
                                decoder.safetensors    optimizer state of the decoder
                                server.safetensors     memory of the server's optimizer
                                state.json             queues, losses, where rounds.jsonl ends

A round is committed by the rename of its folder, after all control units have written their own part.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from client_pipeline.durable import put_in_place

FOLDER = "checkpoint"
_NAME = re.compile(r"^round-(\d{6,})$")
_TENSORS = {name: f"{name}.safetensors" for name in ("weights", "decoder", "server")}
_STATE = "state.json"


class Checkpoint(NamedTuple):
    """A run after a round."""

    round: int
    weights: dict[str, Tensor]
    """The global model, by global name."""
    decoder: dict[str, Tensor]
    """See :meth:`strategies.decoder.DecoderTrainer.state`."""
    server: dict[str, Tensor]
    """See :func:`strategies.server_optimizer.memory_of`."""
    state: dict[str, Any]
    """JSON values."""


def commit(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint in one step; older ones are dropped."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    final = folder / f"round-{checkpoint.round:06d}"
    aside = Path(tempfile.mkdtemp(dir=folder, prefix=".round-"))
    try:
        for field, file in _TENSORS.items():
            tensors: dict[str, Tensor] = getattr(checkpoint, field)
            save_file({name: value.contiguous() for name, value in tensors.items()}, aside / file)
        (aside / _STATE).write_text(json.dumps({"round": checkpoint.round, **checkpoint.state}), encoding="utf-8")
        put_in_place(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for round_ in _rounds(folder):
        if round_ != checkpoint.round:
            shutil.rmtree(folder / f"round-{round_:06d}", ignore_errors=True)
    return final


def last_committed(run_dir: Path) -> Checkpoint:
    """Read the newest checkpoint of a run.

    Raises
    ------
    FileNotFoundError
        If there is none; the message says why that may be.
    ValueError
        If a file is damaged; the message names it.
    """
    folder = run_dir / FOLDER
    rounds = _rounds(folder)
    if not rounds:
        raise FileNotFoundError(
            f"{folder}: no checkpoint; the run ended before its first round was done, or ran with "
            "checkpoint-every = 0: start it anew"
        )
    newest = folder / f"round-{max(rounds):06d}"
    for leftover in folder.glob(".round-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        state = json.loads((newest / _STATE).read_text(encoding="utf-8"))
        tensors = {field: load_file(newest / file) for field, file in _TENSORS.items()}
        return Checkpoint(round=max(rounds), state=state, **tensors)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{newest}: expected a checkpoint, {error}") from error


def _rounds(folder: Path) -> list[int]:
    found = (_NAME.match(path.name) for path in folder.glob("round-*"))
    return [int(match.group(1)) for match in found if match]
