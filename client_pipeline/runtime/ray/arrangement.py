"""Sharing of actors among simulated devices and control units.

An actor of its own for each costs a process that imports torch: seconds, and hundreds of megabytes. Shared ones give
the same results, bit for bit. They are numbered, and neighbours in a cluster are in different ones, so that a pipeline
runs over as many processes as it has stages or there are shared actors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.ray.machine import usable_cores
from client_pipeline.runtime.ray.placement import SHARED, Placement


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Numbers of shared actors of a simulation; the same ones host devices and control units."""

    device_actors: int = 0
    """Actors that the devices share; 0: each has an actor of its own."""
    cluster_actors: int = 0
    """Actors that the control units share; 0: each has an actor of its own."""

    @property
    def actors(self) -> list[str]:
        """Names of all shared actors."""
        return [_name(i) for i in range(max(self.device_actors, self.cluster_actors))]

    def placement(self, cluster: int, num_devices: int) -> Placement:
        """Return the places of a cluster's devices and control unit."""
        placement = Placement()
        if self.device_actors:
            # The first device of the next cluster is elsewhere: small plans use the first devices alone.
            hosts = tuple(_name((cluster + k) % self.device_actors) for k in range(num_devices))
            placement = replace(placement, shared_actors=hosts)
        if self.cluster_actors:
            placement = replace(placement, shared_actor=_name(cluster % self.cluster_actors))
        return placement


def _name(number: int) -> str:
    return f"{SHARED}/{number}"


def arrange(
    runtime: RuntimeConfig, faults: FaultConfig, *, paced: bool, num_devices: Sequence[int], cores: int | None = None
) -> tuple[Arrangement, str]:
    """Decide which devices and control units share actors.

    Parameters
    ----------
    runtime, faults : the run's
    paced : whether devices take the time that the model says
    num_devices : K of each cluster
    cores : processors to use; None: all that this process may use

    Returns
    -------
    The arrangement, and a sentence for the log that says why it is so.

    Raises
    ------
    ValueError
        If actors are to be shared in which single devices or control units must be ended or stopped, or paced; or
        micro-batches fused where devices are alone, or faults strike at one of them.
    """
    cores, total, num_clusters = cores or usable_cores(), sum(num_devices), len(num_devices)
    kills_devices = max(faults.device, faults.freeze, faults.slow) > 0
    for key, value, kinds, alone in (
        ("devices-per-actor", runtime.devices_per_actor, "faults.device, faults.freeze and faults.slow", kills_devices),
        ("clusters-per-actor", runtime.clusters_per_actor, "faults.cluster", faults.cluster > 0),
    ):
        if value > 1 and alone:
            raise ValueError(
                f"runtime.{key} = {value}: {kinds} end or stop the process of one alone; set runtime.{key} to 1, or to "
                "0 for automatic"
            )
    if runtime.devices_per_actor > 1 and paced:
        raise ValueError(
            f'runtime.devices-per-actor = {runtime.devices_per_actor}: device-emulation = "paced" needs an actor for '
            "each device; set runtime.devices-per-actor to 1, or to 0 for automatic"
        )
    limited = runtime.memory_limit != "none"
    if runtime.devices_per_actor > 1 and limited:
        raise ValueError(
            f"runtime.devices-per-actor = {runtime.devices_per_actor}: runtime.memory-limit = {runtime.memory_limit} "
            "is the limit of a process, which is to be one device's; set runtime.devices-per-actor to 1, or to 0 for "
            "automatic"
        )
    if runtime.devices_per_actor:
        devices, why = _actors(total, runtime.devices_per_actor), "runtime.devices-per-actor"
    elif kills_devices or paced or limited:
        paced_or_limited = "devices are paced" if paced else "each has a limit of its memory"
        devices, why = 0, "faults end or stop single devices" if kills_devices else paced_or_limited
    else:
        devices, why = (0 if total <= cores else cores), f"{total} devices on {cores} cores"
    if runtime.fused_micro_batches > 1 and (faults.any or not devices):
        reason = "faults strike at a micro-batch" if faults.any else f"each device has an actor of its own ({why})"
        raise ValueError(
            f"runtime.fused-micro-batches = {runtime.fused_micro_batches}: {reason}; set "
            "runtime.fused-micro-batches to 1"
        )
    if runtime.clusters_per_actor:
        clusters = _actors(num_clusters, runtime.clusters_per_actor)
    else:
        # Next to devices that are alone a control unit is alone, too: nothing would be gained.
        clusters = 0 if faults.cluster > 0 or not devices else min(cores, num_clusters)
    of_devices = f"devices share {devices} actors" if devices else "each device has an actor of its own"
    of_clusters = f"control units share {clusters}" if clusters else "each control unit has its own"
    arrangement = Arrangement(device_actors=devices, cluster_actors=clusters)
    return arrangement, f"Actors: {of_devices}, {of_clusters} ({why})"


def _actors(members: int, per_actor: int) -> int:
    return 0 if per_actor == 1 else math.ceil(members / per_actor)
