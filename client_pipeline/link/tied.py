"""Tied matrices on the stream: cut into rows that fit a frame, and put together again.

An embedding is far larger than the activations of a micro-batch (BERT's has 94 MB), so that it takes several frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_HEADER_BYTES = 4096
_PIECE_BYTES = 2**24


def pieces(tied: Mapping[str, Tensor], max_frame_bytes: int) -> Iterator[tuple[str, int, Tensor]]:
    """Cut matrices into runs of rows for frames of at most ``max_frame_bytes``: name, first row, rows."""
    room = min(max_frame_bytes - _HEADER_BYTES, _PIECE_BYTES)
    for name, matrix in tied.items():
        count = max(room // max(matrix[:1].nbytes, 1), 1)
        for start in range(0, len(matrix), count):
            yield name, start, matrix[start : start + count]


class TiedRows:
    """Puts matrices of known shapes together; rows come in order."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self.values: dict[str, Tensor] = {}
        self._filled = dict.fromkeys(self.shapes, 0)

    @property
    def missing(self) -> str | None:
        """Name of a matrix that is not complete; None when all are."""
        return next((name for name, rows in self._filled.items() if rows < self.shapes[name][0]), None)

    def add(self, name: str, start: int, rows: Tensor) -> None:
        """Take the next rows of a matrix.

        Raises
        ------
        ValueError
            If they are not float32, out of order, not finite, or of another shape; the message names the matrix.
        """
        if name not in self.shapes:
            raise ValueError(f"tied matrix {name}: expected one of {sorted(self.shapes)}")
        shape, filled = self.shapes[name], self._filled[name]
        if start != filled:
            raise ValueError(f"tied matrix {name}: expected rows from {filled} on, found rows from {start} on")
        if rows.dtype != torch.float32:
            raise ValueError(f"tied matrix {name}: expected float32, found {rows.dtype}")
        if rows.ndim != len(shape) or rows.shape[1:] != shape[1:] or not 0 < len(rows) <= shape[0] - filled:
            raise ValueError(
                f"tied matrix {name}: expected at most {shape[0] - filled} rows of shape {list(shape[1:])}, found "
                f"{list(rows.shape)}"
            )
        if not bool(torch.isfinite(torch.stack(rows.aminmax())).all()):
            raise ValueError(f"tied matrix {name} holds NaN or Inf: training diverged; lower optimizer.lr")
        if name not in self.values:
            self.values[name] = torch.empty(shape)
        self.values[name][start : start + len(rows)] = rows
        self._filled[name] = start + len(rows)
