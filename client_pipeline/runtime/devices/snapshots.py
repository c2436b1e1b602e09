"""The copies of all TEBs that a control unit keeps, to put them back when a device is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from client_pipeline.runtime.stage.moved_block import MovedBlock


class Snapshots:
    """Weights and optimizer states of all TEBs after one optimizer step, the last that was committed.

    A device makes its copy with the step, at first on its own machine: Ray's object store outlives the process. From
    there it is fetched to the control unit's machine in the background. Before the first commit a TEB is what a
    checkpoint had of it, or new.

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
        self.fetch_s = 0.0
        """Time until they were on this machine, in the background [s]."""
        self._timeout_s = timeout_s
        self._at_rest: dict[int, MovedBlock] = {}
        self.by_device: dict[int, Any] = {}
        """Ray's reference of each device's copies, ``{TEB: arrays}``, as of the last commit."""
        self._owner: dict[int, int] = {}
        """Device of each TEB that has a copy."""

    def restore(self, states: Mapping[int, MovedBlock]) -> None:
        """Begin with a checkpoint's."""
        self._at_rest = dict(states)

    def commit(self, states: Mapping[int, Any], blocks: Mapping[int, list[int]], version: int, num_bytes: int) -> None:
        """Take these copies for the last ones, when all devices have made theirs.

        Parameters
        ----------
        states : Ray's reference of each device's copies
        blocks : TEBs of each device
        version : optimizer step that they are after
        num_bytes : of all copies
        """
        self.by_device = dict(sorted(states.items()))
        self._owner = {index: device for device in self.by_device for index in blocks[device]}
        self._at_rest.clear()
        self.version = version
        self.taken += 1
        self.bytes += num_bytes
        threading.Thread(target=self._fetch, args=(list(states.values()),), daemon=True, name="snapshot").start()

    def _fetch(self, states: list[Any]) -> None:
        start = time.perf_counter()
        # Holding it here makes it outlive the machine that it comes from.
        ray.wait(states, num_returns=len(states), timeout=self._timeout_s, fetch_local=True)
        self.fetch_s += time.perf_counter() - start

    def sources(self, blocks: Iterable[int]) -> tuple[list[tuple[int, int]], list[Any]]:
        """Return the sources of TEBs, as :meth:`DeviceActor.put_back` takes them.

        Returns
        -------
        Each TEB with the number of its copies, -1 for one that is new; and the copies.
        """
        places: list[tuple[int, int]] = []
        copies: list[Any] = []
        numbers: dict[int, int] = {}
        for index in blocks:
            if (device := self._owner.get(index)) is not None:
                if device not in numbers:
                    numbers[device] = len(copies)
                    copies.append(self.by_device[device])
                places.append((index, numbers[device]))
            elif index in self._at_rest:
                places.append((index, len(copies)))
                copies.append({index: self._at_rest[index].as_arrays()})
            else:
                places.append((index, -1))
        return places, copies
