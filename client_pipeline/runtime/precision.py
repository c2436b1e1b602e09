"""Mixed precision: matrix products in bfloat16; parameters, sums, gradients and what travels in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Compute a part's forward pass in a precision, where the part is (``torch.autocast``).

    The precision is one of :data:`client_pipeline.runtime.config.PRECISIONS`.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
