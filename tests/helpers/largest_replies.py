"""Replies of the largest allowed size to a server, one after the other: run in a process of its own."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from flwr.app import ConfigRecord
from flwr.supercore.task_identity import TaskIdentity

from helpers.large_exchange import FarGrid, grids, orders_of
from strategies.grid import reply_pieces
from strategies.grid.recording import RoundFailed
from strategies.grid.update_spool import SMALL_BYTES
from strategies.records import to_arrays

MODEL_BYTES = 6_000_000


class HostileGrid(FarGrid):
    """Every node answers with as many bytes of arrays as are allowed, each array a small one, and of text."""

    def __init__(self, num_nodes):
        super().__init__(num_nodes, {})
        most, size = 2 * MODEL_BYTES, SMALL_BYTES - 1000
        kept = np.frombuffer(os.urandom(size), np.uint8)
        self.arrays = to_arrays({f"w{n}": np.roll(kept, n) for n in range(most // SMALL_BYTES)})
        self.more = ConfigRecord({"text": os.urandom(reply_pieces._HEADS_BYTES // 2 - 200_000).hex()})

    def answer(self, order):
        reply = super().answer(order)
        reply.content["more"] = self.more
        return reply


def peak_growth(num_nodes, folder):
    """Most memory that one round's replies take beside those that lie at the SuperLink [byte], and who failed."""
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1
    start = to_arrays({"w": np.zeros(MODEL_BYTES // 4, np.float32)})
    grid = HostileGrid(num_nodes)
    grid.push_messages(orders_of(grid, start, 0))
    grid.pieces.clear()
    recording = grids(grid, folder)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    with pytest.raises(RoundFailed) as failed:
        recording.send_and_receive(orders_of(grid, start, 1))
    status = Path("/proc/self/status").read_text()
    (peak_kb,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    return peak_kb * 1024 - before, str(failed.value)
