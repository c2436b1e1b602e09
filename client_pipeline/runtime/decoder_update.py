"""Training the decoder or head on activations: on the server for all clusters, or on a CU for itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.parts import own_parameters, tied_names
from client_pipeline.runtime.accelerator import HOST, on_host
from client_pipeline.runtime.optimizer import PartOptimizer, squared_norm
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.precision import autocast


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
    ) -> None:
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
        hidden = hidden_BTD.detach().to(self.accelerator).requires_grad_()
        mask_BT, targets = mask_BT.to(self.accelerator), {n: t.to(self.accelerator) for n, t in targets.items()}
        leaves = self._leaves(tied or {})
        with step.dropout(self.unit, micro_batch), autocast(self.precision, hidden.device):
            if leaves:
                loss_sum = torch.func.functional_call(self.head, leaves, (hidden, mask_BT, targets))
            else:
                loss_sum = self.head(hidden, mask_BT, targets)
        parameters: list[Tensor] = [*self.parameters.values(), *leaves.values()]
        # The backward pass adds to what was collected, matrix by matrix: it makes no second gradient of the whole head.
        for parameter, collected in zip(parameters, self._collected.pop(step.cluster, ()), strict=False):
            parameter.grad = collected
        try:
            (loss_sum / total_weight).backward(inputs=[hidden, *parameters])
            self._collected[step.cluster] = [_gradient_of(parameter) for parameter in parameters]
        finally:
            for parameter in parameters:
                parameter.grad = None
        return _gradient_of(hidden).to(HOST), float(loss_sum.detach())

    def _leaves(self, tied: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_tied(self.tied, tied)
        return {name: tied[name].detach().to(self.accelerator).requires_grad_() for name in self.tied}

    def tied_gradient(self, cluster: int) -> dict[str, Tensor]:
        """What was collected of one cluster for the tied matrices, by the head's own names; part of no norm here."""
        collected = self._collected.get(cluster, [])[len(self.parameters) :]
        return on_host(dict(zip(self.tied, collected, strict=True)))

    def gradient_norm_sq(self, cluster: int) -> float:
        """Squared norm of what was collected of one cluster for the head's own parameters."""
        return squared_norm(self._collected.get(cluster, [])[: len(self.parameters)])

    def gradients(self, cluster: int) -> dict[str, Tensor]:
        """Copies of what was collected of one cluster, g_n, by the head's own names."""
        return on_host({n: g.clone() for n, g in zip(self.parameters, self._collected[cluster], strict=False)})

    def discard(self, cluster: int) -> None:
        """Forget what was collected of one cluster (its step did not complete)."""
        self._collected.pop(cluster, None)

    def apply(self, contributions: Iterable[Contribution], step: int) -> None:
        """Take one optimizer step with sum(W_n c_n g_n) / sum(W_n), Eq. (7), summed in cluster order.

        The fixed order makes runs repeat bit for bit, whoever came first.
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
