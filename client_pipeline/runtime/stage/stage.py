"""One device's part of the pipeline: its TEBs, their optimizers, and the executor of its action list."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from client_pipeline.families.families import build_block
from client_pipeline.families.family import Family
from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import frozen_parameters, load_parameters, own_parameters
from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec
from client_pipeline.partition.token_slices import TokenSlice, slice_lengths, token_slices
from client_pipeline.partition.weight_gradients import AddedInPlace, WaitingWeights
from client_pipeline.runtime.stage.accelerator import HOST, autocast, on_host
from client_pipeline.runtime.stage.answering import AnswerStep, KeptRequests, answer_step
from client_pipeline.runtime.stage.held_memory import StoredActivations
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer, gradients
from client_pipeline.runtime.transport.shared_process import TURN_TO_COMPUTE
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD, Receive, Transport
from client_pipeline.timetable.pacing import Pace, PacedClock
from client_pipeline.timetable.schedules import Action, actions, splits_backward
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.low_bits import low_bit_layers


class DoneAction(NamedTuple):
    """An action and when it ran."""

    kind: str
    micro_batch: int
    """Its number, or that of a slice of it, as an :class:`Action` has it."""
    start: float
    """[s], by the machine's clock."""
    end: float
    """[s]."""
    asked: float = 0.0
    """Begin of the stage's wait for its input [s]."""
    arrived: float = 0.0
    """Arrival of the input [s]; no later than ``asked`` if it was there already."""


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """Order to a stage for one local step."""

    step: StepId
    schedule: str
    sizes: list[int]
    """Examples of each micro-batch."""
    mask_BT: Tensor
    """Padding mask of the whole batch, bool, or packed."""
    width: int
    """D."""
    carried: int = 0
    """Examples that each micro-batch has beside its own until the last TEB."""
    num_slices: int = 1
    """Q: slices that each micro-batch is cut into along the sequence; at most T."""
    pace: Pace | None = None
    """Times of paced devices; None: devices compute as fast as they can."""
    forward_only: bool = False
    """True if nothing is trained here or below, and no gradient comes."""

    def shapes(self, *, last: bool = False) -> list[tuple[int, int, int]]:
        """Return the shape of each micro-batch's (or slice's) activations on a link.

        The output of the ``last`` TEB has no carried examples.
        """
        carried = 0 if last else self.carried
        lengths = slice_lengths(self.mask_BT.shape[1], self.num_slices)
        return [(size + carried, length, self.width) for size in self.sizes for length in lengths]

    def numbers(self, micro_batch: int) -> range:
        """Return the numbers of a micro-batch's slices, in forward order; its own number if it is whole."""
        return range(micro_batch * self.num_slices, (micro_batch + 1) * self.num_slices)

    def masks(self) -> list[Tensor | TokenSlice]:
        """Return the masks or slices of one step, which a stage needs beside the activations of each micro-batch."""
        masks = self.mask_BT.split(self.sizes)
        if self.num_slices == 1:
            return list(masks)
        return [part for mask in masks for part in token_slices(mask, self.num_slices)]


@dataclass
class TrainedBlock:
    """A TEB with the optimizer that belongs to it."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    """Frozen parameters that adapters are added to; empty without adapters."""
    base: FrozenBase | None
    """The same where each machine has it by itself; None: it is in memory alone."""
    optimizer: PartOptimizer
    version: int = 0
    """Optimizer step that it is after."""

    def apply(self, step: int, scale: float) -> None:
        """Take optimizer step ``step`` with the waiting gradients times ``scale``."""
        self.optimizer.apply(step, scale)
        self.version = step

    def state(self) -> MovedBlock:
        """Return the state that a checkpoint keeps."""
        return MovedBlock(on_host({name: p.detach() for name, p in self.parameters.items()}), self.optimizer.state())


class Stage:
    """The TEBs on one device, on ``accelerator``; all tensors that come and go are on the host."""

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: OptimizerConfig,
        recompute: bool = False,
        precision: str = "float32",
        accelerator: torch.device = HOST,
    ) -> None:
        self.spec = spec
        self.adapter: Family = family_named(spec.family)
        self.optimizer = optimizer
        self.recompute = recompute
        self.precision = precision
        self.accelerator = accelerator
        self.blocks: dict[int, TrainedBlock] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._waiting: dict[int, WaitingWeights] = {}
        """Weight gradients that a schedule puts off, by micro-batch."""
        self.peak_stored = 0
        """Most micro-batches whose activations were held at once."""
        self.activations = StoredActivations()
        self.kept = KeptRequests()
        """Keys and values of requests for answers."""

    # TEBs come and go with the plan.

    def place(self, index: int, moved: MovedBlock | None = None, version: int = 0) -> None:
        """Build TEB ``index`` here, with its state from elsewhere, if any, after optimizer step ``version``."""
        moved = moved or MovedBlock()
        base = moved.frozen.check() if isinstance(moved.frozen, FrozenBase) else None
        module = build_block(self.spec, index, base).train().to(self.accelerator)
        parameters, frozen = own_parameters(module), frozen_parameters(module) if self.spec.lora else {}
        if base is None:
            load_parameters(frozen, moved.frozen, f"TEB {index} (frozen)")
        if moved.weights:
            load_parameters(parameters, moved.weights, f"TEB {index}")
        block = TrainedBlock(module, parameters, frozen, base, PartOptimizer(parameters, self.optimizer), version)
        block.optimizer.load_state(moved.optimizer)
        self.blocks[index] = block
        self.blocks = dict(sorted(self.blocks.items()))

    def take(self, index: int) -> MovedBlock:
        """Remove TEB ``index`` and return its weights, frozen ones too, and its optimizer state."""
        block = self.blocks.pop(index)
        frozen: Mapping[str, Tensor] | None = block.base
        if frozen is None:
            frozen = on_host({name: p.detach() for name, p in block.frozen.items()})
        return block.state()._replace(frozen=frozen)

    def states(self) -> dict[int, MovedBlock]:
        """Return weights and optimizer state of all TEBs, which stay."""
        return {i: block.state() for i, block in self.blocks.items()}

    def load(self, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Overwrite the weights of TEBs; their optimizers keep their state."""
        for index, values in weights.items():
            load_parameters(self.blocks[index].parameters, values, f"TEB {index}")

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Return all weights by TEB, not copied: they are serialized when they leave the process."""
        return {i: on_host({n: p.detach() for n, p in block.parameters.items()}) for i, block in self.blocks.items()}

    def _weights_here(self) -> Iterator[Tensor]:
        for block in self.blocks.values():
            yield from (*block.parameters.values(), *block.frozen.values())
            for _, layer in low_bit_layers(block.module):
                yield from layer.packed_matrix

    def held_bytes(self) -> int:
        """Return the bytes of weights, gradients, optimizer states and activations at their peak.

        The peak includes the activations of a micro-batch that is recomputed.
        """
        weights = sum(tensor.nbytes for tensor in self._weights_here())
        gradients = sum(p.nbytes for block in self.blocks.values() for p in block.parameters.values())
        states = sum(block.optimizer.state_bytes() for block in self.blocks.values())
        return weights + gradients + states + self.activations.peak_bytes + self.kept.nbytes

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Copy the waiting gradients by TEB."""
        return {i: on_host(gradients(block.parameters)) for i, block in self.blocks.items()}

    # Answers.

    def answer(self, step: AnswerStep, x_RTD: Tensor) -> Tensor:
        """Pass new tokens of requests through the TEBs, in evaluation, [R, T, D]."""
        blocks = {index: block.module for index, block in self.blocks.items()}
        mask_form = self.adapter.mask_form if self.spec.head == SEQ2SEQ else None
        with autocast(self.precision, self.accelerator):
            return answer_step(blocks, self.kept, step, x_RTD.to(self.accelerator), mask_form).float().to(HOST)

    # One micro-batch.

    def _compute(self, step: StepId, micro_batch: int, x_BTD: Tensor, seen: Tensor | TokenSlice) -> Tensor:
        if isinstance(seen, Tensor):
            mask = self.adapter.mask_form(seen.to(self.accelerator), x_BTD.dtype)
        else:
            mask = seen.to(self.accelerator)
        with autocast(self.precision, x_BTD.device):
            for index, block in self.blocks.items():
                with step.dropout(index, micro_batch):
                    # After each block, so that the result does not depend on where the segments end.
                    x_BTD = block.module(x_BTD, mask).float()
        return x_BTD

    def forward(
        self,
        step: StepId,
        micro_batch: int,
        x_BTD: Tensor,
        seen: Tensor | TokenSlice,
        *,
        splits: bool = False,
        forward_only: bool = False,
    ) -> Tensor:
        """Compute the output, and keep the tensors that the backward pass needs (the input alone when recomputing).

        Parameters
        ----------
        step : names dropout's seeds
        micro_batch : its number, or that of a slice of it
        x_BTD : its activations
        seen : the padding mask [B, T]; or the slice that it is, which has keys and values of the slices before
        splits : weight gradients will be asked for on their own, by :meth:`backward_weights`
        forward_only : there will be no backward pass, and nothing is kept
        """
        if forward_only:
            with torch.no_grad():
                return self._compute(step, micro_batch, x_BTD.to(self.accelerator), seen).to(HOST)
        x_BTD = x_BTD.to(self.accelerator).requires_grad_()
        self._inputs[micro_batch] = x_BTD
        self.peak_stored = max(self.peak_stored, len(self._inputs.keys() | self._waiting.keys()))
        if splits:
            self._waiting[micro_batch] = WaitingWeights()
        if self.recompute:
            with torch.no_grad():
                y_BTD = self._compute(step, micro_batch, x_BTD, seen)
            self.activations.keep(micro_batch, x_BTD.nbytes + (seen.nbytes if isinstance(seen, TokenSlice) else 0))
            return y_BTD.to(HOST)
        y_BTD = self._compute_with_graph(step, micro_batch, x_BTD, seen)
        self._outputs[micro_batch] = y_BTD
        return y_BTD.detach().to(HOST)

    def _compute_with_graph(self, step: StepId, micro_batch: int, x_BTD: Tensor, seen: Tensor | TokenSlice) -> Tensor:
        """Compute with a graph for the backward pass, and count the bytes that it keeps."""
        part = seen if isinstance(seen, TokenSlice) else None
        # Later slices keep more: they see more keys.
        key = (tuple(self.blocks), *x_BTD.shape, part.end if part else x_BTD.shape[1])
        with self.activations.count(micro_batch, key, self._weights_here()), self._weight_gradients(micro_batch):
            y_BTD = self._compute(step, micro_batch, x_BTD, seen)
        if part:
            self.activations.keep_beside(micro_batch, part.nbytes)
        return y_BTD

    def _weight_gradients(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Return the context of a forward pass that delays or adds weight gradients as the schedule asks."""
        if micro_batch in self._waiting:
            return self._waiting[micro_batch]
        # In mixed precision the products' type is not the gradients': there is nothing to add to in place.
        parameters = itertools.chain.from_iterable(block.parameters.values() for block in self.blocks.values())
        pays = self.precision == "float32" and AddedInPlace.pays(parameters)
        return AddedInPlace() if pays else nullcontext()

    def backward(self, step: StepId, micro_batch: int, gradient_BTD: Tensor, seen: Tensor | TokenSlice) -> Tensor:
        """Accumulate the TEBs' gradients, and return the gradient of the input [B, T, D].

        After a forward pass that ``splits`` the gradients of linear layers wait for :meth:`backward_weights`. Slices of
        a micro-batch come in reverse order.
        """
        x_BTD = self._inputs.pop(micro_batch)
        if self.recompute:
            # Here the stage holds the activations of one micro-batch beside the inputs of the others.
            y_BTD = self._compute_with_graph(step, micro_batch, x_BTD, seen)
        else:
            y_BTD = self._outputs.pop(micro_batch)
        torch.autograd.backward(y_BTD, gradient_BTD.to(self.accelerator))
        if isinstance(seen, TokenSlice):
            seen.forget()
        if micro_batch in self._waiting:
            self.activations.keep(micro_batch, self._waiting[micro_batch].nbytes)
        else:
            self.activations.free(micro_batch)
        assert x_BTD.grad is not None
        return x_BTD.grad.to(HOST)

    def backward_weights(self, micro_batch: int) -> None:
        """Accumulate the weight gradients that the backward pass of a micro-batch put off."""
        self._waiting.pop(micro_batch).add()
        self.activations.free(micro_batch)

    # One local step.

    def gradient_norm_sq(self) -> float:
        """Return the squared norm of the waiting gradients of all TEBs."""
        return sum(block.optimizer.gradient_norm_sq() for block in self.blocks.values())

    def apply(self, step: int, scale: float) -> None:
        """Take the optimizers' step number ``step``."""
        for block in self.blocks.values():
            block.apply(step, scale)

    def not_finite(self) -> list[int]:
        """Return the TEBs whose waiting gradients hold NaN or Inf."""
        return [i for i, block in self.blocks.items() if not math.isfinite(block.optimizer.gradient_norm_sq())]

    def discard(self) -> None:
        """Drop gradients and activations of a step that will not complete."""
        self._inputs.clear()
        self._outputs.clear()
        self._waiting.clear()
        self.activations.clear()
        for block in self.blocks.values():
            block.optimizer.discard()


def run_actions(stage: Stage, transport: Transport, order: StepOrder) -> list[DoneAction]:
    """Run this stage's action list for one local step; returns what was done when.

    All receives are posted before the first action and sends are not waited for, so the links work while the stage
    computes; there is no barrier between actions. Posting late would cost more than the wait: it sends a message to
    the neighbour just when that one writes its next tensor, and gloo's thread there then spins until the write ends.
    """
    rank, last_rank = transport.rank, transport.size - 1
    todo = actions(order.schedule, rank - 1, last_rank, len(order.sizes), order.num_slices)
    if order.forward_only:
        todo = [action for action in todo if action.kind == "F"]
    masks, shapes = order.masks(), {last: order.shapes(last=last) for last in (False, True)}
    previous, following = rank - 1, (rank + 1) % transport.size

    def post(action: Action) -> Receive:
        peer, direction = (previous, FORWARD) if action.kind == "F" else (following, BACKWARD)
        shape = shapes[direction == BACKWARD and rank == last_rank][action.micro_batch]
        return transport.receive(shape, peer, direction, action.micro_batch)

    splits = splits_backward(order.schedule)
    # With 1F1B the first stage alone could be flooded: the control unit's schedule is to send at once.
    floods = order.schedule != "gpipe" and rank == 1
    num_posted = (transport.size + 1) * order.num_slices if floods else len(masks)
    posted = {
        action: post(action)
        for action in todo
        if action.kind == "B" or (action.kind == "F" and action.micro_batch < num_posted)
    }
    clock = PacedClock(order.pace.stages[rank - 1], splits) if order.pace else None
    done_actions: list[DoneAction] = []
    for action in todo:
        kind, micro_batch = action
        asked = time.time()
        # Weight gradients need nothing from elsewhere.
        received_tensor = posted.pop(action).wait() if action in posted else None
        arrived = time.time()
        with TURN_TO_COMPUTE:
            # Not a monotonic clock: the stages may be on several machines.
            start = time.time()
            if clock:
                clock.begin()
            result = None
            if received_tensor is None:
                stage.backward_weights(micro_batch)
            elif kind == "F":
                result = stage.forward(
                    order.step,
                    micro_batch,
                    received_tensor,
                    masks[micro_batch],
                    splits=splits,
                    forward_only=order.forward_only,
                )
            else:
                result = stage.backward(order.step, micro_batch, received_tensor, masks[micro_batch])
            end = time.time()
        if clock:
            clock.compute(kind, micro_batch)
            end = time.time()
        done_actions.append(DoneAction(kind, micro_batch, start, end, asked, arrived))
        if result is None:
            continue
        if clock:
            clock.send(kind, micro_batch)
        if kind == "F":
            transport.send(result, following, FORWARD, micro_batch)
        else:
            transport.send(result, previous, BACKWARD, micro_batch)
        later = Action("F", micro_batch + num_posted)
        if kind == "F" and later.micro_batch < len(masks):
            posted[later] = post(later)
    transport.flush()
    return done_actions
