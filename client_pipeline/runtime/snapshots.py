"""The copies of all TEBs that a control unit keeps, to put them back when a device is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ray

from client_pipeline.runtime.stage import MovedBlock


class _Copy(NamedTuple):
    """What one device held after a step."""

    blocks: list[int]
    states: Any
    """Ray's reference of ``{TEB: arrays}``."""


class Snapshots:
    """Weights and optimizer states of all TEBs after one optimizer step, the last that was committed.

    A device's copy is first on its own machine: Ray's object store outlives the process. From there it is fetched to
    the control unit's machine in the background. Before the first commit a TEB is what a checkpoint had of it, or new.

    Parameters
    ----------
    timeout_s : longest wait for a copy [s]
    """

    def __init__(self, timeout_s: float) -> None:
        self.version = 0
        """Optimizer step that the copies are after."""
        self.taken = 0
        """Commits so far."""
        self.bytes = 0
        """Bytes of all copies so far."""
        self.copy_s = 0.0
        """Time that the steps waited for them [s]."""
        self.fetch_s = 0.0
        """Time until they were on this machine, in the background [s]."""
        self._timeout_s = timeout_s
        self._at_rest: dict[int, MovedBlock] = {}
        self._copies: list[_Copy] = []

    def restore(self, states: Mapping[int, MovedBlock]) -> None:
        """Begin with a checkpoint's."""
        self._at_rest = dict(states)

    def commit(self, actors: Mapping[int, Any], blocks: Mapping[int, list[int]], version: int, ask: Any) -> None:
        """Have every device copied; the last snapshot is kept until all have answered.

        Parameters
        ----------
        actors : by device
        blocks : TEBs of each device
        version : optimizer step that they are after
        ask : waits for an answer of each device, as :meth:`DevicePool.answers` does
        """
        start = time.perf_counter()
        references = {d: actor.snapshot.options(num_returns=2).remote() for d, actor in actors.items()}
        sizes = ask({device: size for device, (size, _) in references.items()}, "copying TEBs")
        self._copies = [_Copy(list(blocks[device]), states) for device, (_, states) in references.items()]
        self._at_rest.clear()
        self.version = version
        self.taken += 1
        self.bytes += sum(sizes.values())
        self.copy_s += time.perf_counter() - start
        states = [copy.states for copy in self._copies]
        threading.Thread(target=self._fetch, args=(states,), daemon=True, name="snapshot").start()

    def _fetch(self, states: list[Any]) -> None:
        start = time.perf_counter()
        # Holding it here makes it outlive the machine that it comes from.
        ray.wait(states, num_returns=len(states), timeout=self._timeout_s, fetch_local=True)
        self.fetch_s += time.perf_counter() - start

    def sources(self, blocks: Iterable[int]) -> tuple[list[tuple[int, int]], list[Any]]:
        """Say where to take TEBs from, as :meth:`DeviceActor.put_back` wants it.

        Returns
        -------
        Each TEB with the number of its copies, -1 for one that is new; and the copies.
        """
        places: list[tuple[int, int]] = []
        copies: list[Any] = []
        numbers: dict[int, int] = {}
        for index in blocks:
            number = next((i for i, copy in enumerate(self._copies) if index in copy.blocks), None)
            if number is not None:
                if number not in numbers:
                    numbers[number] = len(copies)
                    copies.append(self._copies[number].states)
                places.append((index, numbers[number]))
            elif index in self._at_rest:
                places.append((index, len(copies)))
                copies.append({index: self._at_rest[index].as_arrays()})
            else:
                places.append((index, -1))
        return places, copies
