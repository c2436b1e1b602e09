"""The decoder of a CU that trains the whole model itself, behind the same protocol as the stream."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.link.base import Cut, Gradient, LinkError, NotFiniteLink
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer


@dataclass(frozen=True)
class _Item:
    step: StepId
    micro_batch: int
    hidden_BTD: Tensor
    mask_BT: Tensor
    targets: dict[str, Tensor]


class LocalDecoder:
    """A :class:`~client_pipeline.link.base.DecoderLink` without a network.

    Parameters
    ----------
    trainer : the CU's own decoder; its optimizer state lives on between rounds
    local_steps : steps per round: the global step is (round - 1) * local_steps + step
    timeout_s : longest wait for the next micro-batch's activations [s]

    The decoder computes in :meth:`receive`, so that :meth:`send` never keeps the pipeline waiting.
    """

    def __init__(self, trainer: HeadTrainer, local_steps: int, timeout_s: float) -> None:
        self.trainer = trainer
        self.local_steps = local_steps
        self.timeout_s = timeout_s
        self.is_remote = False
        self.cuts: tuple[Cut, ...] = ()
        self.bytes_up = self.bytes_down = self.payload_up = self.payload_down = 0
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._step: StepId | None = None
        self._num_micro_batches = 0
        self._total_weight = 0.0
        self._tied: dict[str, Tensor] = {}
        self._num_done = 0
        # close() is called from another thread while receive() computes; that result must not be kept.
        self._compute = threading.Lock()

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """Start a step; what an unclosed one collected is forgotten."""
        if total_weight <= 0:
            raise LinkError(f"the batch of {step} carries no target: expected a total weight above 0")
        self.drop_step()
        self._queue = queue.SimpleQueue()
        self._step, self._num_done = step, 0
        self._num_micro_batches, self._total_weight = num_micro_batches, total_weight

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """Note the tied matrices that the step computes with; they are not copied."""
        self._tied = dict(tied)

    def receive_tied(self) -> dict[str, Tensor]:
        """Return the gradient of the tied matrices."""
        if self._step is None or self._num_done != self._num_micro_batches:
            raise LinkError(f"receive_tied after {self._num_done} of {self._num_micro_batches} micro-batches")
        return self.trainer.tied_gradient(self._step.cluster)

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Queue one micro-batch for :meth:`receive`."""
        if self._step is None:
            raise LinkError("send before begin_step")
        self._queue.put(_Item(self._step, micro_batch, hidden_BTD, mask_BT, dict(targets)))

    def receive(self) -> Gradient:
        """Compute the gradient of the next micro-batch, waiting for its activations."""
        try:
            item = self._queue.get(timeout=self.timeout_s)
        except queue.Empty:
            raise LinkError(
                f"local decoder: no activations of micro-batch {self._num_done} came within {self.timeout_s:g} s"
            ) from None
        with self._compute:
            if item is None or item.step is not self._step:
                raise LinkError("local decoder: closed while a gradient was awaited")
            tensor, loss_sum = self.trainer.gradient(
                item.step, item.micro_batch, item.hidden_BTD, item.mask_BT, item.targets, self._total_weight, self._tied
            )
            if not (math.isfinite(loss_sum) and bool(torch.isfinite(torch.stack(tensor.aminmax())).all())):
                raise NotFiniteLink(
                    f"local decoder: loss or gradient of micro-batch {item.micro_batch} holds NaN or Inf: training "
                    "diverged; lower optimizer.lr or set optimizer.clip-norm"
                )
            self._num_done += 1
            last = self._num_done == self._num_micro_batches
            norm_sq = self.trainer.gradient_norm_sq(item.step.cluster) if last else None
        return Gradient(micro_batch=item.micro_batch, tensor=tensor, loss_sum=loss_sum, norm_sq=norm_sq)

    def end_step(self, scale: float) -> None:
        """Apply the step at once: there is no other cluster to wait for."""
        if self._step is None or self._num_done != self._num_micro_batches:
            raise LinkError(f"end_step after {self._num_done} of {self._num_micro_batches} micro-batches")
        step, self._step = self._step, None
        share = Contribution(cluster=step.cluster, weight=self._total_weight, scale=scale)
        self.trainer.apply([share], (step.round - 1) * self.local_steps + step.step)

    def tell(self, news: str) -> None:
        """Do nothing: there is no other end."""

    def drop_step(self) -> None:
        """Forget an unclosed step."""
        with self._compute:
            if self._step is not None:
                self.trainer.discard(self._step.cluster)
                self._step = None
            # Waits are on the queue of this step.
            self._queue.put(None)

    def close(self) -> None:
        """End the round; an unclosed step does not count."""
        self.drop_step()

    abort = close

    def cut(self, for_s: float = 0.0) -> None:
        """Do nothing: there is no network."""
