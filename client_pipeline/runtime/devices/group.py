"""The control unit's place in its cluster's group: joined with a plan's devices, left after a fault."""

from __future__ import annotations

import concurrent.futures
import os
import uuid

import ray

from client_pipeline.runtime.devices.device_pool import DevicePool
from client_pipeline.runtime.transport.faults import PARTED, DeviceFault
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.shared_process import join_group, open_meeting
from client_pipeline.runtime.transport.transport import GroupAddress, Transport

JOIN_S = 30.0
"""Longest wait of members for each other to join; all have answered a moment before [s]."""


class Group:
    """Rank 0 of the ring. A group belongs to one ring of devices: another one, or a fault, makes another group.

    Parameters
    ----------
    pool : the devices
    host : address of this machine that the devices reach
    codec : how activations and gradients travel
    """

    def __init__(self, pool: DevicePool, host: str, codec: str) -> None:
        self.host = host
        self._pool = pool
        self._codec = codec
        self._ring: tuple[int, ...] = ()
        self.generation = 0
        """Generation of the last group."""
        self.transport: Transport | None = None
        """The control unit's end of the group; None between two groups."""
        self._meeting = open_meeting(host, pool.runtime.timeout)
        self._name = uuid.uuid4().hex

    def join(self, ring: tuple[int, ...], timeout_s: float) -> None:
        """Join with the devices of a plan, in pipeline order; the same ring stays as it is.

        Raises
        ------
        DeviceFault
            If a device is gone, or the members do not find each other.
        """
        if ring == self._ring and self.transport is not None:
            return
        self.leave()
        self.generation += 1
        address = GroupAddress(
            host=self.host,
            port=self._meeting.port,
            generation=self.generation,
            size=len(ring) + 1,
            timeout_s=timeout_s,
            join_s=min(JOIN_S, timeout_s),
            codec=self._codec,
            name=self._name,
            processes=self._processes(ring),
            secure=NodeTls.from_environment() is not None,
        )
        references = {device: self._pool[device].connect.remote(address, rank + 1) for rank, device in enumerate(ring)}
        # In a thread of its own: a device that dies now holds up the wait for it until the end of join_s.
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="join")
        membership = thread.submit(join_group, address, 0)
        try:
            self._pool.answers(references, "joining the cluster's group")
            self.transport = membership.result(timeout=address.join_s)
        except (RuntimeError, TimeoutError) as error:
            membership.add_done_callback(_close)
            if isinstance(error, RuntimeError) and not isinstance(error, DeviceFault):
                text = f"{self._pool.name}: joining the cluster's group: {error}"
                raise DeviceFault(text, PARTED) from error
            raise
        finally:
            thread.shutdown(wait=False)
        self._ring = ring

    def _processes(self, ring: tuple[int, ...]) -> tuple[int, ...]:
        """Number of the process of each rank; empty if no two share one."""
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        processes = [(os.getpid(), node), *(self._pool.pids[device] for device in ring)]
        distinct = list(dict.fromkeys(processes))
        return () if len(distinct) == len(processes) else tuple(distinct.index(process) for process in processes)

    def leave(self) -> None:
        """Leave the group; the next plan builds another."""
        self._ring = ()
        if self.transport is not None:
            self.transport.close()
            self.transport = None


def _close(joined: concurrent.futures.Future[Transport]) -> None:
    """Leave a group that was joined too late."""
    if joined.exception() is None:
        joined.result().close()
