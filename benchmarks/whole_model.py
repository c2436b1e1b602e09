"""The whole model on one thread, alone and twice at a time: what ``pipeline_efficiency.py`` holds pipelines to."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch
from torch_peer import START_TIMEOUT_S, STEP_TIMEOUT_S, Case, trivial_loss

from client_pipeline.families.families import build_parts
from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.runtime.stage.memory import keep_freed_memory


class WholeModel:
    """The same micro-batches through the whole model, in this process and on one thread."""

    def __init__(self, case: Case) -> None:
        self._parts = build_parts(case.spec, seed=0)
        self._pieces = case.input_ids().split(micro_batch_sizes(case.batch_size, case.num_micro_batches))

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        for ids in self._pieces:
            x_BTD = self._parts.embedding({"input_ids": ids})
            for block in self._parts.blocks:
                x_BTD = block(x_BTD, None)
            trivial_loss(x_BTD).backward()
        seconds = time.perf_counter() - start
        for _, parameter in self._parts.named_parameters():
            parameter.grad = None
        return seconds


class TwoWholes:
    """The whole model here and, at the same time, in another process."""

    def __init__(self, case: Case, whole: WholeModel) -> None:
        context = multiprocessing.get_context("spawn")
        self._whole = whole
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_step_when_asked, args=(case, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def step(self) -> float:
        """Seconds of one step, the mean of both."""
        self._pipe.send("step")
        own_s = self._whole.step()
        return statistics.fmean([own_s, self._answer()])

    def close(self) -> None:
        """End the other process."""
        self._pipe.send("end")
        self._process.join(STEP_TIMEOUT_S)

    def _answer(self) -> float:
        if not self._pipe.poll(START_TIMEOUT_S):
            raise RuntimeError(f"the other process did not answer within {START_TIMEOUT_S:g} s")
        return float(self._pipe.recv())


def _step_when_asked(case: Case, pipe: Connection) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    whole = WholeModel(case)
    pipe.send(whole.step())
    while pipe.recv() == "step":
        pipe.send(whole.step())
