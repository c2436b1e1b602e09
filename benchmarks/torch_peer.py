"""``torch.distributed.pipelining`` over gloo, one process a stage: the peer of ``pipeline_efficiency.py``."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn

from client_pipeline.families.families import build_parts
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.stage.memory import keep_freed_memory

STEP_TIMEOUT_S = 60.0
"""A step that does not end within this time has failed."""
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Common work of all contenders: the same model, batch and micro-batches."""

    spec: ModelSpec
    segments: tuple[int, ...]
    """TEBs of each stage."""
    batch_size: int
    length: int
    num_micro_batches: int
    schedule: str = "gpipe"
    """Name in :data:`client_pipeline.timetable.schedules.SCHEDULES`; torch has them, too."""

    def input_ids(self) -> Tensor:
        """Tokens [B, T] without padding."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, self.spec.config["vocab_size"], (self.batch_size, self.length), generator=generator)


class StageModule(nn.Module):
    """Consecutive TEBs; the first stage embeds too."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        parts = build_parts(case.spec, seed=0)
        first = sum(case.segments[:rank])
        self.embedding = parts.embedding if rank == 0 else None
        self.blocks = parts.blocks[first : first + case.segments[rank]]

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] on the first stage, activations [B, T, D] on the others."""
        if self.embedding is not None:
            x = self.embedding({"input_ids": x})
        for block in self.blocks:
            x = block(x, None)
        return x


def trivial_loss(hidden_BTD: Tensor, target: Tensor | None = None) -> Tensor:
    """Half the squared sum: its gradient is the activations themselves."""
    del target
    return 0.5 * hidden_BTD.square().sum()


def _serve(rank: int, size: int, meeting_point: str, pipe: Connection) -> None:
    """One stage's process; a failure is its last answer."""
    try:
        _run_stage(rank, size, meeting_point, pipe)
    except RuntimeError as error:
        pipe.send(" ".join(str(error).split()))


def _run_stage(rank: int, size: int, meeting_point: str, pipe: Connection) -> None:
    """Take a case, then run a step each time it is asked for, and answer its seconds."""
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleavedZeroBubble,
    )

    torch.set_num_threads(1)
    # As in every process of ours; without it each step pays for its pages anew.
    keep_freed_memory()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=STEP_TIMEOUT_S),
    )
    pipe.send("ready")
    case: Case = pipe.recv()
    module = StageModule(case, rank).train()
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    # Torch's zero-bubble schedules are of several stages a rank; this one is ZB-H1 with one.
    kind, stages = {
        "gpipe": (ScheduleGPipe, stage),
        "1f1b": (Schedule1F1B, stage),
        "zb-h1": (ScheduleInterleavedZeroBubble, [stage]),
    }[case.schedule]
    schedule = kind(stages, case.num_micro_batches, loss_fn=trivial_loss, scale_grads=False)
    ids = case.input_ids()
    while pipe.recv() == "step":
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, return_outputs=False)
        pipe.send(time.perf_counter() - start)
        module.zero_grad(set_to_none=True)


class TorchPipeline:
    """The stages' processes for one case."""

    def __init__(self, case: Case) -> None:
        size = len(case.segments)
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting_point = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, meeting_point, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(START_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.send(case)

    def step(self) -> float:
        """Seconds of one step, measured inside the processes: the slowest one's.

        Raises
        ------
        RuntimeError
            If a stage ended or did not answer.
        """
        for pipe in self._pipes:
            pipe.send("step")
        answers = self._answers(STEP_TIMEOUT_S)
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(failed[0])
        return max(answers)

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                    raise RuntimeError(f"stage {rank} did not answer within {timeout_s:g} s")
                answers.append(pipe.recv())
            except (EOFError, OSError) as error:
                raise RuntimeError(f"stage {rank} ended") from error
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._folder.cleanup()
