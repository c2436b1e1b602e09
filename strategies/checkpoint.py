"""The server's part of a checkpoint: what the run needs to go on from a committed round as if it had never stopped.

::

    checkpoint/round-000007/    weights.safetensors    the global model
                                decoder.safetensors    optimizer state of the decoder
                                server.safetensors     memory of the server's optimizer
                                state.json             format, run, sizes and digests of the others; queues, losses,
                                                       where rounds.jsonl ends

A round is committed by the rename of its folder, after all control units have written their own part. The last three
are kept: where the newest is damaged, the run goes on from the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from client_pipeline import durable
from client_pipeline.documents import json_value
from client_pipeline.run_identity import RunIdentity, sealed, unsealed

FOLDER = "checkpoint"
FORMAT = "collapipe-checkpoint/2"
KEPT = 3
_TENSORS = {name: f"{name}.safetensors" for name in ("weights", "decoder", "server")}
_STATE = "state.json"

logger = logging.getLogger("flwr")


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the one before may be."""


class Checkpoint(NamedTuple):
    """A run after a round."""

    round: int
    weights: dict[str, Tensor]
    """The global model, by global name."""
    decoder: dict[str, Tensor]
    """See :meth:`strategies.decoder.trainer.DecoderTrainer.state`."""
    server: dict[str, Tensor]
    """See :func:`strategies.aggregation.server_optimizers.memory_of`."""
    state: dict[str, Any]
    """JSON values."""
    identity: RunIdentity = RunIdentity()


def commit(run_dir: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint in one step; those before the last three are dropped."""
    folder = durable.make_folders(run_dir / FOLDER)
    files: dict[str, durable.FileWriter] = {}
    for field, file in _TENSORS.items():
        tensors = {name: value.contiguous() for name, value in getattr(checkpoint, field).items()}
        files[file] = partial(save_file, tensors)
    final = durable.write_folder(
        folder / f"round-{checkpoint.round:06d}", files | {_STATE: partial(_write_state, checkpoint)}
    )
    for old in [*durable.paths_of_rounds(folder).values()][:-KEPT]:
        durable.remove(old)
    return final


def _write_state(checkpoint: Checkpoint, path: Path) -> None:
    files = {file: _described(path.with_name(file)) for file in _TENSORS.values()}
    head = {"format": FORMAT, "round": checkpoint.round, "identity": checkpoint.identity._asdict(), "files": files}
    path.write_text(sealed({**checkpoint.state, **head}), encoding="utf-8")


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": durable.file_digest(path)}


def last_committed(run_dir: Path, check: Callable[[Checkpoint], None] = lambda _: None) -> Checkpoint:
    """Read the newest checkpoint of a run that is whole; says so where it is not the newest.

    Parameters
    ----------
    run_dir : the run's
    check : raises :class:`DamagedCheckpoint` if what belongs to a checkpoint elsewhere is not as it was

    Raises
    ------
    FileNotFoundError
        If there is none; the message says why that may be.
    ValueError
        If all are damaged, or one was written in another format; the message names it.
    """
    folders = durable.paths_of_rounds(run_dir / FOLDER)
    if not folders:
        raise FileNotFoundError(
            f"{run_dir / FOLDER}: no checkpoint; the run ended before its first round was done, or ran with "
            "checkpoint-every = 0: start it anew"
        )
    damages = []
    for round_, folder in reversed(folders.items()):
        try:
            checkpoint = _read(folder, round_)
            check(checkpoint)
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            continue
        for damage_text in damages:
            logger.warning("%s; the run goes on from round %d instead", damage_text, round_)
        return checkpoint
    raise ValueError("; ".join(damages) + "; no checkpoint is whole: start the run anew")


def go_back(run_dir: Path, round_: int) -> None:
    """Drop what is newer than the checkpoint of a round, and what a killed process has left aside."""
    folder = run_dir / FOLDER
    durable.remove_leftovers(folder)
    for number, path in durable.paths_of_rounds(folder).items():
        if number > round_:
            durable.remove(path)


def committed_rounds(run_dir: Path) -> list[int]:
    """Rounds with a checkpoint, in their order."""
    return list(durable.paths_of_rounds(run_dir / FOLDER))


def _read(folder: Path, round_: int) -> Checkpoint:
    try:
        text = (folder / _STATE).read_text(encoding="utf-8")
        _check_format(text, folder)
        state = unsealed(text)
        identity, files = RunIdentity(**state.pop("identity")), state.pop("files")
        if state["round"] != round_:
            raise ValueError(f"{_STATE}: expected round {round_}, found {state['round']}")
        for file in _TENSORS.values():
            if (description := _described(folder / file)) != files[file]:
                raise ValueError(
                    f"{file}: expected {_size_and_digest(files[file])}, found {_size_and_digest(description)}"
                )
        tensors = {field: load_file(folder / file) for field, file in _TENSORS.items()}
    except _OtherFormat:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{folder}: expected a checkpoint, {error}") from error
    return Checkpoint(round=round_, state=state, identity=identity, **tensors)


class _OtherFormat(ValueError):
    """A checkpoint of another version, which may be whole."""


def _check_format(text: str, folder: Path) -> None:
    """Tell a checkpoint of another version from a damaged one, whose text may be anything."""
    state = json_value(text)
    if isinstance(state, dict) and isinstance(state.get("value"), dict):
        state = state["value"]
    if isinstance(state, dict) and (written := state.get("format", "none, as before formats had numbers")) != FORMAT:
        raise _OtherFormat(
            f"{folder / _STATE}: format: expected {FORMAT}, found {written}; this version of CollaPipe cannot go on "
            "from it: resume with the version that wrote it, or start a new run"
        )


def _size_and_digest(described: dict[str, Any]) -> str:
    return f"{described['bytes']} bytes with SHA-256 {described['sha256'][:12]}"
