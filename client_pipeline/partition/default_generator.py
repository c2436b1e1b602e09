"""torch's default generators, of which a process has one set: threads that draw from them take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
