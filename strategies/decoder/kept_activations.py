"""Activations that clusters send once and name from then on: a file of the server's, of a bounded size for each.

They never change where no TEB of a cluster is trained (``lora.first-block``). Each example is kept as it came, encoded
and with its noise, without the padding of its batch. The file has no name: it goes with the process.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from client_pipeline.link.frames import TARGET_PREFIX
from client_pipeline.partition.parts import IGNORED_LABEL
from strategies.decoder.member import Refusal
from strategies.flower_names import log

NAME_LENGTH = 32
LEAST_ENTRY = 4096
"""What an example counts for at least [byte]: its place in memory takes up to 400, however short a cluster makes it."""
_LABELS = f"{TARGET_PREFIX}labels"


class _Place(NamedTuple):
    offset: int
    size: int


class KeptActivations:
    """The store of a run. Safe to call from many threads.

    Parameters
    ----------
    cluster_bytes : most that it keeps of one cluster [byte]; an example counts for `LEAST_ENTRY` or more
    folder : where the file is; None: that of the machine's temporary files

    Raises
    ------
    OSError
        If no file can be made there.
    """

    def __init__(self, cluster_bytes: int, folder: Path | None = None) -> None:
        self.identity = secrets.token_hex(8)
        """Tells clusters whether this is the store that they filled."""
        self._cluster_bytes = cluster_bytes
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it lives as long as the run)
        self._end = 0
        self._places: dict[tuple[int, str], _Place] = {}
        self._held_bytes: dict[int, int] = {}
        self._is_full = False
        self._lock = threading.Lock()

    def put(self, cluster: int, names: Sequence[str], tensors: Mapping[str, Tensor]) -> bool:
        """Keep the examples of a micro-batch; returns whether all of them are kept.

        Parameters
        ----------
        cluster : whose they are
        names : of the examples
        tensors : of its frame, checked, with an entry of each example
        """
        with self._lock:
            new = {name: i for i, name in enumerate(names) if (cluster, name) not in self._places}
            if not new or not self._has_room(cluster, len(new) * LEAST_ENTRY):
                return not new
        encoded = {name: _example(tensors, i) for name, i in new.items()}
        with self._lock:
            # Another stream of the same cluster may have brought them meanwhile.
            blobs = {name: blob for name, blob in encoded.items() if (cluster, name) not in self._places}
            size = sum(max(len(blob), LEAST_ENTRY) for blob in blobs.values())
            if not self._has_room(cluster, size):
                return not blobs
            try:
                _write(self._file.fileno(), b"".join(blobs.values()), self._end)
            except OSError as error:
                self._is_full = True
                log(WARNING, "compression.cache-gb: no further activations are kept: %s", error)
                return False
            for name, blob in blobs.items():
                self._places[cluster, name] = _Place(self._end, len(blob))
                self._end += len(blob)
            self._held_bytes[cluster] = self._held_bytes.get(cluster, 0) + size
            return True

    def get(self, cluster: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of a micro-batch of examples that are kept, padded to the longest.

        Raises
        ------
        Refusal
            If one is not kept.
        """
        with self._lock:
            missing = sum((cluster, name) not in self._places for name in names)
            if missing or not names:
                raise Refusal(f"recall: expected examples that are kept, found {missing} of {len(names)} others")
            places = [self._places[cluster, name] for name in names]
        try:
            rows = [load(os.pread(self._file.fileno(), size, offset)) for offset, size in places]
        except (OSError, SafetensorError) as error:
            raise Refusal(f"recall: the kept activations cannot be read: {error}") from error
        return {
            key: pad_sequence([row[key] for row in rows], True, IGNORED_LABEL if key == _LABELS else 0)
            if rows[0][key].ndim
            else torch.stack([row[key] for row in rows])
            for key in rows[0]
        }

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _has_room(self, cluster: int, size: int) -> bool:
        return not self._is_full and self._held_bytes.get(cluster, 0) + size <= self._cluster_bytes


def _example(tensors: Mapping[str, Tensor], i: int) -> bytes:
    row = tensors["mask"][i]
    length = int(row.nonzero().max()) + 1 if bool(row.any()) else 1
    return save({key: _trimmed(key, value[i], length).contiguous() for key, value in tensors.items()})


def _trimmed(key: str, row: Tensor, length: int) -> Tensor:
    if key == _LABELS and row.ndim == 1:
        real = (row != IGNORED_LABEL).nonzero()
        return row[: int(real.max()) + 1 if len(real) else 1]
    return row[:length] if row.ndim else row


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
