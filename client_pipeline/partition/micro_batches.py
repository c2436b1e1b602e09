"""Cutting a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from client_pipeline.partition.plan import micro_batch_sizes


def split_batch(batch: Mapping[str, Tensor], num_micro_batches: int) -> list[dict[str, Tensor]]:
    """Cut every tensor of a batch along its first dimension."""
    sizes = micro_batch_sizes(len(batch["input_ids"]), num_micro_batches)
    pieces = {name: tensor.split(sizes) for name, tensor in batch.items()}
    return [{name: pieces[name][i] for name in batch} for i in range(num_micro_batches)]
