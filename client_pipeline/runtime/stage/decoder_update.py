"""Training the decoder or head on activations: on the server for all clusters, or on a CU for itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import own_parameters, tied_names
from client_pipeline.runtime.stage.accelerator import HOST, autocast, on_host
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer, squared_norm


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One cluster's share of a decoder step, Eq. (7)."""

    cluster: int
    weight: float
    """W_n: target tokens or samples of the cluster's batch."""
    scale: float = 1.0
    """c of the cluster's gradient clipping."""


class HeadTrainer:
    """Computes activation gradients and collects each cluster's decoder gradient g_n = grad(loss_sum) / W_n.

    A matrix that the head reads from the embedding (a tied one) is no parameter here: each cluster computes with its
    own value of it, and gets its gradient back. The head is on ``accelerator``; all that comes and goes is on the host.

    Not thread-safe: callers hold one lock around it.
    """

    def __init__(
        self,
        head: nn.Module,
        optimizer: OptimizerConfig,
        unit: int,
        precision: str = "float32",
        accelerator: torch.device = HOST,
        answers_gradients: bool = True,
    ) -> None:
        self.answers_gradients = answers_gradients
        """False if nothing below is trained: the gradients of activations are zeros."""
        self.head = head.train().to(accelerator)
        self.accelerator = accelerator
        self.unit = unit
        """Index after the last TEB: the head's place in the dropout seeds."""
        self.precision = precision
        """Precision of its matrix products; see :data:`client_pipeline.runtime.config.PRECISIONS`."""
        self.parameters = own_parameters(self.head)
        self.tied = {name: self.head.get_parameter(name).shape for name in tied_names(self.head)}
        """Shapes of the tied matrices by the head's own names."""
        self.optimizer = PartOptimizer(self.parameters, optimizer)
        self._collected: dict[int, list[Tensor]] = {}
        self._waiting: dict[int, dict[int, tuple[StepId, Tensor, Tensor]]] = {}
        """By cluster and micro-batch: step, activations and mask, where the gradient of states is still to come."""

    @property
    def returns_states(self) -> bool:
        """True if the head is blocks alone, and each cluster has their states and computes its own loss."""
        return bool(getattr(self.head, "returns_states", False))

    def copy(self) -> HeadTrainer:
        """Another trainer with the same weights and optimizer state; what no trainer trains is shared."""
        trained = {id(p) for p in self.parameters.values()}
        shared = {id(p): p for p in self.head.parameters() if id(p) not in trained}
        return copy.deepcopy(self, shared)

    def gradient(
        self,
        step: StepId,
        micro_batch: int,
        hidden_BTD: Tensor,
        mask_BT: Tensor,
        targets: Mapping[str, Tensor],
        total_weight: float,
        tied: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, float]:
        """Forward and backward of one micro-batch, with the cluster's own values of the tied matrices.

        Returns
        -------
        Gradient of loss_sum / W_n with respect to the activations [B, T, D], and loss_sum.

        Raises
        ------
        ValueError
            If a tied matrix is missing, unknown or of another shape; the message names it.
        """
        hidden = hidden_BTD.detach().to(self.accelerator).requires_grad_(self.answers_gradients)
        mask_BT, targets = mask_BT.to(self.accelerator), {n: t.to(self.accelerator) for n, t in targets.items()}
        leaves = self._leaves(tied or {})
        with step.dropout(self.unit, micro_batch), autocast(self.precision, hidden.device):
            if leaves:
                loss_sum = torch.func.functional_call(self.head, leaves, (hidden, mask_BT, targets))
            else:
                loss_sum = self.head(hidden, mask_BT, targets)
        self._collect(step.cluster, hidden, loss_sum / total_weight, None, leaves.values())
        return _gradient_of(hidden).to(HOST), float(loss_sum.detach())

    def states(self, step: StepId, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Forward of one micro-batch through blocks whose states are returned, [B, T, D]; :meth:`backward` follows.

        It is computed again there: the graphs of all micro-batches of all clusters would be in memory meanwhile.
        """
        self._waiting.setdefault(step.cluster, {})[micro_batch] = step, hidden_BTD.detach(), mask_BT
        with torch.no_grad():
            return self._states(step, micro_batch, hidden_BTD.detach().to(self.accelerator), mask_BT).to(HOST)

    def _states(self, step: StepId, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        with step.dropout(self.unit, micro_batch), autocast(self.precision, hidden_BTD.device):
            return cast(Tensor, self.head(hidden_BTD, mask_BT.to(self.accelerator)).float())

    def backward(self, cluster: int, micro_batch: int, gradient_BTD: Tensor) -> Tensor:
        """Backward of a micro-batch, of the gradient of loss_sum / W_n with respect to its states.

        Returns
        -------
        The one with respect to its activations, [B, T, D].

        Raises
        ------
        ValueError
            If its states have another shape.
        """
        step, hidden, mask_BT = self._waiting[cluster].pop(micro_batch)
        if gradient_BTD.shape != hidden.shape:
            raise ValueError(f"expected the shape {list(hidden.shape)}, found {list(gradient_BTD.shape)}")
        hidden = hidden.to(self.accelerator).requires_grad_()
        states = self._states(step, micro_batch, hidden, mask_BT)
        self._collect(cluster, hidden, states, gradient_BTD.to(self.accelerator), ())
        return _gradient_of(hidden).to(HOST)

    def _collect(
        self, cluster: int, hidden: Tensor, output: Tensor, gradient: Tensor | None, leaves: Iterable[Tensor]
    ) -> None:
        """Backward pass of an output, which adds to the cluster's collected gradient."""
        parameters: list[Tensor] = [*self.parameters.values(), *leaves]
        # Matrix by matrix, to what was collected: it makes no second gradient of the whole head.
        for parameter, collected in zip(parameters, self._collected.pop(cluster, ()), strict=False):
            parameter.grad = collected
        try:
            output.backward(gradient, inputs=[leaf for leaf in (hidden, *parameters) if leaf.requires_grad])
            self._collected[cluster] = [_gradient_of(parameter) for parameter in parameters]
        finally:
            for parameter in parameters:
                parameter.grad = None

    def _leaves(self, tied: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_tied(self.tied, tied)
        return {name: tied[name].detach().to(self.accelerator).requires_grad_() for name in self.tied}

    def tied_gradient(self, cluster: int) -> dict[str, Tensor]:
        """Return one cluster's collected gradient of the tied matrices, by the head's own names; in no norm here."""
        collected = self._collected.get(cluster, [])[len(self.parameters) :]
        return on_host(dict(zip(self.tied, collected, strict=True)))

    def gradient_norm_sq(self, cluster: int) -> float:
        """Return the squared norm of one cluster's collected gradient of the head's own parameters."""
        return squared_norm(self._collected.get(cluster, [])[: len(self.parameters)])

    def gradients(self, cluster: int) -> dict[str, Tensor]:
        """Copy one cluster's collected gradient g_n, by the head's own names."""
        return on_host({n: g.clone() for n, g in zip(self.parameters, self._collected[cluster], strict=False)})

    def discard(self, cluster: int) -> None:
        """Forget the collected gradient of one cluster, whose step did not complete."""
        self._collected.pop(cluster, None)
        self._waiting.pop(cluster, None)

    def apply(self, contributions: Iterable[Contribution], step: int) -> None:
        """Take one optimizer step with sum(W_n c_n g_n) / sum(W_n), Eq. (7), summed in cluster order.

        The fixed order makes runs repeat bit for bit, in whichever order clusters answer.
        """
        ordered = sorted(contributions, key=lambda c: c.cluster)
        total = sum(c.weight for c in ordered)
        if total <= 0:
            raise ValueError("a decoder step needs at least one contribution with a positive weight")
        grads: list[Tensor] = []
        for c in ordered:
            if c.cluster in self._collected:
                collected = self._collected.pop(c.cluster)[: len(self.parameters)]
                share = c.weight * c.scale / total
                if grads:
                    torch._foreach_add_(grads, collected, alpha=share)
                else:
                    # The sum is made in the first one's own tensors.
                    grads = collected
                    torch._foreach_mul_(grads, share)
        for index, parameter in enumerate(self.parameters.values()):
            parameter.grad = grads[index] if grads else torch.zeros_like(parameter)
        del grads
        self.optimizer.apply(step)


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def check_tied(expected: Mapping[str, torch.Size], received: Mapping[str, Tensor]) -> None:
    """Refuse tied matrices that are not those that the head reads.

    Raises
    ------
    ValueError
        If one is missing, unknown or of another shape; the message names it.
    """
    for name in sorted(expected.keys() ^ received.keys()):
        kind = "missing" if name in expected else "not one of this head's"
        raise ValueError(f"tied matrix {name}: {kind}; expected {sorted(expected)}, found {sorted(received)}")
    for name, shape in expected.items():
        if received[name].shape != shape:
            raise ValueError(f"tied matrix {name}: expected shape {list(shape)}, found {list(received[name].shape)}")
