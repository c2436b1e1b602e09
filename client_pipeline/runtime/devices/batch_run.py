"""One batch through all devices of a cluster, as the control unit sees it.

The control unit is rank 0 of a ring (F: activations, B: gradients)::

    batch -> embedding -F-> device -F-> device -F-> control unit -> decoder
             embedding <-B- device <-B- device <-B- control unit <- decoder

Three threads follow the three arrows that touch the control unit; the devices follow their action lists.

Where micro-batches are cut into token slices, embedding and decoder have them whole: the control unit cuts what goes to
the devices and joins what comes from them.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from client_pipeline.link.base import DecoderLink, LinkError
from client_pipeline.partition.dropout_seed import EMBEDDING_UNIT
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.parts import Batch, targets
from client_pipeline.partition.token_slices import joined_slices, slice_lengths
from client_pipeline.runtime.devices.device_pool import WATCH_INTERVAL_S, DevicePool
from client_pipeline.runtime.devices.frozen_devices import GRACE_S, fault_of_step
from client_pipeline.runtime.stage.accelerator import autocast
from client_pipeline.runtime.stage.decoder_update import check_tied
from client_pipeline.runtime.stage.stage import StepOrder
from client_pipeline.runtime.transport.deadline import ProgressDeadline
from client_pipeline.runtime.transport.faults import PipelineError
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD, Transport

Progress = Callable[[str, int], None]
"""Callback for each arrival at the control unit: ``F`` (activations that the devices have made), ``G`` (the decoder's
gradient) or ``B`` (a micro-batch that is through), and the number of the micro-batch in its batch."""


class ExchangeTimes(NamedTuple):
    """Times at which a micro-batch passed the control unit on its way to the decoder and back, by its own clock."""

    asked: float
    """Begin of the wait for its activations [s]."""
    arrived: float
    """Arrival of its activations from the last device [s]."""
    answered: float
    """Arrival of the decoder's gradient, which goes on to the last device [s]."""


@dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """The decoder's answer to a batch."""

    loss_sum: float
    norm_sq: float | None
    """Squared norm of the decoder's gradient, after a step's last batch."""
    tied: dict[str, Tensor]
    """Gradient of the tied matrices, after a step's last batch."""
    exchange: list[ExchangeTimes]
    """Times of each micro-batch."""


_PASS_S = 120.0
"""Longest rest of an embedding's backward pass of a batch that was given up [s]."""


class BatchRun:
    """The three threads of one batch; they start at once.

    Parameters
    ----------
    order : order that the devices have received
    batch : its tensors
    embedding : the control unit's part
    transport : the control unit's place in the group
    link : the decoder, with the step begun
    tied_parameters : the embedding's tied matrices, after a step's last batch
    precision : of the embedding's matrix products
    progress : called at each arrival
    threads : three free threads; after :meth:`abandon` they may stay busy for long
    """

    def __init__(
        self,
        *,
        order: StepOrder,
        batch: Batch,
        embedding: nn.Module,
        transport: Transport,
        link: DecoderLink,
        tied_parameters: Mapping[str, nn.Parameter],
        precision: str,
        progress: Progress,
        threads: concurrent.futures.ThreadPoolExecutor,
    ) -> None:
        self._order, self._link, self._transport = order, link, transport
        self._embedding, self._tied_parameters = embedding, tied_parameters
        self._precision, self._progress = precision, progress
        self._pieces = split_batch(batch, len(order.sizes))
        self._lengths = slice_lengths(order.mask_BT.shape[1], order.num_slices)
        self._embedded: list[Tensor] = []
        self._passed: list[tuple[float, float]] = []
        self._answered: list[float] = []
        self._adding = threading.Lock()
        """Held while a thread adds to the embedding's gradients."""
        self._is_abandoned = False
        self._futures: list[Any] = [threads.submit(task) for task in (self._forward, self._answer, self._backward)]

    def watch(self, devices: DevicePool, reports: Mapping[int, Any], deadline: ProgressDeadline) -> BatchAnswer:
        """Wait for the three threads, and look for a device that is gone in the meantime.

        Raises
        ------
        PipelineError
            If a device died, froze or failed.
        LinkError
            If the decoder refused or was too late.
        """
        pending = set(self._futures)
        while pending:
            done, pending = concurrent.futures.wait(
                pending, timeout=WATCH_INTERVAL_S, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            failed = next((f.exception() for f in done if f.exception()), None)
            if isinstance(failed, LinkError):
                raise failed
            if failed is not None or pending:
                if (fault := fault_of_step(devices.name, reports, failed, devices.silent)) is not None:
                    raise fault from failed
            if failed is not None:
                raise PipelineError(f"{devices.name}: {failed}") from failed
            if pending:
                devices.look_after(reports, deadline, "a step was running")
        answer: BatchAnswer = self._futures[1].result()
        return answer

    def abandon(self) -> None:
        """Release the threads of a batch that will not complete."""
        self._is_abandoned = True
        self._link.drop_step()
        concurrent.futures.wait(self._futures, timeout=GRACE_S)
        for future in self._futures:
            future.cancel()
        # The embedding's gradients are the caller's again: no thread may add to them from here on.
        if not self._adding.acquire(timeout=_PASS_S):
            raise PipelineError(f"the embedding's backward pass has not ended in {_PASS_S:g} s")
        self._adding.release()

    # Receives are posted before anything moves, for the reason that run_actions gives.

    def _forward(self) -> None:
        transport, order, last = self._transport, self._order, self._transport.size - 1
        outputs = [transport.receive(shape, last, FORWARD, n) for n, shape in enumerate(order.shapes(last=True))]
        for i, piece in enumerate(self._pieces):
            with order.step.dropout(EMBEDDING_UNIT, i), autocast(self._precision, order.mask_BT.device):
                self._embedded.append(self._embedding(piece).float())
            for n, part in zip(order.numbers(i), self._embedded[i].split(self._lengths, dim=1), strict=True):
                transport.send(part, 1, FORWARD, n)
        for i, piece in enumerate(self._pieces):
            asked = time.time()
            output = joined_slices([outputs[n].wait() for n in order.numbers(i)])
            self._passed.append((asked, time.time()))
            self._progress("F", i)
            self._link.send(order.step.first + i, output, piece["attention_mask"], targets(piece))

    def _answer(self) -> BatchAnswer:
        loss_sum, norm_sq = 0.0, None
        order, length = self._order, self._order.mask_BT.shape[1]
        for i, size in enumerate(order.sizes):
            shape = (size, length, order.width)
            gradient = self._link.receive()
            if tuple(gradient.tensor.shape) != shape or gradient.tensor.dtype != torch.float32:
                raise LinkError(
                    f"the decoder's gradient of micro-batch {order.step.first + i} is {gradient.tensor.dtype} of "
                    f"shape {list(gradient.tensor.shape)}, expected float32 of {list(shape)}"
                )
            self._answered.append(time.time())
            loss_sum += gradient.loss_sum
            norm_sq = gradient.norm_sq
            self._progress("G", i)
            if order.forward_only:
                self._progress("B", i)
                continue
            slices = gradient.tensor.split(self._lengths, dim=1)
            for n, part in reversed(list(zip(order.numbers(i), slices, strict=True))):
                self._transport.send(part, self._transport.size - 1, BACKWARD, n)
        tied = self._link.receive_tied() if self._tied_parameters else {}
        try:
            check_tied({name: parameter.shape for name, parameter in self._tied_parameters.items()}, tied)
        except ValueError as error:
            raise LinkError(f"the decoder's gradient of the {error}") from None
        exchange = [
            ExchangeTimes(*passed, answered) for passed, answered in zip(self._passed, self._answered, strict=True)
        ]
        return BatchAnswer(loss_sum=loss_sum, norm_sq=norm_sq, tied=tied, exchange=exchange)

    def _backward(self) -> None:
        shapes, order = self._order.shapes(), self._order
        if order.forward_only:
            return
        received = [self._transport.receive(shape, 1, BACKWARD, n) for n, shape in enumerate(shapes)]
        for i in range(len(order.sizes)):
            gradient = joined_slices([received[n].wait() for n in order.numbers(i)])
            # Only now is the embedding's output sure to be there: its gradient cannot arrive before it left.
            with self._adding:
                if self._is_abandoned:
                    return
                if self._embedded[i].requires_grad:
                    torch.autograd.backward(self._embedded[i], gradient)
            self._progress("B", i)
