"""Hardware and precision of a part: the processor, or an accelerator of its machine (``runtime.accelerator``).

Devices compute their TEBs there, and the server its decoder. All tensors that leave a part are on the host: activations
and gradients, weights, optimizer states, copies for lost devices, checkpoints. So no transport depends on an
accelerator, and a run can go on with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")
LIBRARIES_BYTES = 1e9
"""Estimate under ``auto`` for an accelerator's own libraries and activations beside a part [byte]."""
_STATES_AND_GRADIENT = 3
"""Tensors of a trained parameter's size beside it: its gradient, and AdamW's two means."""


@dataclass(frozen=True)
class AcceleratorKind:
    """One kind, as torch offers it."""

    devices: Callable[[], list[torch.device]]
    """Devices of this machine; none where torch was built without the kind, or finds no driver."""
    free_bytes: Callable[[torch.device], float]
    """Memory that a process could have there now [byte]."""
    remedy: str


def _cuda_devices() -> list[torch.device]:
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def _mps_devices() -> list[torch.device]:
    return [torch.device("mps")] if torch.backends.mps.is_available() else []


def _mps_free_bytes(_: torch.device) -> float:
    return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())


ACCELERATOR_KINDS: dict[str, AcceleratorKind] = {
    "cuda": AcceleratorKind(
        _cuda_devices,
        lambda device: float(torch.cuda.mem_get_info(device)[0]),
        "install the driver and a torch that is built for CUDA there",
    ),
    "mps": AcceleratorKind(_mps_devices, _mps_free_bytes, "Apple's Metal needs macOS on a processor of Apple's"),
}
"""Kinds in the order of preference of ``auto``."""


def find_accelerator(kind: str, needed_bytes: float = 0.0) -> torch.device:
    """Choose the hardware that a part computes on; of several of a kind, the one with the most free memory.

    Parameters
    ----------
    kind : one of :data:`client_pipeline.runtime.config.ACCELERATORS`; ``auto``: the first kind that has the memory,
        else the processor
    needed_bytes : what ``auto`` looks for [byte]

    Raises
    ------
    ValueError
        If this machine has no accelerator of that kind.
    """
    if kind == HOST.type:
        return HOST
    if kind == "auto":
        roomy = (_roomiest(candidate) for candidate in ACCELERATOR_KINDS.values())
        return next((device for device, free_bytes in roomy if free_bytes >= needed_bytes), HOST)
    named = ACCELERATOR_KINDS[kind]
    device, _ = _roomiest(named)
    if device == HOST:
        there = ", ".join(name for name, other in ACCELERATOR_KINDS.items() if other.devices()) or "the processor alone"
        raise ValueError(
            f"runtime.accelerator: expected {kind}, found {there} (torch {torch.__version__}); {named.remedy}, or set "
            "runtime.accelerator to auto or cpu"
        )
    return device


def _roomiest(kind: AcceleratorKind) -> tuple[torch.device, float]:
    """Return the accelerator with the most free memory, and that memory; the host and -1 where there is none."""
    free_bytes = {device: kind.free_bytes(device) for device in kind.devices()}
    return max(free_bytes.items(), key=lambda entry: entry[1], default=(HOST, -1.0))


def accelerators_here() -> dict[str, float]:
    """Return the free memory of each accelerator of this machine, by torch's name for it [byte]."""
    return {str(device): kind.free_bytes(device) for kind in ACCELERATOR_KINDS.values() for device in kind.devices()}


def training_bytes(module: nn.Module) -> float:
    """Return the bytes that training a part takes on an accelerator, without its activations (:data:`LIBRARIES_BYTES`).

    Weights are counted as float32, on the meta device, too.
    """
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    return 4.0 * (frozen + (1 + _STATES_AND_GRADIENT) * trained) + LIBRARIES_BYTES


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring tensors to the host; those that are there are not copied."""
    return {name: tensor.to(HOST) for name, tensor in tensors.items()}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Compute matrix products in one of :data:`client_pipeline.runtime.config.PRECISIONS`; all else stays float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
