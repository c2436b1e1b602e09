"""A control unit's own part of a checkpoint: one safetensors file a round, with what a continued run needs of it.

The server commits a round after all control units have written theirs. So a round may be on disk that was never
committed: two files are kept, and a continued run reads the newest of those that were.

Where the server commits every few rounds alone, a control unit still writes after each round that it trains in, over
the file of the next round to be committed: it may not train in that one, and it does not know.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from client_pipeline.durable import put_in_place
from client_pipeline.runtime.optimizer import PartOptimizer
from client_pipeline.runtime.stage import MovedBlock

_KEPT = 2
_NAME = re.compile(r"^round-(\d{6,})\.safetensors$")


class ClusterCheckpoint(NamedTuple):
    """A control unit after a round."""

    round: int
    drawn: int
    """Examples drawn: all the state of the data order. Dropout seeds derive from round, step, cluster and TEB."""
    states: dict[str, MovedBlock]
    """Weights and optimizer states by part: ``embedding``, ``block.3``, and ``head`` if it is trained here."""
    residual: dict[str, Tensor] = {}
    """What the compression of updates has to make good."""


def part_state(parameters: Mapping[str, nn.Parameter], optimizer: PartOptimizer) -> MovedBlock:
    """Weights and optimizer state of a part as they are now, not copied."""
    return MovedBlock({name: p.detach() for name, p in parameters.items()}, optimizer.state())


def write(folder: Path, checkpoint: ClusterCheckpoint, every: int = 1) -> Path:
    """Write a round's file in one step, and forget those before the last two.

    Parameters
    ----------
    folder : of this control unit's files
    checkpoint : after a round
    every : rounds between the server's commits; the file has the number of the next one
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{-(-checkpoint.round // every) * every:06d}.safetensors"
    aside = folder / f".{path.name}-{os.getpid()}"
    tensors = {f"residual/{name}": value for name, value in checkpoint.residual.items()}
    for name, state in checkpoint.states.items():
        tensors |= {f"{name}/weight/{key}": value for key, value in state.weights.items()}
        tensors |= {f"{name}/optimizer/{key}": value for key, value in state.optimizer.items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, aside, {"collapipe": json.dumps({"round": checkpoint.round, "drawn": checkpoint.drawn})})
    put_in_place(aside, path)
    for round_ in sorted(_rounds(folder))[:-_KEPT]:
        (folder / f"round-{round_:06d}.safetensors").unlink(missing_ok=True)
    return path


def read(folder: Path, committed: int) -> ClusterCheckpoint | None:
    """Read the newest file of a committed round, and drop those of rounds that were not.

    Returns
    -------
    None if the control unit has trained in no round until then.

    Raises
    ------
    ValueError
        If the file is damaged; the message names it.
    """
    for leftover in folder.glob(".round-*"):
        leftover.unlink(missing_ok=True)
    rounds = _rounds(folder)
    for round_ in sorted(r for r in rounds if r > committed):
        (folder / f"round-{round_:06d}.safetensors").unlink(missing_ok=True)
    newest = max((r for r in rounds if r <= committed), default=None)
    if newest is None:
        return None
    path = folder / f"round-{newest:06d}.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads(file.metadata()["collapipe"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        states = {
            name: MovedBlock(_under(f"{name}/weight/", tensors), _under(f"{name}/optimizer/", tensors))
            for name in {key.partition("/")[0] for key in tensors} - {"residual"}
        }
        return ClusterCheckpoint(int(told["round"]), int(told["drawn"]), states, _under("residual/", tensors))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a control unit's checkpoint, {error}") from error


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _rounds(folder: Path) -> list[int]:
    found = (_NAME.match(path.name) for path in folder.glob("round-*.safetensors"))
    return [int(match.group(1)) for match in found if match]
