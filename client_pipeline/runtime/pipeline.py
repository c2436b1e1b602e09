"""The control unit's end of the pipeline: who holds which TEB, and one local step over all devices.

One step, with the control unit as rank 0 of a ring (F: activations, B: gradients)::

    batch -> embedding -F-> device -F-> device -F-> control unit -> decoder
             embedding <-B- device <-B- device <-B- control unit <- decoder

Three threads follow the three arrows that touch the control unit; the devices follow their action lists.
"""

from __future__ import annotations

import concurrent.futures
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
import torch
from torch import Tensor, nn

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.base import DecoderLink, LinkError
from client_pipeline.partition.families import adapter, carried_examples, tied
from client_pipeline.partition.parts import Batch, block_weights, target_weight, targets
from client_pipeline.partition.plan import ClusterPlan, Segment
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.device import Device, StepReport
from client_pipeline.runtime.faults import PipelineError, device_fault
from client_pipeline.runtime.head import check_tied
from client_pipeline.runtime.micro_batches import EMBEDDING_UNIT, StepId, split_batch
from client_pipeline.runtime.optimizer import OptimizerConfig
from client_pipeline.runtime.pacing import Pace
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.precision import autocast
from client_pipeline.runtime.stage import MovedBlock, StepOrder
from client_pipeline.runtime.transport import BACKWARD, FORWARD, GlooTransport, GroupAddress, open_store

T = TypeVar("T")

NAMESPACE = "collapipe"
"""Ray namespace of all actors: a named actor is found by any process of the cluster."""

WATCH_INTERVAL_S = 0.2
"""How often a running step looks for a dead device."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Result of one local step of a cluster."""

    loss_sum: float
    weight: int
    """W_n: targets that carry a loss."""
    devices: dict[int, StepReport]
    """By device index."""
    link_bytes: int
    """Activations and gradients that went over each link between two stages."""
    decoder_norm_sq: float | None
    """Squared norm of the decoder's gradient, as the decoder said it."""

    def __add__(self, later: StepOutcome) -> StepOutcome:
        """Join it with that of the step's next batch; norms are of all that was accumulated until then."""
        devices = {
            device: StepReport(
                actions=report.actions + later.devices[device].actions, norm_sq=later.devices[device].norm_sq
            )
            for device, report in self.devices.items()
        }
        return StepOutcome(
            loss_sum=self.loss_sum + later.loss_sum,
            weight=self.weight + later.weight,
            devices=devices,
            link_bytes=self.link_bytes + later.link_bytes,
            decoder_norm_sq=later.decoder_norm_sq,
        )


class Pipeline:
    """The devices of one cluster."""

    def __init__(
        self,
        *,
        name: str,
        spec: ModelSpec,
        optimizer: OptimizerConfig,
        runtime: RuntimeConfig,
        placement: Placement = Placement(),  # noqa: B008 (it is frozen)
        frozen: Mapping[str, Tensor] | None = None,
        codec: ActivationCodec = ActivationCodec(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.name = name
        self.spec = spec
        self.optimizer = optimizer
        self.runtime = runtime
        self.placement = placement
        self.width = adapter(spec.family).width(spec)
        self.carried = carried_examples(spec)
        self.frozen = dict(frozen or {})
        """What adapters are added to, by global name: for TEBs that no device holds yet."""
        self.codec = codec
        """How activations and gradients travel between the devices."""
        self.tied = tied(spec)
        """What the decoder reads of the embedding: its own name and the embedding's own name of each matrix."""
        self.segments: list[Segment] = []
        self.schedule = "gpipe"
        self.num_micro_batches = 1
        self.moved_blocks = 0
        """TEBs that changed owner since the pipeline began, first placements left out."""
        self.moved_bytes = 0
        """Bytes of their weights and optimizer state."""
        self._restored: dict[int, MovedBlock] = {}
        self._devices: dict[int, Any] = {}
        self._owner: dict[int, int] = {}
        self._transport: GlooTransport | None = None
        self._ring: tuple[int, ...] = ()
        self._generation = 0
        self._store = open_store(placement.host, runtime.timeout)
        self._threads = _three_threads()

    # The plan.

    def apply_plan(self, plan: ClusterPlan, decoder_wait_s: float = 0.0) -> None:
        """Start the devices that the plan needs and move the TEBs that change owner, with their optimizer state.

        Parameters
        ----------
        plan : the round's plan
        decoder_wait_s : how long the decoder may keep a gradient back while it waits for other clusters; devices
            bear with it that much longer than with each other
        """
        segments = plan.segments()
        wanted = {index: segment.device for segment in segments for index in segment.blocks}
        ring = tuple(segment.device for segment in segments)
        for device in ring:
            if device not in self._devices or not (device in self._owner.values() or self._lives(device)):
                self._devices[device] = self._start(device)
        arriving: dict[int, list[tuple[int, Any]]] = {}
        moving: set[int] = set()
        for index, device in sorted(wanted.items()):
            owner = self._owner.get(index)
            if owner != device:
                # The object goes from device to device; the control unit holds a reference only.
                moved = self._at_rest(index) if owner is None else self._devices[owner].take.remote(index)
                if owner is not None:
                    moving.add(index)
                arriving.setdefault(device, []).append((index, moved))
        placed = [
            self._devices[device].place.remote([index for index, _ in blocks], *(moved for _, moved in blocks))
            for device, blocks in arriving.items()
        ]
        # Until all are placed nobody is known to own a TEB that moves: a failure here must not leave a wrong owner.
        for blocks in arriving.values():
            for index, _ in blocks:
                self._owner.pop(index, None)
        brought = self._wait(placed, "placing TEBs")
        self.moved_bytes += sum(
            size
            for blocks, sizes in zip(arriving.values(), brought, strict=True)
            for (index, _), size in zip(blocks, sizes, strict=True)
            if index in moving
        )
        self._owner = wanted
        self.moved_blocks += len(moving)
        self.segments, self.schedule, self.num_micro_batches = segments, plan.schedule, plan.m
        if ring != self._ring or self._transport is None:
            self._connect(ring, self.runtime.timeout + decoder_wait_s)

    def _at_rest(self, index: int) -> MovedBlock | None:
        """What a TEB that no device holds begins with: what a checkpoint had of it, and its frozen weights."""
        moved = self._restored.pop(index, MovedBlock())._replace(frozen=block_weights(self.frozen, index))
        return moved if any(moved) else None

    def _lives(self, device: int) -> bool:
        """Whether a device that has had nothing to do is still there; it ends itself when idle for long."""
        try:
            ray.get(self._devices[device].status.remote(), timeout=self.runtime.timeout)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def _start(self, device: int) -> Any:
        actor = ray.remote(Device).options(
            name=f"{self.name}/device-{device}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            **self.placement.device_options(device),
        )
        return actor.remote(self.spec, self.optimizer, self.runtime)

    def _connect(self, ring: tuple[int, ...], timeout_s: float) -> None:
        self.disconnect()
        self._generation += 1
        address = GroupAddress(
            host=self.placement.host,
            port=self._store.port,
            generation=self._generation,
            size=len(ring) + 1,
            timeout_s=timeout_s,
            codec=self.codec.name,
        )
        joined = [self._devices[device].connect.remote(address, rank + 1) for rank, device in enumerate(ring)]
        try:
            self._transport = GlooTransport(address, 0, self._store)
            self._wait(joined, "joining the cluster's group")
        except BaseException as error:
            self.disconnect()
            if isinstance(error, RuntimeError) and not isinstance(error, PipelineError):
                raise PipelineError(f"{self.name}: joining the cluster's group: {error}") from error
            raise
        self._ring = ring

    def disconnect(self) -> None:
        """Leave the group; the next plan builds another."""
        self._ring = ()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _wait(self, references: Sequence[Any], what: str) -> list[Any]:
        try:
            return list(ray.get(list(references), timeout=self.runtime.timeout))
        except ray.exceptions.GetTimeoutError as error:
            raise PipelineError(f"{self.name}: {what}: no answer within {self.runtime.timeout:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise PipelineError(f"{self.name}: {what}: a device process ended: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise PipelineError(f"{self.name}: {what}: {error.cause or error}") from error

    def _on_devices(self, call: Callable[[Any, int], Any], what: str) -> dict[int, Any]:
        """Call every scheduled device at once; answers by device index."""
        ring = [segment.device for segment in self.segments]
        return dict(zip(ring, self._wait([call(self._devices[d], d) for d in ring], what), strict=True))

    # Weights.

    def load(self, blocks: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Give each device the round's weights of its TEBs."""
        of_device = {s.device: {i: blocks[i] for i in s.blocks} for s in self.segments}
        self._on_devices(lambda actor, device: actor.load.remote(of_device[device]), "loading weights")

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Collect the weights of all TEBs."""
        return _joined(self._on_devices(lambda actor, _: actor.weights.remote(), "collecting weights"))

    def states(self) -> dict[int, MovedBlock]:
        """Collect weights and optimizer state of all TEBs, for a checkpoint."""
        return _joined(self._on_devices(lambda actor, _: actor.states.remote(), "collecting optimizer state"))

    def restore(self, states: Mapping[int, MovedBlock]) -> None:
        """Give TEBs that no device holds yet the weights and optimizer state of a checkpoint, when they are placed."""
        self._restored = dict(states)

    def memory(self) -> dict[int, dict[str, int]]:
        """Memory of each scheduled device's process, as :meth:`Device.memory` says."""
        return self._on_devices(lambda actor, _: actor.memory.remote(), "asking for memory")

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Collect the gradients that wait to be applied (for ``collapipe verify``)."""
        return _joined(self._on_devices(lambda actor, _: actor.gradients.remote(), "collecting gradients"))

    def status(self) -> dict[int, dict[str, Any]]:
        """What each scheduled device says of itself."""
        return self._on_devices(lambda actor, _: actor.status.remote(), "asking for status")

    def apply(self, step: int, scale: float) -> None:
        """All devices take optimizer step ``step`` with their gradients times ``scale``."""
        self._on_devices(lambda actor, _: actor.apply.remote(step, scale), "taking the optimizer step")

    def discard(self) -> None:
        """All devices forget their waiting gradients."""
        self._on_devices(lambda actor, _: actor.discard.remote(), "discarding gradients")

    # One local step.

    def run_step(
        self,
        step: StepId,
        batches: Sequence[Batch],
        embedding: nn.Module,
        link: DecoderLink,
        apply_step: int | None = None,
        pace: Pace | None = None,
    ) -> StepOutcome:
        """Forward and backward of one batch after the other; the embedding's gradients are left waiting.

        Gradients accumulate over the batches: they are those of the mean over all targets of the step, W_n.

        Parameters
        ----------
        step : names the step; dropout seeds derive from it
        batches : the cluster's batches, b examples each
        embedding : the control unit's part
        link : the decoder; the caller ends the step on it
        apply_step : optimizer step that the devices take as soon as they are done; None leaves their
            gradients waiting for :meth:`apply`
        pace : what the devices' actions take; None: as fast as they go

        Raises
        ------
        PipelineError
            If a device died, froze or failed.
        LinkError
            If the decoder refused or was too late.
        """
        transport = self._transport
        if transport is None:
            raise PipelineError(f"{self.name}: no plan is applied")
        m, last = self.num_micro_batches, len(batches) - 1
        link.begin_step(step, m * len(batches), sum(target_weight(targets(batch)) for batch in batches))
        if self.tied:
            link.send_tied({name: embedding.get_parameter(own).detach() for name, own in self.tied.items()})
        outcomes = [
            self._run_batch(
                transport,
                replace(step, first=m * i),
                batch,
                embedding,
                link,
                i == last,
                apply_step if i == last else None,
                pace,
            )
            for i, batch in enumerate(batches)
        ]
        return functools.reduce(operator.add, outcomes)

    def _run_batch(
        self,
        transport: GlooTransport,
        step: StepId,
        batch: Batch,
        embedding: nn.Module,
        link: DecoderLink,
        is_last: bool,
        apply_step: int | None,
        pace: Pace | None,
    ) -> StepOutcome:
        """Run one batch of a step; after the last one the decoder gives the gradient of the tied matrices."""
        pieces = split_batch(batch, self.num_micro_batches)
        weight = target_weight(targets(batch))
        shared = {name: embedding.get_parameter(own) for name, own in self.tied.items()} if is_last else {}
        order = StepOrder(
            step=step,
            schedule=self.schedule,
            sizes=[len(piece["input_ids"]) for piece in pieces],
            mask_BT=batch["attention_mask"],
            width=self.width,
            carried=self.carried,
            pace=pace,
        )
        ring = [segment.device for segment in self.segments]
        reports = [self._devices[device].run.remote(order, apply_step) for device in ring]
        last = len(ring)
        embedded: list[Tensor] = []
        length = order.mask_BT.shape[1]
        shapes = [(size, length, self.width) for size in order.sizes]
        sent = [(size + self.carried, length, self.width) for size in order.sizes]

        # Receives are posted before anything moves, for the reason that run_actions gives.
        def forward() -> None:
            outputs = [transport.receive(shape, last, FORWARD, i) for i, shape in enumerate(shapes)]
            for i, piece in enumerate(pieces):
                with step.dropout(EMBEDDING_UNIT, i), autocast(self.runtime.precision, order.mask_BT.device):
                    embedded.append(embedding(piece).float())
                transport.send(embedded[i], 1, FORWARD, i)
            for i, piece in enumerate(pieces):
                link.send(step.first + i, outputs[i].wait(), piece["attention_mask"], targets(piece))

        def answer() -> tuple[float, float | None, dict[str, Tensor]]:
            loss_sum, norm_sq = 0.0, None
            for i in range(len(pieces)):
                gradient = link.receive()
                if tuple(gradient.tensor.shape) != shapes[i] or gradient.tensor.dtype != torch.float32:
                    raise LinkError(
                        f"the decoder's gradient of micro-batch {step.first + i} is {gradient.tensor.dtype} of shape "
                        f"{list(gradient.tensor.shape)}, expected float32 of {list(shapes[i])}"
                    )
                loss_sum += gradient.loss_sum
                norm_sq = gradient.norm_sq
                transport.send(gradient.tensor, last, BACKWARD, i)
            tied_gradient = link.receive_tied() if shared else {}
            try:
                check_tied({name: parameter.shape for name, parameter in shared.items()}, tied_gradient)
            except ValueError as error:
                raise LinkError(f"the decoder's gradient of the {error}") from None
            return loss_sum, norm_sq, tied_gradient

        def backward() -> None:
            received = [transport.receive(shape, 1, BACKWARD, i) for i, shape in enumerate(sent)]
            for i, receive in enumerate(received):
                gradient = receive.wait()
                # Only now is embedded[i] sure to be there: its gradient cannot arrive before it left.
                if embedded[i].requires_grad:
                    torch.autograd.backward(embedded[i], gradient)

        futures: list[Any] = [self._threads.submit(task) for task in (forward, answer, backward)]
        try:
            self._watch(futures, dict(zip(ring, reports, strict=True)))
            answers = dict(zip(ring, self._wait(reports, "ending the step"), strict=True))
            transport.flush()
        except BaseException:
            self._abandon(futures)
            raise
        loss_sum, norm_sq, tied_gradient = futures[1].result()
        # One matrix, one gradient: from here on the optimizer, and the norm that clips, see the sum of both ends.
        for name, parameter in shared.items():
            gradient = tied_gradient[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return StepOutcome(
            loss_sum=loss_sum,
            weight=weight,
            devices=answers,
            link_bytes=2 * sum(rows for rows, _, _ in sent) * length * self.codec.row_bytes(self.width),
            decoder_norm_sq=norm_sq,
        )

    def _watch(self, futures: list[Any], reports: dict[int, Any]) -> None:
        """Wait for the three threads, and look for a device that ended in the meantime."""
        pending = set(futures)
        while pending:
            done, pending = concurrent.futures.wait(
                pending, timeout=WATCH_INTERVAL_S, return_when=concurrent.futures.FIRST_EXCEPTION
            )
            failed = next((f.exception() for f in done if f.exception()), None)
            if isinstance(failed, LinkError):
                raise failed
            if failed is not None or pending:
                if (fault := device_fault(self.name, reports, failed)) is not None:
                    raise fault from failed
            if failed is not None:
                raise PipelineError(f"{self.name}: {failed}") from failed

    def _abandon(self, futures: list[Any]) -> None:
        """Free everything that waits for a step that will not complete."""
        self.disconnect()
        # The embedding's gradients are the caller's again: no thread may add to them from here on.
        concurrent.futures.wait(futures[2:], timeout=self.runtime.timeout)
        # A thread that waits on the link is the link's to free; the next step must not wait for it.
        self._threads.shutdown(wait=False)
        self._threads = _three_threads()
        for segment in self.segments:
            self._devices[segment.device].discard.remote()

    def close(self) -> None:
        """End the devices of this cluster."""
        self.disconnect()
        for actor in self._devices.values():
            ray.kill(actor)
        self._devices.clear()
        self._owner.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _three_threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(3, thread_name_prefix="pipeline")


def _joined(by_device: Mapping[int, Mapping[int, T]]) -> dict[int, T]:
    return {index: values for blocks in by_device.values() for index, values in sorted(blocks.items())}
