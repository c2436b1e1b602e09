"""The decoder of a cluster whose labels stay: blocks on the server, closing norm, output layer and loss here."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from client_pipeline.link.base import DecoderLink, ForwardingLink, Gradient, LinkError, NotFiniteLink, States
from client_pipeline.link.privacy import NoiseSource, private_gradient
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import target_weight
from client_pipeline.runtime.stage.accelerator import HOST, autocast


class StatesLink(DecoderLink, Protocol):
    """A link to a decoder that returns states, as :class:`~client_pipeline.link.stream.DecoderStream`."""

    def send_forward(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, weight: float) -> None:
        """Send activations and mask of one micro-batch whose targets, of a weight, stay here."""
        ...

    def receive_next(self) -> States | Gradient:
        """Wait for the states of a micro-batch, or the gradient of the next one."""
        ...

    def send_states_gradient(self, micro_batch: int, gradient_BTD: Tensor) -> None:
        """Send the gradient of loss_sum / W_n with respect to the states of one micro-batch."""
        ...


class OwnLabels(ForwardingLink):
    """A :class:`~client_pipeline.link.base.DecoderLink` on which no label is sent.

    The server returns its blocks' states; the loss and its gradient are computed in :meth:`receive`. The gradients of
    what is trained of the tail are those of the tied matrices: the embedding's, for the pipeline.

    Parameters
    ----------
    stream : to the decoder, which returns states
    tail : closing norm and output layer, the embedding's own: ``tail(states_BTD, mask_BT, targets) -> loss_sum``
    precision : of its matrix products; see :data:`client_pipeline.runtime.config.PRECISIONS`
    privacy : clip and noise of the gradients that are sent
    noise : their source
    """

    def __init__(
        self,
        stream: StatesLink,
        tail: nn.Module,
        precision: str,
        privacy: PrivacyConfig = PrivacyConfig(),  # noqa: B008 (it is frozen)
        noise: NoiseSource | None = None,
    ) -> None:
        super().__init__(stream)
        self._stream, self._tail, self._precision = stream, tail, precision
        self._privacy, self._noise = privacy, noise or NoiseSource(privacy.seed)
        self._step: StepId | None = None
        self._beginning = object()
        """Another one each time that a step is begun: the same step may be begun again."""
        # A thread of a step that was dropped may still compute; nothing of it must be kept or sent.
        self._compute = threading.Lock()
        self._own: dict[int, tuple[Tensor, Mapping[str, Tensor]]] = {}
        """Mask and targets of each micro-batch whose states are still to come."""
        self._losses: dict[int, float] = {}
        self._total_weight = 0.0
        self._collected: dict[str, Tensor] = {}

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """See :class:`DecoderLink`."""
        if total_weight <= 0:
            raise LinkError(f"the batch of {step} carries no target: expected a total weight above 0")
        with self._compute:
            self._own, self._losses, self._collected = {}, {}, {}
            self._step, self._beginning, self._total_weight = step, object(), total_weight
            self._stream.begin_step(step, num_micro_batches, total_weight)

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """Send nothing: the tail is here."""

    def receive_tied(self) -> dict[str, Tensor]:
        """Return the gradient of what is trained of the tail."""
        return self._collected

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Send the activations, and keep the targets."""
        self._own[micro_batch] = mask_BT, targets
        self._stream.send_forward(micro_batch, hidden_BTD, mask_BT, target_weight(targets))

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch; answer states that come before it."""
        step, beginning = self._step, self._beginning
        while not isinstance(answer := self._stream.receive_next(), Gradient):
            with self._compute:
                if step is None or self._step is None or beginning is not self._beginning:
                    raise LinkError(f"the step of micro-batch {answer.micro_batch} was dropped before its states came")
                gradient_BTD, loss_sum = self._gradient(step, answer.micro_batch, answer.tensor)
                self._losses[answer.micro_batch] = loss_sum
                self._stream.send_states_gradient(answer.micro_batch, gradient_BTD)
        if (loss := self._losses.pop(answer.micro_batch, None)) is None:
            raise LinkError(f"the gradient of micro-batch {answer.micro_batch} came before its states")
        return replace(answer, loss_sum=loss)

    def _gradient(self, step: StepId, micro_batch: int, states_BTD: Tensor) -> tuple[Tensor, float]:
        if micro_batch not in self._own:
            raise LinkError(f"states of micro-batch {micro_batch} came twice, or unasked")
        mask_BT, targets = self._own.pop(micro_batch)
        states_BTD = states_BTD.detach().requires_grad_()
        trained = {name: parameter for name, parameter in self._tail.named_parameters() if parameter.requires_grad}
        with autocast(self._precision, HOST):
            loss_sum = self._tail(states_BTD, mask_BT, targets)
        parameters = [states_BTD, *trained.values()]
        of_states, *rest = torch.autograd.grad(
            loss_sum / self._total_weight, parameters, allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(trained, rest, strict=True):
            sum_so_far = self._collected.get(name)
            self._collected[name] = gradient if sum_so_far is None else sum_so_far.add_(gradient)
        loss = float(loss_sum.detach())
        if not (math.isfinite(loss) and bool(torch.isfinite(torch.stack(of_states.aminmax())).all())):
            raise NotFiniteLink(
                f"loss or gradient of micro-batch {micro_batch} holds NaN or Inf: training diverged; lower "
                "optimizer.lr or set optimizer.clip-norm"
            )
        if self._privacy.on_gradients:
            place, weight = ("gradient", step.round, step.step, step.cluster, micro_batch), self._total_weight
            of_states = private_gradient(of_states * weight, mask_BT != 0, self._privacy, self._noise, *place) / weight
        return of_states, loss

    def drop_step(self) -> None:
        """See :class:`DecoderLink`."""
        with self._compute:
            self._step = None
            self._stream.drop_step()
