"""Optimizers whose state stays with its TEB, embedding or decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from client_pipeline.runtime.stage.accelerator import on_host
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig

_STEP = "step"
"""AdamW's count, which stays on the host; all else is where its parameter is."""


class PartOptimizer:
    """The optimizer of one part (a TEB, the embedding, the decoder): torch's SGD and AdamW as functions.

    Their classes import torch's compiler, which would cost each device a second of its start and 70 MB.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = dict(parameters)
        self.config = config
        # A bias need not be a vector: Marian's of the logits is [1, V], T5's of relative positions [buckets, heads].
        decayed = [name for name, p in self.parameters.items() if p.ndim > 1 and "bias" not in name]
        plain = [name for name in self.parameters if name not in decayed]
        self._groups = ((decayed, config.weight_decay), (plain, 0.0))
        self._state: dict[str, dict[str, Tensor]] = {}
        """State of each parameter, from its first step on."""

    def gradient_norm_sq(self) -> float:
        """Return the squared norm of the gradients that wait to be applied."""
        return squared_norm([p.grad for p in self.parameters.values() if p.grad is not None])

    def apply(self, step: int, scale: float = 1.0) -> None:
        """Take the step with the waiting gradients times ``scale``, then forget them."""
        for names, weight_decay in self._groups:
            stepped = [name for name in names if self.parameters[name].grad is not None]
            if stepped:
                self._step(stepped, self.config.learning_rate(step), weight_decay, scale)
        self.discard()

    @torch.no_grad()
    def _step(self, names: Sequence[str], lr: float, weight_decay: float, scale: float) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        waiting = [parameter.grad for parameter in parameters]
        slopes = [gradient if scale == 1.0 else gradient.mul_(scale) for gradient in waiting if gradient is not None]
        config, states = self.config, [self._state.setdefault(name, {}) for name in names]
        if config.name == "sgd":
            buffers = [state.get("momentum_buffer") for state in states]
            sgd(
                parameters,
                slopes,
                buffers,
                weight_decay=weight_decay,
                momentum=config.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            for state, buffer in zip(states, buffers, strict=True):
                if buffer is not None:
                    state["momentum_buffer"] = buffer
            return
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state |= {_STEP: torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            parameters,
            slopes,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state[_STEP] for state in states],
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def discard(self) -> None:
        """Forget waiting gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state on the host: tensors by ``parameter/quantity``; empty before the first step."""
        return on_host(self._held_state())

    def state_bytes(self) -> int:
        """Return the bytes of the state."""
        return sum(value.nbytes for value in self._held_state().values())

    def _held_state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{quantity}": value for name, states in self._state.items() for quantity, value in states.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by one of :meth:`state`; an empty one is that before the first step.

        Raises
        ------
        ValueError
            If it is of other parameters.
        """
        if not self.parameters:
            return
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            name, _, quantity = key.rpartition("/")
            if name not in self.parameters:
                raise ValueError(
                    f"optimizer state: {key!r} belongs to no parameter here; expected {sorted(self.parameters)}"
                )
            home = value.device if quantity == _STEP else self.parameters[name].device
            states.setdefault(name, {})[quantity] = value.to(home, copy=True)
        self._state = states


def copied_states(optimizers: Sequence[PartOptimizer]) -> list[dict[str, Tensor]]:
    """Copy the state of each optimizer."""
    return [{name: value.clone() for name, value in optimizer.state().items()} for optimizer in optimizers]


def put_back_states(optimizers: Sequence[PartOptimizer], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Restore optimizers from copies; one without a copy is as before its first step."""
    for place, optimizer in enumerate(optimizers):
        optimizer.load_state(states[place] if place < len(states) else {})


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return the squared norm of all tensors as one vector."""
    # A product with itself takes half the time of torch's norm.
    squares = [torch.dot(flat, flat) for flat in (tensor.flatten() for tensor in tensors)]
    return float(torch.stack(squares).sum()) if squares else 0.0


def clip_scale(clip_norm: float, norm_sq: float) -> float:
    """Return the clipping factor c = min(1, clip / norm); 1 without clipping."""
    if clip_norm <= 0:
        return 1.0
    return min(1.0, clip_norm / max(math.sqrt(norm_sq), 1e-12))


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copy the waiting gradients; zeros where a parameter has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in parameters.items()}
