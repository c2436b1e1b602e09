"""Cutting a batch into micro-batches, and the seeds that make dropout independent of who computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from client_pipeline.partition.default_generator import drawn_from
from client_pipeline.partition.plan import micro_batch_sizes

EMBEDDING_UNIT = -1
"""Stands for the embedding where a TEB's index is asked for; the head is unit L."""
_DATA_UNIT = -2


def split_batch(batch: Mapping[str, Tensor], num_micro_batches: int) -> list[dict[str, Tensor]]:
    """Cut every tensor of a batch along its first dimension."""
    sizes = micro_batch_sizes(len(batch["input_ids"]), num_micro_batches)
    pieces = {name: tensor.split(sizes) for name, tensor in batch.items()}
    return [{name: pieces[name][i] for name in batch} for i in range(num_micro_batches)]


@dataclass(frozen=True, kw_only=True)
class StepId:
    """Names one local step of one cluster; dropout seeds derive from it."""

    seed: int
    """Seed of the run."""
    round: int
    """Round, from 1."""
    step: int
    """Local step within the round, from 1."""
    cluster: int
    first: int = 0
    """Number in the step of the batch's first micro-batch: not 0 from a step's second batch on."""

    def dropout_seed(self, unit: int, micro_batch: int) -> int:
        """Seed for one unit (embedding, TEB or head) and micro-batch of the batch, 63 bit."""
        text = f"{self.seed}/{self.round}/{self.step}/{self.cluster}/{unit}/{self.first + micro_batch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    @property
    def data_seed(self) -> int:
        """Seed for what is random in the step's batch, such as which tokens are masked; 63 bit."""
        return self.dropout_seed(_DATA_UNIT, 0)

    @contextmanager
    def dropout(self, unit: int, micro_batch: int) -> Iterator[None]:
        """Run one unit's forward pass of one micro-batch with torch's default generators seeded for it.

        They belong to the process, so units that run in several threads take turns here.
        """
        with drawn_from(self.dropout_seed(unit, micro_batch)):
            yield
