"""The Ray actor that stands for one device: a :class:`Stage`, its place in the cluster's group, and its own end."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from client_pipeline.families.families import build_block
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.ray.ray_tensors import send_tensors_as_arrays
from client_pipeline.runtime.ray.unused_actors import LIVENESS, Watch
from client_pipeline.runtime.stage.accelerator import find_accelerator, training_bytes
from client_pipeline.runtime.stage.answering import AnswerStep
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.memory import (
    forget_peak,
    give_freed_memory_back,
    is_out_of_memory,
    keep_freed_memory,
    limit_private_memory,
    peak_bytes,
    private_bytes,
    resident_bytes,
    return_freed_memory,
    use_reserve,
)
from client_pipeline.runtime.stage.moved_block import BlockArrays, MovedBlock
from client_pipeline.runtime.stage.stage import DoneAction, Stage, StepOrder, run_actions
from client_pipeline.runtime.stage.tried_block import TriedBlock
from client_pipeline.runtime.transport.faults import NotFinite, OutOfMemory
from client_pipeline.runtime.transport.shared_process import join_group
from client_pipeline.runtime.transport.transport import GroupAddress, Transport
from client_pipeline.weights.base_weights import BaseWeights, keep_part

BlockCopies = dict[int, BlockArrays]
"""TEBs away from their device, by index."""

_TRIALS = 3
"""Passes through a TEB that a device without one times."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A device's report of one local step."""

    actions: list[DoneAction]
    norm_sq: float
    """Squared norm of the gradients of its TEBs."""
    work: float = 0.0
    """TEBs times positions that went through them: what ``busy_s`` is held against."""
    copied_bytes: int = 0
    """Bytes of the copies of its TEBs, if they were requested."""

    @property
    def busy_s(self) -> float:
        """Seconds spent computing, waits left out; of a paced device, as its profile says."""
        return sum(action.end - action.start for action in self.actions)


class DeviceActor:
    """Methods that the control unit calls on one device; each answers before the next begins."""

    def __init__(
        self, spec: ModelSpec, optimizer: OptimizerConfig, runtime: RuntimeConfig, memory_limit: float = 0.0
    ) -> None:
        torch.set_num_threads(runtime.threads)
        send_tensors_as_arrays()
        # Under a limit, freed memory must be available at once.
        _ = return_freed_memory() if memory_limit else keep_freed_memory()
        self._memory_limit, self._before_limit = 0.0, 0
        """Private memory beside what this process has before it holds a TEB [byte]; 0: any."""
        if memory_limit:
            # The libraries that a TEB needs are the process's, not the model's.
            with torch.device("meta"):
                build_block(spec, 0)
            self._before_limit = private_bytes()
            self._memory_limit = memory_limit if limit_private_memory(memory_limit) else 0.0
        needed_bytes = 0.0
        if runtime.accelerator == "auto":
            with torch.device("meta"):
                needed_bytes = training_bytes(build_block(spec, 0))
        self._idle_bytes = resident_bytes()
        self.stage = Stage(
            spec,
            optimizer,
            recompute=runtime.recompute == "always",
            precision=runtime.precision,
            accelerator=find_accelerator(runtime.accelerator, needed_bytes),
        )
        self.transport: Transport | None = None
        self._lineage = ""
        self._threads = runtime.threads
        self.watch = Watch(runtime.actor_idle)

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def alive(self) -> tuple[int, str]:
        """Answer at once, also while a step runs: process id and Ray node."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group=LIVENESS)  # type: ignore[untyped-decorator]
    def interrupt(self, generation: int) -> None:
        """Leave a group while a step runs: waits in it here, and for this device, fail.

        Parameters
        ----------
        generation : of the group; a later one is left alone, should this come late
        """
        if (transport := self.transport) is not None and transport.generation <= generation:
            transport.close()

    def status(self) -> dict[str, Any]:
        """Return process id, TEBs and accelerator."""
        with self.watch:
            accelerator = str(self.stage.accelerator)
            return {"pid": os.getpid(), "blocks": list(self.stage.blocks), "accelerator": accelerator}

    def place(self, blocks: list[int], version: int, *moved: MovedBlock | None) -> list[int]:
        """Build TEBs here; ``moved`` brings what each had elsewhere, after optimizer step ``version``.

        Returns
        -------
        Bytes that were brought, for each TEB.
        """
        with self.watch:
            with self._within_limit():
                for index, brought in zip(blocks, moved, strict=True):
                    self.stage.place(index, brought, version)
            return [0 if brought is None else brought.nbytes for brought in moved]

    def has_files(self, base: BaseWeights) -> bool:
        """Return true if this machine has the files of frozen weights, by name; a TEB compares their digests."""
        with self.watch:
            return base.files_are_there

    def keep_part(self, content: bytes) -> None:
        """Keep a TEB's frozen weights, cut out of files that this machine has not."""
        with self.watch:
            keep_part(content)

    def take(self, index: int) -> MovedBlock:
        """Give a TEB away."""
        with self.watch:
            return self.stage.take(index)

    def settle(self, lineage: str) -> dict[int, int]:
        """Forget a step that did not complete; what another control unit placed here is dropped.

        Returns
        -------
        TEBs that are here, each with the optimizer step that it is after.
        """
        with self.watch:
            self.disconnect()
            self.stage.discard()
            if self._memory_limit:
                use_reserve(False)
            if lineage != self._lineage:
                self.stage.blocks.clear()
                self._lineage = lineage
            return {index: block.version for index, block in self.stage.blocks.items()}

    def put_back(
        self,
        keep: list[int],
        blocks: list[tuple[int, int]],
        version: int,
        frozen: Mapping[int, Mapping[str, Tensor]],
        *copies: BlockCopies,
    ) -> list[int]:
        """Hold these TEBs and no others: those to keep as they are, the others as copies have them.

        Parameters
        ----------
        keep : TEBs that are here
        blocks : TEB and number of the copies that hold it; -1: it is new
        version : optimizer step that the copies are after
        frozen : what the adapters of ``blocks`` are added to, which copies leave out
        copies : of TEBs

        Returns
        -------
        Bytes that were brought, for each TEB of ``blocks``.
        """
        with self.watch:
            for index in set(self.stage.blocks) - set(keep):
                del self.stage.blocks[index]
            brought = []
            for index, place in blocks:
                block = MovedBlock() if place < 0 else MovedBlock.from_arrays(copies[place][index])
                brought.append(block._replace(frozen=frozen[index]))
                with self._within_limit():
                    self.stage.place(index, brought[-1], version)
            return [moved.nbytes for moved in brought]

    def load(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take the round's weights of the TEBs here."""
        with self.watch:
            forget_peak()
            self.stage.activations.forget_peak()
            self.stage.load(weights)

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Give the trained weights of the TEBs here."""
        with self.watch:
            return self.stage.weights()

    def memory(self) -> dict[str, int]:
        """Return the counted peak of this device; its process's memory before, and its peak [byte].

        Peaks are those since the round's weights came. A round ends with it: what the steps have left free goes back to
        the system, where the server may need it to score the round's model.
        """
        with self.watch:
            held_bytes, peak = self.stage.held_bytes(), peak_bytes()
            give_freed_memory_back()
            return {"held_bytes": held_bytes, "idle_bytes": self._idle_bytes, "peak_bytes": peak}

    @contextmanager
    def _within_limit(self) -> Iterator[None]:
        """Name this device's memory in the error if its limit is the cause."""
        try:
            yield
        except Exception as error:
            if not self._memory_limit or not is_out_of_memory(error):
                raise
            use_reserve(True)
            taken_mb = (private_bytes() - self._before_limit) / 1e6
            raise OutOfMemory(
                f"it needs more than its {self._memory_limit / 1e6:.0f} MB of memory (runtime.memory-limit): it holds "
                f"{self.stage.held_bytes() / 1e6:.0f} MB for {len(self.stage.blocks)} TEBs and takes {taken_mb:.0f} MB "
                "with what passes and threads need, and could not have more; give it fewer TEBs, smaller "
                "micro-batches or more memory"
            ) from error

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Give the gradients that wait to be applied."""
        with self.watch:
            return self.stage.gradients()

    def connect(self, address: GroupAddress, rank: int) -> None:
        """Join a generation of the cluster's group."""
        with self.watch:
            self.disconnect()
            self.transport = join_group(address, rank)

    def disconnect(self) -> None:
        """Leave the group."""
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    def close(self) -> None:
        """Leave the group, and let go of all TEBs."""
        self.disconnect()
        self.stage.blocks.clear()
        self.stage.discard()

    def run(self, order: StepOrder, apply_step: int | None, copies: bool = False) -> tuple[StepReport, BlockCopies]:
        """Run the action list of one local step.

        Parameters
        ----------
        order : the step
        apply_step : optimizer step to take when the gradients are there; None leaves them waiting
        copies : whether to copy the TEBs after the optimizer step

        Returns
        -------
        Report and copies; the latter stay where they are, while the report is read.
        """
        with self.watch:
            if self.transport is None:
                raise RuntimeError("the device is in no group; connect it first")
            # Of this thread: that of the liveness group is another.
            torch.set_num_threads(self._threads)
            try:
                with self._within_limit():
                    done_actions = run_actions(self.stage, self.transport, order)
            except BaseException:
                # Neighbours must not wait for the group's timeout.
                self.stage.discard()
                self.disconnect()
                raise
            norm_sq = self.stage.gradient_norm_sq()
            if not math.isfinite(norm_sq):
                blocks = self.stage.not_finite()
                self.stage.discard()
                raise NotFinite(
                    f"the gradients of TEBs {blocks} hold NaN or Inf: training diverged; lower optimizer.lr"
                )
            copied_bytes, block_copies = 0, BlockCopies()
            if apply_step is not None:
                copied_bytes, block_copies = self.apply(apply_step, 1.0, copies)
            work = float(len(self.stage.blocks) * order.mask_BT.numel())
            report = StepReport(actions=done_actions, norm_sq=norm_sq, work=work, copied_bytes=copied_bytes)
            return report, block_copies

    def try_block(self, mask_BT: Tensor) -> list[tuple[int, float]]:
        """Pass noise forward and backward through a TEB that is forgotten.

        Parameters
        ----------
        mask_BT : padding mask of a micro-batch, bool

        Returns
        -------
        Examples and seconds of each pass but the first, which allocates; none if there are TEBs to train here.
        """
        with self.watch, self._within_limit(), torch.random.fork_rng(devices=[]):
            torch.set_num_threads(self._threads)
            if self.stage.blocks:
                return []
            stage = self.stage
            block = TriedBlock(
                stage.spec, recompute=stage.recompute, precision=stage.precision, accelerator=stage.accelerator
            )
            return [(len(mask_BT), sum(block.times(mask_BT))) for _ in range(_TRIALS + 1)][1:]

    def apply(self, step: int, scale: float, copies: bool = False) -> tuple[int, BlockCopies]:
        """Take optimizer step ``step`` with the gradients times ``scale``.

        Returns
        -------
        If ``copies`` are asked for: their bytes, and weights and optimizer state of each TEB as arrays, which Ray
        copies once. Else none.
        """
        with self.watch, self._within_limit():
            self.stage.apply(step, scale)
            states = self.stage.states() if copies else {}
            size = sum(state.nbytes for state in states.values())
            return size, {index: state.as_arrays() for index, state in states.items()}

    def answer(self, step: AnswerStep, x_RTD: Tensor) -> Tensor:
        """Pass new tokens of requests through the TEBs here, in evaluation; their keys and values stay here."""
        with self.watch, self._within_limit():
            torch.set_num_threads(self._threads)
            return self.stage.answer(step, x_RTD)

    def forget(self, requests: Sequence[str] | None) -> None:
        """Forget the keys and values of requests; None: of all."""
        with self.watch:
            if requests is None:
                self.stage.kept.clear()
            else:
                self.stage.kept.drop(requests)

    def discard(self) -> None:
        """Forget a step that did not complete."""
        with self.watch:
            self.stage.discard()
