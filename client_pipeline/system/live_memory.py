"""Memory of a TEB's passes, byte by byte, on tensors without data.

A dispatch mode sees every tensor that an operation of torch makes, and when its storage goes: the sum is what a process
needs for them, without the allocator's own. Attention is counted as the processor's kernel computes it, which stores
neither scores nor probabilities: on tensors without data torch would choose the plain formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from client_pipeline.partition.token_slices import token_slices
from client_pipeline.partition.weight_gradients import WaitingWeights
from client_pipeline.weights.low_bits import low_bit_layers


class PassMemory(NamedTuple):
    """A forward and a backward pass of one TEB [byte]."""

    saved_bytes: int
    """Kept between the two."""
    peak_bytes: int
    """Most at any time, gradients of parameters that were there before left out."""


class ProcessorAttention(TorchFunctionMode):
    """Computes attention without dropout, and without gradients of its mask, as the processor does.

    By its kernel, that is, also of tensors that have no data.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or kwargs.get("dropout_p"):
            return func(*args, **kwargs)
        mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
        # T5's bias learns, and the processor's kernel has no gradient of its mask: torch takes the plain formula, too.
        if mask is not None and mask.requires_grad:
            return func(*args, **kwargs)
        # Nor does it take values of another width than the queries'.
        if args[0].shape[-1] != args[2].shape[-1]:
            return func(*args, **kwargs)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(*args[:3], 0.0, bool(kwargs.get("is_causal")), attn_mask=mask, scale=scale)[0]


class ProcessorExperts(TorchFunctionMode):
    """Computes the products of experts with their tokens as the processor's kernel does, on tensors without data.

    The kernel takes all tokens sorted by expert, [S, I], and the matrices of all experts, [E, I, O]. Without data the
    place where one expert's tokens end is unknown. FLOP and bytes are those of one expert with all tokens, and the
    gradient is that of all matrices.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].is_meta:
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made within, and have not gone; those of ``there`` were there before."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in there}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it has made."""
        given = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(given):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return given

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class SlicedMemory(NamedTuple):
    """Forward passes of a micro-batch's token slices through one TEB [byte]."""

    saved_bytes: int
    """Kept of all of them, for themselves and for later ones."""
    later_bytes: int
    """Part of it that is for later ones alone: keys and values of all slices but the last."""


@contextmanager
def _saved_storages(block: nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


def pass_memory(block: nn.Module, shape_BTD: tuple[int, int, int]) -> PassMemory:
    """Count one TEB's passes over a micro-batch without padding.

    Parameters
    ----------
    block : on the meta device; afterwards it has gradients
    shape_BTD : of its input
    """
    there: list[Tensor] = [*block.parameters(), *block.buffers()]
    for parameter in block.parameters():
        if parameter.requires_grad:
            # That of the micro-batch before: this one's is added to it.
            parameter.grad = torch.zeros_like(parameter)
            there.append(parameter.grad)
    there += [tensor for _, layer in low_bit_layers(block) for tensor in layer.packed_matrix]
    x_BTD = torch.empty(shape_BTD, device="meta", requires_grad=True)
    gradient_BTD = torch.empty(shape_BTD, device="meta")
    once_before(block, x_BTD)
    with ProcessorAttention(), _LiveBytes(there) as live:
        with _saved_storages(block) as storages:
            y_BTD = block(x_BTD, None)
        saved_bytes = sum(storage.nbytes() for storage in storages.values())
        storages.clear()
        torch.autograd.backward(y_BTD, gradient_BTD)
    return PassMemory(saved_bytes, live.peak)


def saved_in_slices(block: nn.Module, shape_BTD: tuple[int, int, int], num_slices: int) -> SlicedMemory:
    """Count what the forward passes of a micro-batch's token slices keep.

    Parameters
    ----------
    block : of a causal family, on the meta device
    shape_BTD : of the whole micro-batch's input
    num_slices : Q
    """
    examples, length, width = shape_BTD
    slices = token_slices(torch.ones(examples, length, dtype=torch.bool), num_slices)
    once_before(block, torch.empty(shape_BTD, device="meta"))
    with ProcessorAttention(), _saved_storages(block) as storages:
        for part in slices:
            block(torch.empty(examples, part.end - part.first, width, device="meta", requires_grad=True), part)
    later_bytes = sum(part.nbytes for part in slices)
    return SlicedMemory(sum(storage.nbytes() for storage in storages.values()) + later_bytes, later_bytes)


def waiting_for_weights(block: nn.Module, shape_BTD: tuple[int, int, int]) -> int:
    """Count what waits after a backward pass that puts weight gradients off [byte].

    Parameters
    ----------
    block : on the meta device
    shape_BTD : of its input
    """
    x_BTD = torch.empty(shape_BTD, device="meta", requires_grad=True)
    once_before(block, x_BTD)
    with ProcessorAttention(), WaitingWeights() as waiting:
        y_BTD = block(x_BTD, None)
    torch.autograd.backward(y_BTD, torch.empty(shape_BTD, device="meta"))
    return waiting.nbytes


def once_before(block: nn.Module, x_BTD: Tensor) -> None:
    """Have a TEB make the masks and tables that all TEBs of a stage share: they are no part of a pass."""
    with torch.no_grad(), ProcessorAttention():
        block(x_BTD, None)
