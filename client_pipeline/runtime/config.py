"""How the devices of a cluster compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

PRECISIONS = ("float32", "bfloat16")
"""bfloat16 has the exponents of float32, so that losses need no scaling."""
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
    """Torch threads of the server's process: the decoder's training and the evaluation."""
    actor_idle: float = 600.0
    """An actor without work ends itself after this time [s]."""
    recompute: bool = False
    """Compute activations again in the backward pass: less memory, more time."""
    precision: str = "float32"
    """Precision of the matrix products in forward and backward passes: ``float32``, or ``bfloat16`` (mixed precision).
    Parameters, optimizer states and what travels stay float32."""
    accelerator: str = "cpu"
    """What devices and the server's decoder compute on, where they are: ``cpu``; ``cuda`` or ``mps``, which each of
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
        if self.precision not in PRECISIONS:
            raise ValueError(f"runtime.precision: expected one of {', '.join(PRECISIONS)}, found {self.precision!r}")
        if self.accelerator not in ACCELERATORS:
            raise ValueError(
                f"runtime.accelerator: expected one of {', '.join(ACCELERATORS)}, found {self.accelerator!r}"
            )
        if self.snapshots not in SNAPSHOTS:
            raise ValueError(f"runtime.snapshots: expected one of {', '.join(SNAPSHOTS)}, found {self.snapshots!r}")
        if self.memory_limit not in MEMORY_LIMITS:
            raise ValueError(
                f"runtime.memory-limit: expected one of {', '.join(MEMORY_LIMITS)}, found {self.memory_limit!r}"
            )
        if self.memory_limit != "none" and self.accelerator != "cpu":
            raise ValueError(
                f"runtime.memory-limit: {self.memory_limit} limits a process, and an accelerator's memory is none of "
                f'it: expected runtime.accelerator = "cpu", found {self.accelerator!r}; set it, or leave '
                "runtime.memory-limit out"
            )
        for name in ("devices_per_actor", "clusters_per_actor"):
            if getattr(self, name) < 0:
                raise ValueError(f"runtime.{name.replace('_', '-')}: expected at least 0, found {getattr(self, name)}")
        for name in ("fused_micro_batches", "threads", "server_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name.replace('_', '-')}: expected at least 1, found {getattr(self, name)}")
        for name in ("actor_idle", "timeout"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(
                    f"runtime.{name.replace('_', '-')}: expected a number of seconds above 0, "
                    f"found {getattr(self, name)}"
                )
