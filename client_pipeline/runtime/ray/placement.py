"""Places of a cluster's actors: all in one Ray, or each device on a Ray node of its own.

This module does not import Ray: a simulation is planned without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from client_pipeline.system.devices import device_resource

SHARED = "collapipe-shared"
"""Prefix of the names of shared actors."""
ACTOR_CPUS = 0
"""CPUs that Ray reserves for a device or control unit: a custom resource names its place instead."""
NODE_CPUS = 1
"""CPUs that a box offers to its cluster's Ray; no actor takes one."""
RESERVED = 0.001
"""Share of the resource that an actor takes: it names the place, and leaves room for others after a crash."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ray of a cluster, and places of its devices."""

    ray_address: str = ""
    """``host:port`` of the cluster's own Ray, whose nodes are the devices; empty: all actors run in the Ray that is
    here already."""
    host: str = "127.0.0.1"
    """Address of the control unit that its devices reach."""
    num_devices: int = 0
    """Devices that must have joined."""
    shared_actors: tuple[str, ...] = ()
    """Name of the shared actor that hosts each device; empty: each device has an actor of its own."""
    shared_actor: str = ""
    """Name of the shared actor that hosts the control unit; empty: it has one of its own."""
    device_memory: tuple[float, ...] = ()
    """Private memory that each device's own process may have beside what it has at its start [byte]; empty: any."""

    @property
    def spread(self) -> bool:
        """True if devices are nodes of their own."""
        return bool(self.ray_address)

    def shared_actor_of(self, device: int) -> str:
        """Name of the shared actor that hosts a device; empty: it has one of its own."""
        return self.shared_actors[device] if self.shared_actors else ""

    def memory_of(self, device: int) -> float:
        """Limit of a device's own process [byte]; 0: none."""
        return self.device_memory[device] if self.device_memory else 0.0

    def device_options(self, device: int) -> dict[str, Any]:
        """Ray options that put an actor on its device."""
        return {"resources": {device_resource(device): RESERVED}} if self.spread else {}
