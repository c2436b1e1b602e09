"""Bytes of a device's stored activations, counted tensor by tensor; its process may hold other devices, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StoredActivations:
    """Bytes that forward passes keep for their backward passes, over the micro-batches that are under way.

    Only the first micro-batch of each shape is measured; the others of that shape keep as many bytes.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Most at the same time since :meth:`forget_peak`."""
        self._bytes_by_shape: dict[tuple[object, ...], int] = {}
        self._stored: dict[int, int] = {}

    @contextmanager
    def count(self, micro_batch: int, key: tuple[object, ...], weights: Iterable[Tensor]) -> Iterator[None]:
        """Count the bytes that a micro-batch's forward pass keeps.

        Parameters
        ----------
        micro_batch : its number
        key : forward passes of the same key keep the same number of bytes
        weights : weights of the passes, which are not counted
        """
        if key in self._bytes_by_shape:
            yield
        else:
            known = {weight.untyped_storage().data_ptr() for weight in weights}
            size_by_address: dict[int, int] = {}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    size_by_address[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield
            self._bytes_by_shape[key] = sum(size_by_address.values())
        self._stored[micro_batch] = self._bytes_by_shape[key]
        self.peak_bytes = max(self.peak_bytes, self.stored_bytes)

    def keep(self, micro_batch: int, num_bytes: int) -> None:
        """Set the bytes that a micro-batch keeps."""
        self._stored[micro_batch] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.stored_bytes)

    def keep_beside(self, micro_batch: int, num_bytes: int) -> None:
        """Add to the bytes that a micro-batch keeps."""
        self.keep(micro_batch, self._stored[micro_batch] + num_bytes)

    def free(self, micro_batch: int) -> None:
        """Note that a micro-batch is through."""
        self._stored.pop(micro_batch, None)

    def clear(self) -> None:
        """Note that nothing is kept any more."""
        self._stored.clear()

    @property
    def stored_bytes(self) -> int:
        """Bytes that are stored now."""
        return sum(self._stored.values())

    def forget_peak(self) -> None:
        """Count the peak anew from here."""
        self.peak_bytes = self.stored_bytes
