"""The control unit's end of the pipeline: its devices under a plan, and one local step over all of them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from client_pipeline.families.families import tied
from client_pipeline.families.registry import family_named
from client_pipeline.families.sliceable import check_token_slices
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.base import DecoderLink, KeepingLink
from client_pipeline.link.kept_examples import KeptExamples, split_names
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.parts import Batch, target_weight, targets
from client_pipeline.partition.plan import ClusterPlan, Segment, micro_batch_sizes
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.batch_run import BatchRun, Progress
from client_pipeline.runtime.devices.block_moves import BlockPlacement
from client_pipeline.runtime.devices.device_pool import DevicePool
from client_pipeline.runtime.devices.group import Group
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.stage import StepOrder
from client_pipeline.runtime.transport.deadline import LEAST_S, ProgressDeadline
from client_pipeline.runtime.transport.faults import PARTED, DeviceFault, PipelineError
from client_pipeline.runtime.transport.transport import TransportError
from client_pipeline.timetable.pacing import Pace

T = TypeVar("T")


class Pipeline:
    """The devices of one cluster.

    Parameters
    ----------
    name : the cluster's; its devices' actors are named after it
    spec, optimizer, runtime : what a device is made with
    placement : where the devices are
    frozen : what adapters are added to, by global name
    codec : how activations and gradients travel between the devices
    absent : devices that have no machine yet; they are lost until they come
    kept : where TEBs are run forward alone: examples whose activations the server keeps, so that no device runs for
        them; None: gradients come back

    After a :class:`DeviceFault` the caller decides on a plan for those that are left, see :meth:`give_up_silent`;
    :meth:`apply_plan` then puts all TEBs back to the last :meth:`commit`.
    """

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
        absent: Iterable[int] = (),
        kept: KeptExamples | None = None,
    ) -> None:
        self.name = name
        self.kept = kept
        self.spec = spec
        self.runtime = runtime
        self.width = family_named(spec.family).width(spec)
        self.carried = family_named(spec.family).carried_examples(spec)
        self.codec = codec
        self.tied = tied(spec)
        """Matrices that the decoder reads from the embedding: the decoder's own name and the embedding's own name."""
        self.segments: list[Segment] = []
        self.schedule = "gpipe"
        self.num_micro_batches = self.token_slices = 1
        self.pool = DevicePool(name, spec, optimizer, runtime, placement, absent)
        self.placement = BlockPlacement(self.pool, frozen or {})
        self.group = Group(self.pool, placement.host, codec.name)
        self._threads = _batch_threads()
        """Threads of all batches, one after the other."""
        self.deadline = ProgressDeadline(runtime.timeout, first_s=LEAST_S)
        """Deadline of a step's waits; it remembers over steps how long micro-batches take."""

    # The plan.

    def apply_plan(self, plan: ClusterPlan, decoder_wait_s: float = 0.0) -> None:
        """Start the devices that the plan needs and move the TEBs that change owner, with their optimizer state.

        Parameters
        ----------
        plan : the round's plan
        decoder_wait_s : longest time for which the decoder may keep a gradient back while it waits for other clusters;
            devices wait for it that much longer than for each other

        Raises
        ------
        DeviceFault
            If a device is gone; apply another plan without it.
        ValueError
            For token slices of a model that has none.
        """
        if plan.token_slices > 1:
            check_token_slices(self.spec, f"plan: token_slices = {plan.token_slices}")
        segments = plan.segments()
        self.segments = []
        if not self.placement.sure:
            # Devices leave their group when they report their TEBs: the same ring must join anew.
            self.group.leave()
        self.placement.place(segments)
        most_s = self.runtime.timeout + decoder_wait_s
        self.deadline.allow(most_s)
        self.group.join(tuple(segment.device for segment in segments), most_s)
        self.segments, self.schedule = segments, plan.schedule
        self.num_micro_batches = math.ceil(plan.m / self.runtime.fused_micro_batches)
        self.token_slices = plan.token_slices

    def give_up_silent(self) -> dict[int, str]:
        """Give up the devices that do not answer; those that do are freed from what they were doing.

        Returns
        -------
        How those were lost that are given up now, by device. :meth:`usable` says who can be planned with; one that was
        given up is among them as soon as it answers.
        """
        self.group.leave()
        self.placement.doubt()
        lost_by_device = self.pool.interrupt(self.pool.running, self.group.generation)
        for device, kind in lost_by_device.items():
            self.pool.lose(device, kind)
        return lost_by_device

    def usable(self, devices: Sequence[int]) -> list[int]:
        """Return the devices that a plan may use: all that are not lost, or have come back."""
        lost_devices = set(self.pool.lost)
        back = {device for device in lost_devices if device in devices and self.pool.is_back(device)}
        if back:
            # It may hold what was true when it was lost.
            self.placement.doubt()
        return [device for device in devices if device not in lost_devices or device in back]

    def _on_devices(self, call: Callable[[Any, int], Any], what: str) -> dict[int, Any]:
        """Call every scheduled device at once; answers by device index."""
        return self.pool.call([segment.device for segment in self.segments], call, what)

    # Weights.

    def load(self, blocks: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Give each device the round's weights of its TEBs."""
        indices = {segment.device: segment.blocks for segment in self.segments}
        # A device's weights at a time: they may be made when they are asked for.
        self._on_devices(
            lambda actor, device: actor.load.remote({i: blocks[i] for i in indices[device]}), "loading weights"
        )

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Collect the weights of all TEBs."""
        return _merged_by_block(self._on_devices(lambda actor, _: actor.weights.remote(), "collecting weights"))

    def memory(self) -> dict[int, dict[str, int]]:
        """Memory of each scheduled device, as :meth:`DeviceActor.memory` says; of its process if that is its own."""
        answers = self._on_devices(lambda actor, _: actor.memory.remote(), "asking for memory")
        if self.pool.placement.shared_actors:
            return {device: {"held_bytes": answer["held_bytes"]} for device, answer in answers.items()}
        return answers

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Collect the gradients that wait to be applied (for ``collapipe verify``)."""
        return _merged_by_block(self._on_devices(lambda actor, _: actor.gradients.remote(), "collecting gradients"))

    def status(self) -> dict[int, dict[str, Any]]:
        """Return the status of each scheduled device."""
        return self._on_devices(lambda actor, _: actor.status.remote(), "asking for status")

    def apply(self, step: int, scale: float, commits: bool = False) -> None:
        """All devices take optimizer step ``step`` with their gradients times ``scale``; ``commits`` as a step does."""
        references = {
            s.device: self.pool[s.device].apply.options(num_returns=2).remote(step, scale, commits)
            for s in self.segments
        }
        sizes = self.pool.answers({d: size for d, (size, _) in references.items()}, "taking the optimizer step")
        self._took_step(step, references, sum(sizes.values()), commits)

    def _took_step(self, step: int, answers: Mapping[int, tuple[Any, Any]], copied_bytes: int, commits: bool) -> None:
        self.placement.stepped(step)
        if commits:
            copies = {device: copies for device, (_, copies) in answers.items()}
            self.placement.commit(self.segments, copies, copied_bytes)

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
        commits: bool = False,
        pace: Pace | None = None,
        progress: Progress = lambda kind, micro_batch: None,
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
        commits : whether all TEBs are copied with that step, to be put back to it from then on
        pace : what the devices' actions take; None: as fast as they go
        progress : told of each arrival at the control unit, in the threads of the step

        Raises
        ------
        DeviceFault
            If a device died or froze: the step can be run again.
        PipelineError
            If a device failed.
        LinkError
            If the decoder refused or was too late.
        """
        if self.group.transport is None or not self.segments:
            raise PipelineError(f"{self.name}: no plan is applied")
        m, last = self.num_micro_batches, len(batches) - 1
        link.begin_step(step, m * len(batches), sum(target_weight(targets(batch)) for batch in batches))
        if self.tied:
            link.send_tied({name: embedding.get_parameter(tied_to).detach() for name, tied_to in self.tied.items()})
        outcomes = [
            self._run_batch(
                replace(step, first=m * i),
                batch,
                embedding,
                link,
                is_last=i == last,
                apply_step=apply_step if i == last else None,
                commits=commits,
                pace=pace,
                progress=progress,
            )
            for i, batch in enumerate(batches)
        ]
        return functools.reduce(operator.add, outcomes)

    def _run_batch(
        self,
        step: StepId,
        batch: Batch,
        embedding: nn.Module,
        link: DecoderLink,
        *,
        is_last: bool,
        apply_step: int | None,
        commits: bool,
        pace: Pace | None,
        progress: Progress,
    ) -> StepOutcome:
        """Run one batch of a step; after the last one the decoder gives the gradient of the tied matrices.

        No device runs for a batch whose activations the server keeps.
        """
        sizes = micro_batch_sizes(len(batch["input_ids"]), self.num_micro_batches)
        if self.kept is not None:
            names, keeping = self.kept.names(batch), cast(KeepingLink, link)
            parts = split_names(names, sizes)
            if self.kept.has(names):
                return self._recall_batch(step, batch, parts, keeping, apply_step, commits)
            for number, part in enumerate(parts):
                keeping.name_examples(step.first + number, part)
        tied_parameters = (
            {name: embedding.get_parameter(tied_to) for name, tied_to in self.tied.items()} if is_last else {}
        )
        order = StepOrder(
            step=step,
            schedule=self.schedule,
            sizes=sizes,
            mask_BT=batch["attention_mask"],
            width=self.width,
            carried=self.carried,
            # A batch of shorter texts than the planned ones has no empty slices.
            num_slices=min(self.token_slices, batch["attention_mask"].shape[1]),
            pace=pace,
            forward_only=self.kept is not None,
        )

        def arrived(kind: str, number: int) -> None:
            self.deadline.progress()
            progress(kind, number)

        transport = self.group.transport
        assert transport is not None
        self.deadline.begin()
        answers = {
            s.device: self.pool[s.device].run.options(num_returns=2).remote(order, apply_step, commits)
            for s in self.segments
        }
        reports = {device: report for device, (report, _) in answers.items()}
        run = BatchRun(
            order=order,
            batch=batch,
            embedding=embedding,
            transport=transport,
            link=link,
            tied_parameters=tied_parameters,
            precision=self.runtime.precision,
            progress=arrived,
            threads=self._threads,
        )
        try:
            answer = run.watch(self.pool, reports, self.deadline)
            devices = self.pool.answers(reports, "ending the step")
            try:
                transport.flush()
            except TransportError as error:
                # It has answered, and is gone since.
                raise DeviceFault(f"{self.pool.name}: ending the step: {error}", PARTED) from error
        except BaseException:
            self.placement.doubt()
            self.group.leave()
            run.abandon()
            # A thread may wait for a tensor that does not come.
            self._threads.shutdown(wait=False)
            self._threads = _batch_threads()
            # Devices that wait for a lost neighbour would wait for as long as a step may take.
            self.pool.interrupt(reports, self.group.generation, wait_s=0.0)
            raise
        if apply_step is not None:
            copied_bytes = sum(report.copied_bytes for report in devices.values())
            self._took_step(apply_step, answers, copied_bytes, commits)
        # One matrix, one gradient: from here on the optimizer, and the norm that clips, see the sum of both ends.
        for name, parameter in tied_parameters.items():
            gradient = answer.tied[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return StepOutcome(
            loss_sum=answer.loss_sum,
            weight=target_weight(targets(batch)),
            devices=devices,
            link_bytes=(1 if order.forward_only else 2)
            * (len(self.segments) - 1)
            * sum(size * length for size, length, _ in order.shapes())
            * self.codec.row_bytes(self.width),
            decoder_norm_sq=answer.norm_sq,
            segments=self.segments,
            sizes=order.sizes,
            exchange=answer.exchange,
        )

    def _recall_batch(
        self,
        step: StepId,
        batch: Batch,
        names: Sequence[Sequence[str]],
        link: KeepingLink,
        apply_step: int | None,
        commits: bool,
    ) -> StepOutcome:
        """Have the server train on activations that it keeps; the devices take the step without gradients."""
        weights = [target_weight(targets(piece)) for piece in split_batch(batch, len(names))]
        for number, (part, weight) in enumerate(zip(names, weights, strict=True)):
            link.recall(step.first + number, part, weight)
        losses = [link.receive_loss() for _ in names]
        if apply_step is not None:
            self.apply(apply_step, 1.0, commits)
        return StepOutcome(
            loss_sum=sum(loss_sum for _, loss_sum, _ in losses),
            weight=sum(weights),
            devices={},
            link_bytes=0,
            decoder_norm_sq=losses[-1][2],
            segments=self.segments,
            recalled=len(losses),
        )

    def close(self) -> None:
        """End the devices of this cluster."""
        self.group.leave()
        self._threads.shutdown(wait=False)
        self.pool.close()
        self.placement.doubt()


def _batch_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(3, thread_name_prefix="pipeline")


def _merged_by_block(by_device: Mapping[int, Mapping[int, T]]) -> dict[int, T]:
    return {index: values for blocks in by_device.values() for index, values in sorted(blocks.items())}
