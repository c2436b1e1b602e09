"""Examples whose activations the server keeps (``compression.cache-gb``), by names that tell nothing of their text."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from client_pipeline.partition.parts import IGNORED_LABEL

_KEY_BYTES, _NAME_BYTES = 32, 16


class KeptExamples:
    """Names of a control unit's examples, and which of them the server keeps.

    A name is a keyed digest of all that the activations and the loss follow from, without padding: an example that
    comes otherwise (with other tokens hidden, say) has another name. The key never leaves the process, so that the
    server cannot try which text has a name.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._store = ""
        self._names: set[str] = set()

    def of_store(self, store: str) -> None:
        """Note the server's store that answers from now on; another than before keeps nothing."""
        if store != self._store:
            self._store = store
            self._names.clear()

    def has(self, names: Iterable[str]) -> bool:
        """Return whether the server keeps all these examples."""
        return self._names.issuperset(names)

    def add(self, names: Iterable[str]) -> None:
        """Note examples that the server has said it keeps."""
        self._names.update(names)

    def names(self, batch: Mapping[str, Tensor]) -> list[str]:
        """Return the name of each example of a batch, whose tensors are [B, ...]."""
        lengths = [int(row.nonzero().max()) + 1 if bool(row.any()) else 0 for row in batch["attention_mask"]]
        positions = batch["attention_mask"].shape[1]
        return [
            self._name({key: _unpadded(key, value[i], positions, length) for key, value in batch.items()})
            for i, length in enumerate(lengths)
        ]

    def _name(self, example: Mapping[str, Tensor]) -> str:
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for key, value in sorted(example.items()):
            digest.update(f"{key} {value.dtype} {list(value.shape)};".encode())
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()[: 2 * _NAME_BYTES]


def _unpadded(key: str, row: Tensor, positions: int, length: int) -> Tensor:
    if key == "labels" and row.ndim == 1:
        # A translation's are as long as their batch's longest.
        real = (row != IGNORED_LABEL).nonzero()
        return row[: int(real.max()) + 1 if len(real) else 0]
    return row[:length] if row.ndim and len(row) == positions else row


def split_names(names: Sequence[str], sizes: Iterable[int]) -> list[list[str]]:
    """Split the names of a batch as its examples are split into micro-batches."""
    parts, first = [], 0
    for size in sizes:
        parts.append(list(names[first : first + size]))
        first += size
    return parts
