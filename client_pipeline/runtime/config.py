"""Configuration of the devices of a cluster: table ``[runtime]``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from client_pipeline.least_values import check_least

PRECISIONS = ("float32", "bfloat16")
"""bfloat16 has the exponents of float32, so that losses need no scaling."""
RECOMPUTES = ("auto", "always", "never")
ACCELERATORS = ("cpu", "auto", "cuda", "mps")
SNAPSHOTS = ("step", "round")
MEMORY_LIMITS = ("none", "scenario")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Table ``[runtime]``: the actors of a cluster. Equal on all clusters."""

    devices_per_actor: int = 0
    """Most simulated devices in one actor; 1: each has its own; 0: they share as many actors as there are cores, unless
    faults, paced devices or ``memory-limit`` need one for each. On real machines each device has its own."""
    clusters_per_actor: int = 0
    """Most control units in one actor, likewise."""
    fused_micro_batches: int = 1
    """Neighbouring micro-batches that devices which share actors compute as one; the plan and the virtual clock count
    them apart. 1: none."""
    threads: int = 1
    """Torch threads of each device's actor."""
    server_threads: int = 1
    """Torch threads of the server's process while the decoder trains. An evaluation takes all cores: nobody trains
    meanwhile."""
    actor_idle: float = 600.0
    """An actor without work ends itself after this time [s]."""
    recompute: str = "auto"
    """Compute activations again in the backward pass, which takes less memory and more time: ``always``, ``never``; or
    ``auto``, where the model learns by adapters."""
    precision: str = "float32"
    """Precision of the matrix products in forward and backward passes: ``float32``, or ``bfloat16`` (mixed precision).
    Parameters, optimizer states and what travels stay float32."""
    accelerator: str = "cpu"
    """Hardware that devices and the server's decoder compute on: ``cpu``; ``cuda`` or ``mps``, which each of
    their machines must have then; ``auto``: the first of ``cuda`` and ``mps`` that a machine has and that has memory
    for a part, else its processor. Control unit and evaluation stay on the processor."""
    timeout: float = 120.0
    """A step without progress for this time has failed, whatever the reason [s]; no wait for a device is longer."""
    snapshots: str = "step"
    """After what the control unit keeps a copy of all TEBs and their optimizer states: ``step``, or ``round``: a device
    that is lost then costs its cluster the round."""
    memory_limit: str = "none"
    """``scenario``: each device has an actor of its own, whose process cannot have more private memory than the
    scenario's ``memory-gb`` beside what it had before it held anything; needs ``costs = "model"``. ``none``: any."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        for key, value, known in (
            ("recompute", self.recompute, RECOMPUTES),
            ("precision", self.precision, PRECISIONS),
            ("accelerator", self.accelerator, ACCELERATORS),
            ("snapshots", self.snapshots, SNAPSHOTS),
            ("memory-limit", self.memory_limit, MEMORY_LIMITS),
        ):
            if value not in known:
                raise ValueError(f"runtime.{key}: expected one of {', '.join(known)}, found {value!r}")
        if self.memory_limit != "none" and self.accelerator != "cpu":
            raise ValueError(
                f"runtime.memory-limit: {self.memory_limit} limits a process, and an accelerator's memory is none of "
                f'it: expected runtime.accelerator = "cpu", found {self.accelerator!r}; set it, or leave '
                "runtime.memory-limit out"
            )
        check_least("runtime.", self, devices_per_actor=0, clusters_per_actor=0, fused_micro_batches=1)
        check_least("runtime.", self, threads=1, server_threads=1)
        for key, seconds in (("actor-idle", self.actor_idle), ("timeout", self.timeout)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"runtime.{key}: expected a number of seconds above 0, found {seconds}")
