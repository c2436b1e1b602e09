"""Seeds of dropout, which do not depend on the device that computes, and torch's default generators.

A process has one set of default generators: threads that draw from them take turns.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

EMBEDDING_UNIT = -1
"""Stands for the embedding where a TEB's index is asked for; the head is unit L."""
_DATA_UNIT = -2
_TURN = threading.RLock()


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Draw from the default generators as of ``seed``, alone; they go on from there afterwards."""
    with _TURN:
        torch.default_generator.manual_seed(seed)
        # A part that is on a GPU draws there. To ask costs nothing, and wakes no driver where there is none.
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(seed)
        yield


@contextmanager
def drawn_aside(seed: int) -> Iterator[None]:
    """Draw on the CPU as of ``seed``, alone; the default generator is as it was afterwards."""
    with _TURN, torch.random.fork_rng(devices=[]):
        # ``torch.manual_seed`` is for the GPUs too: where none is awake it keeps the whole stack of each call for them.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Draw from the default generators while no other thread counts on what they give next."""
    with _TURN:
        yield


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
