"""Mixed precision: matrix products in bfloat16; parameters, sums, gradients and what travels in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

PRECISIONS = ("float32", "bfloat16")
"""bfloat16 has the exponents of float32, so that losses need no scaling."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Compute a part's forward pass in a precision of :data:`PRECISIONS`, where the part is (``torch.autocast``)."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
