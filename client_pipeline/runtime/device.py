"""The Ray actor that stands for one device: a :class:`Stage`, its place in the cluster's group, and its own end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.memory import (
    forget_peak,
    give_freed_memory_back,
    keep_freed_memory,
    peak_bytes,
    resident_bytes,
)
from client_pipeline.runtime.optimizer import OptimizerConfig
from client_pipeline.runtime.stage import DoneAction, MovedBlock, Stage, StepOrder, run_actions
from client_pipeline.runtime.transport import GlooTransport, GroupAddress


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a device says of one local step."""

    actions: list[DoneAction]
    norm_sq: float
    """Squared norm of the gradients of its TEBs."""

    @property
    def busy_s(self) -> float:
        """Seconds spent computing, waits left out; of a paced device, as its profile says."""
        return sum(action.end - action.start for action in self.actions)


class Watch:
    """Ends an actor's process when nobody has called for ``idle_s`` seconds: it outlives the message that made it.

    Elsewhere, as in a test or a notebook, the process is not ours to end.
    """

    def __init__(self, idle_s: float) -> None:
        self._last = time.monotonic()
        self._idle_s = idle_s
        self._busy = 0
        if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            threading.Thread(target=self._run, daemon=True, name="idle-watch").start()

    def __enter__(self) -> Watch:
        self._busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._busy -= 1
        self._last = time.monotonic()

    def _run(self) -> None:
        while True:
            time.sleep(min(self._idle_s / 4, 5.0))
            if not self._busy and time.monotonic() - self._last > self._idle_s:
                os._exit(0)


class Device:
    """Methods that the control unit calls on one device; each answers before the next begins."""

    def __init__(self, spec: ModelSpec, optimizer: OptimizerConfig, runtime: RuntimeConfig) -> None:
        torch.set_num_threads(runtime.threads)
        keep_freed_memory()
        self._idle_bytes = resident_bytes()
        self.stage = Stage(spec, optimizer, recompute=runtime.recompute, precision=runtime.precision)
        self.transport: GlooTransport | None = None
        self.watch = Watch(runtime.actor_idle)

    def status(self) -> dict[str, Any]:
        """Process id, and which TEBs are here."""
        with self.watch:
            return {"pid": os.getpid(), "blocks": list(self.stage.blocks)}

    def place(self, blocks: list[int], *moved: MovedBlock | None) -> list[int]:
        """Build TEBs here; ``moved`` brings what each had elsewhere.

        Returns
        -------
        Bytes that were brought, for each TEB.
        """
        with self.watch:
            for index, brought in zip(blocks, moved, strict=True):
                self.stage.place(index, brought)
            return [sum(t.nbytes for part in brought or () for t in part.values()) for brought in moved]

    def take(self, index: int) -> MovedBlock:
        """Give a TEB away."""
        with self.watch:
            return self.stage.take(index)

    def load(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take the round's weights of the TEBs here."""
        with self.watch:
            give_freed_memory_back()
            forget_peak()
            self.stage.load(weights)

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Give the trained weights of the TEBs here."""
        with self.watch:
            return self.stage.weights()

    def states(self) -> dict[int, MovedBlock]:
        """Give copies of weights and optimizer state of the TEBs here."""
        with self.watch:
            return self.stage.states()

    def memory(self) -> dict[str, int]:
        """Memory of this process before it had anything to do, and its peak since the round's weights came [byte]."""
        with self.watch:
            return {"idle_bytes": self._idle_bytes, "peak_bytes": peak_bytes()}

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Give the gradients that wait to be applied."""
        with self.watch:
            return self.stage.gradients()

    def connect(self, address: GroupAddress, rank: int) -> None:
        """Join a generation of the cluster's group."""
        with self.watch:
            self.disconnect()
            self.transport = GlooTransport(address, rank)

    def disconnect(self) -> None:
        """Leave the group."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def run(self, order: StepOrder, apply_step: int | None) -> StepReport:
        """Run the action list of one local step, and take optimizer step ``apply_step`` if it is given."""
        with self.watch:
            if self.transport is None:
                raise RuntimeError("the device is in no group; connect it first")
            try:
                done = run_actions(self.stage, self.transport, order)
            except BaseException:
                # Neighbours must not wait for the group's timeout.
                self.stage.discard()
                self.disconnect()
                raise
            norm_sq = self.stage.gradient_norm_sq() if apply_step is None else 0.0
            if apply_step is not None:
                self.stage.apply(apply_step, 1.0)
            return StepReport(actions=done, norm_sq=norm_sq)

    def apply(self, step: int, scale: float) -> None:
        """Take optimizer step ``step`` with the gradients times ``scale``."""
        with self.watch:
            self.stage.apply(step, scale)

    def discard(self) -> None:
        """Forget a step that did not complete."""
        with self.watch:
            self.stage.discard()
