"""A control unit's own part of a checkpoint: one safetensors file a round.

The server commits a round after all control units have written theirs, and keeps the last three that it has committed.
So a round may be on disk that was never committed: four files are kept, and a continued run reads the newest of those
that were. Each file says which run wrote it: a folder may have served another run of the same name.

Where the server commits every few rounds alone, a control unit still writes after each round that it trains in, over
the file of the next round to be committed: it may not train in that one, and it does not know.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from client_pipeline import durable
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer

CLUSTER_CHECKPOINT_FORMAT = "collapipe-cluster/2"
_KEPT = 4
_SUFFIX = ".safetensors"

_NOBODY = RunIdentity()

logger = logging.getLogger("collapipe.checkpoint")


class ClusterCheckpoint(NamedTuple):
    """A control unit after a round."""

    round: int
    drawn: int
    """Examples drawn: all the state of the data order. Dropout seeds derive from round, step, cluster and TEB."""
    states: dict[str, MovedBlock]
    """Weights and optimizer states by part: ``embedding``, ``block.3``, and ``head`` if it is trained here."""
    residual: dict[str, Tensor] = {}
    """Error of the compressed updates, which later updates make good."""
    pending: dict[str, Tensor] = {}
    """The same, if the update of ``pending_round`` has counted."""
    pending_round: int = 0
    identity: RunIdentity = RunIdentity()
    data: str = ""
    """SHA-256 of the cluster's data, where it is in files."""


def part_state(parameters: Mapping[str, nn.Parameter], optimizer: PartOptimizer) -> MovedBlock:
    """Weights and optimizer state of a part as they are now, not copied."""
    return MovedBlock({name: p.detach() for name, p in parameters.items()}, optimizer.state())


def write_checkpoint(folder: Path, checkpoint: ClusterCheckpoint, every: int = 1) -> Path:
    """Write a round's file in one step, and forget those before the last four.

    Parameters
    ----------
    folder : of this control unit's files
    checkpoint : after a round
    every : rounds between the server's commits; the file has the number of the next one
    """
    durable.make_folders(folder)
    tensors = {f"residual/{name}": value for name, value in checkpoint.residual.items()}
    tensors |= {f"pending/{name}": value for name, value in checkpoint.pending.items()}
    for name, state in checkpoint.states.items():
        tensors |= {f"{name}/weight/{key}": value for key, value in state.weights.items()}
        tensors |= {f"{name}/optimizer/{key}": value for key, value in state.optimizer.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    head = {
        "format": CLUSTER_CHECKPOINT_FORMAT,
        "round": checkpoint.round,
        "drawn": checkpoint.drawn,
        "pending-round": checkpoint.pending_round,
        "data": checkpoint.data,
        "sha256": _digest(tensors),
        **checkpoint.identity._asdict(),
    }
    path = folder / f"round-{-(-checkpoint.round // every) * every:06d}{_SUFFIX}"
    durable.write_file(path, partial(save_file, tensors, metadata={"collapipe": json.dumps(head)}))
    for old in [*durable.paths_of_rounds(folder, _SUFFIX).values()][:-_KEPT]:
        durable.remove(old)
    return path


def clear_checkpoints(folder: Path) -> None:
    """Forget all rounds: a new run begins."""
    durable.remove_leftovers(folder)
    for path in durable.paths_of_rounds(folder, _SUFFIX).values():
        durable.remove(path)


def read_checkpoint(
    folder: Path, committed: int, identity: RunIdentity = _NOBODY, data: str = ""
) -> ClusterCheckpoint | None:
    """Read the newest file of a committed round, and drop those of rounds that were not.

    Parameters
    ----------
    folder : of this control unit's files
    committed : round that the server goes on from
    identity, data : of the run that goes on; see :class:`ClusterCheckpoint`

    Returns
    -------
    None if the control unit has trained in no round until then. Files of other runs do not count, and go.

    Raises
    ------
    ValueError
        If the file is damaged, or was written under another configuration, with other data or in another format; the
        message names it.
    """
    durable.remove_leftovers(folder)
    paths = durable.paths_of_rounds(folder, _SUFFIX)
    for round_, path in reversed(paths.items()):
        if round_ > committed:
            durable.remove(path)
            continue
        try:
            checkpoint = _read(path, identity.run)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a control unit's checkpoint, {error}; the cluster cannot continue where it stopped: "
                "restore the file, or remove it to continue with a fresh optimizer"
            ) from error
        if checkpoint is None:
            logger.warning("%s belongs to another run of the same name: removing it", path)
            durable.remove(path)
            continue
        for key, of_file, now in (
            ("configuration", checkpoint.identity.config, identity.config),
            ("data", checkpoint.data, data),
        ):
            if of_file != now:
                raise ValueError(
                    f"{path}: {key}: expected the one that the run continues with (SHA-256 {now[:12] or 'none'}), "
                    f"found another ({of_file[:12] or 'none'}); restore it, or start a new run"
                )
        return checkpoint
    return None


def _read(path: Path, run: str) -> ClusterCheckpoint | None:
    """Read a file; None if it is another run's."""
    with safe_open(path, framework="pt") as file:
        head: dict[str, Any] = json.loads((file.metadata() or {})["collapipe"])
        if (found_format := head.get("format", "none")) != CLUSTER_CHECKPOINT_FORMAT:
            raise ValueError(
                f"format: expected {CLUSTER_CHECKPOINT_FORMAT}, found {found_format}, written "
                "by another version of CollaPipe"
            )
        if head["run"] != run:
            return None
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if (digest := _digest(tensors)) != head["sha256"]:
        raise ValueError(f"SHA-256 of the tensors: expected {head['sha256'][:12]}, found {digest[:12]}")
    states = {
        name: MovedBlock(_under(f"{name}/weight/", tensors), _under(f"{name}/optimizer/", tensors))
        for name in {key.partition("/")[0] for key in tensors} - {"residual", "pending"}
    }
    return ClusterCheckpoint(
        round=int(head["round"]),
        drawn=int(head["drawn"]),
        states=states,
        residual=_under("residual/", tensors),
        pending=_under("pending/", tensors),
        pending_round=int(head["pending-round"]),
        identity=RunIdentity(head["run"], head["config"]),
        data=str(head["data"]),
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(value.detach().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
