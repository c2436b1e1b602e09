"""The control unit of one cluster: data, embedding and data order, and the rounds it trains on its devices.

It is an actor of its own because a ClientApp process does not outlive its message, and because in simulation any
process may serve any node.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from client_pipeline.families.families import build_embedding, build_head
from client_pipeline.families.registry import family_named
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.base import DecoderLink, LinkError
from client_pipeline.link.kept_examples import KeptExamples
from client_pipeline.link.privacy import NoiseSource, PrivateLink, private_update
from client_pipeline.link.stream import DecoderStream
from client_pipeline.link.update_codec import ErrorFeedback, update_codec
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import (
    Batch,
    block_weights,
    frozen_parameters,
    join_weights,
    load_parameters,
    own_parameters,
    part_weights,
)
from client_pipeline.runtime.control_unit import cluster_checkpoint, fault_files
from client_pipeline.runtime.control_unit.cluster_checkpoint import ClusterCheckpoint, part_state
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.control_unit.fault_injection import FaultInjector
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from client_pipeline.runtime.control_unit.own_labels import OwnLabels
from client_pipeline.runtime.control_unit.recovery import Recovery
from client_pipeline.runtime.control_unit.round_faults import RoundFaults
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder, RoundResult, TrainingData
from client_pipeline.runtime.control_unit.round_report import round_report
from client_pipeline.runtime.control_unit.spare_devices import SpareDevices
from client_pipeline.runtime.control_unit.speed import SpeedWatch
from client_pipeline.runtime.devices.life_signs import LifeSigns
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.ray.unused_actors import Watch
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer, clip_scale, copied_states, put_back_states
from client_pipeline.runtime.transport.faults import NotFinite, PipelineError
from client_pipeline.timetable.replanning import equal_devices
from client_pipeline.weights.base_weights import FrozenBase

logger = logging.getLogger("collapipe.control_unit")


class ControlUnit:
    """Trains one cluster's share of every round."""

    def __init__(self, setup: ClusterSetup) -> None:
        torch.set_num_threads(setup.runtime.threads)
        self.setup = setup
        self.watch = Watch(setup.runtime.actor_idle)
        self.adapter = family_named(setup.spec.family)
        self.num_blocks = self.adapter.num_blocks(setup.spec)
        self.data: TrainingData | None = None
        self.order: DataOrder | None = None
        base = setup.frozen.part("embedding.") if isinstance(setup.frozen, FrozenBase) else None
        self.embedding = build_embedding(setup.spec, base).train()
        if setup.spec.lora is not None and base is None:
            frozen = part_weights(setup.frozen, "embedding")
            load_parameters(frozen_parameters(self.embedding), frozen, "embedding (frozen)")
        self.parameters = own_parameters(self.embedding)
        self.optimizer = PartOptimizer(self.parameters, setup.optimizer)
        self.codec = ActivationCodec(setup.compression.activations)
        codec = update_codec(setup.compression)
        self.feedback = None if codec is None else ErrorFeedback(codec)
        self.pipeline = Pipeline(
            name=setup.actor_name,
            spec=setup.spec,
            optimizer=setup.optimizer,
            runtime=setup.runtime,
            frozen=setup.frozen,
            codec=self.codec,
            placement=setup.placement,
            absent=setup.absent,
            kept=KeptExamples() if setup.forward_only else None,
        )
        self.injector = FaultInjector(setup.faults, setup.cluster, setup.local_steps, setup.folder)
        self.faults = RoundFaults(setup.cluster, setup.folder, setup.lost_at)
        self.recovery = Recovery(self.pipeline, self.faults, self.injector.since, setup.absent)
        self.spare_devices = SpareDevices(self.pipeline.pool)
        self.noise = NoiseSource(setup.privacy.seed)
        self.speed = SpeedWatch()
        self._slow: dict[int, float] = {}
        """Devices that were found slow in this round, and by how much; and those of the last one."""
        self._slow_before: dict[int, float] = {}
        self.signs = LifeSigns(self.pipeline.pool.handles, self.faults.tell)
        self._own_head: HeadTrainer | None = None
        self.restored = False
        """True if the control unit goes on from a checkpoint of its own."""

    def prepare(self) -> dict[str, Any]:
        """Load the data, and return what the server must know before round 1.

        The constructor does not do it: an actor that fails there hides its reason from the caller.
        """
        with self.watch:
            if self.data is None:
                setup = self.setup
                data = setup.load_data()
                self.order = DataOrder(len(data), setup.batch_size, setup.seed, setup.cluster)
                if setup.checkpoints is not None and not setup.resume_round:
                    cluster_checkpoint.clear_checkpoints(setup.checkpoints)
                if setup.folder is not None and not setup.resume_round and setup.lost_at is None:
                    fault_files.forget(setup.folder)
                if setup.checkpoints is not None and setup.resume_round:
                    self._restore(setup.checkpoints, setup.resume_round)
                elif setup.resume_round:
                    logger.warning("%s: checkpoints are off: the optimizer states start afresh", setup.actor_name)
                    steps = setup.resume_round * setup.local_steps * setup.gradient_accumulation
                    self.order.go_to(steps * setup.batch_size)
                self.data = data
            counts = {
                "num_examples": len(self.data),
                "truncated": int(getattr(self.data, "truncated", 0)),
                "num_blocks": self.num_blocks,
                "restored": self.restored,
            }
            return {"cluster": self.setup.cluster, "pid": os.getpid(), **counts}

    def in_use(self) -> bool:
        """Answer at once whether a round, or the start, goes on."""
        return self.watch.busy

    def train_round(self, order: RoundOrder) -> RoundResult:
        """Train ``local-steps`` steps and return the trained weights.

        Raises
        ------
        FailedRound
            If devices or decoder do not allow it; the next round can be trained all the same.
        """
        with self.watch:
            self.prepare()
            start = time.perf_counter()
            # With one copy a round the TEBs can only be put back to its beginning.
            states = [] if self.setup.runtime.snapshots == "step" else copied_states(self._optimizers)
            link: DecoderLink | None = None
            self.faults.begin_round(order.round)
            if self.feedback is not None:
                self.feedback.settle(order.counted)
            try:
                # Hello comes first: devices take seconds to start, and the decoder waits for all clusters.
                link = self._open_link(order)
                self.faults.begin_link(link)
                with self.signs:
                    result = self._train(order, self.injector.begin_round(order.round, link), start)
            except BaseException as error:
                if link is not None:
                    # The pipeline's threads may wait on the link: break it off.
                    self.faults.tell_end()
                    link.abort()
                self._go_back(states)
                if isinstance(error, PipelineError | LinkError):
                    raise self.faults.failed_round(error) from error
                raise
            finally:
                self.injector.end_round()
            result.report["stream_bytes"] = {"up": link.bytes_up, "down": link.bytes_down}
            result.report["payload_bytes"] = {
                "up": link.payload_up,
                "down": link.payload_down,
                "update": sum(tensor.nbytes for tensor in result.weights.values()),
            }
            return result

    def _open_link(self, order: RoundOrder) -> DecoderLink:
        if order.decoder is not None:
            codec = ActivationCodec(self.setup.compression.of_stream)
            stream = DecoderStream.open(order.decoder, self.setup.certificates, codec, self.pipeline.kept)
            tail = getattr(self.embedding, "tail", None)
            privacy, precision = self.setup.privacy, self.setup.runtime.precision
            link = stream if tail is None else OwnLabels(stream, tail, precision, privacy, self.noise)
            return PrivateLink(link, privacy, self.noise) if privacy.on_activations else link
        head = self._head()
        load_parameters(head.parameters, part_weights(order.weights, "head"), "head")
        return LocalDecoder(head, self.setup.local_steps, self.setup.runtime.timeout)

    def _train(self, order: RoundOrder, link: DecoderLink, start: float) -> RoundResult:
        recovery, pipeline = self.recovery, self.pipeline
        wait_s = order.decoder.step_timeout_s if order.decoder else 0.0
        assert order.plan is not None, "the node adds a plan to an order without one"
        replan = order.replan or equal_devices(len(order.plan.delta), self.num_blocks)
        recovery.begin_round(order.plan, replan, wait_s)
        self._slow_before, self._slow = self._slow, {}
        self.speed.begin_round(self._slow_before)
        load_parameters(self.parameters, part_weights(order.weights, "embedding"), "embedding")
        recovery.run(lambda: self._load(order))
        ready_at = time.perf_counter()
        outcomes = [self._local_step(order, step, link) for step in range(1, self.setup.local_steps + 1)]
        trained = time.perf_counter()
        self.faults.tell_end()
        link.close()
        # A device that is lost from here on is missed in the next round.
        blocks = pipeline.placement.committed_blocks()
        weights = self._weights(blocks)
        if self.setup.privacy.on_updates:
            place = ("update", order.round, self.setup.cluster)
            weights = private_update(order.weights, weights, self.setup.privacy, self.noise, *place)
        if self.feedback is not None:
            weights = self.feedback.compress(order.weights, weights, order.round)
        # All steps are committed: nothing of them is lost with a device.
        recovery.begin_step(self.setup.local_steps, replayable=True)
        memory = recovery.run(pipeline.memory)
        self._checkpoint(order.round, blocks)
        if order.pace is not None:
            # Collecting and writing are no part of the model: the upload begins when the steps have ended.
            time.sleep(max(trained + order.pace.uplink_s - time.perf_counter(), 0.0))
        end = time.perf_counter()
        weight = sum(outcome.weight for outcome in outcomes)
        loss = sum(outcome.loss_sum for outcome in outcomes) / max(weight, 1)
        report = round_report(
            pipeline=pipeline,
            plan=recovery.plan,
            outcomes=outcomes,
            memory=memory,
            spare=self.spare_devices.times(),
            clock=(start, ready_at, trained, end),
            paced=order.pace is not None,
        )
        report |= {"cluster": self.setup.cluster, "num_examples": len(self.data or ()), "loss": loss}
        report["faults"] = [fault.to_dict() for fault in self.faults.end_round(recovered=True)]
        return RoundResult(
            weights=weights, weight=weight, loss=loss, steps=len(outcomes), wall_s=end - start, report=report
        )

    @property
    def _optimizers(self) -> list[PartOptimizer]:
        return [self.optimizer] if self._own_head is None else [self.optimizer, self._own_head.optimizer]

    def _load(self, order: RoundOrder) -> None:
        """Send the round's weights to the devices."""
        self.pipeline.load({i: block_weights(order.weights, i) for i in range(self.num_blocks)})

    def _go_back(self, states: list[dict[str, Tensor]]) -> None:
        """Forget the step in progress; with one copy a round, the whole round."""
        self.optimizer.discard()
        if self.setup.runtime.snapshots != "step":
            put_back_states(self._optimizers, states)
            self.pipeline.placement.doubt()

    def _arrived(self, kind: str, micro_batch: int) -> None:
        if kind == "B":
            self.faults.finished_micro_batch()
        self.faults.keep()
        if self.setup.faults.any:
            this_node = ray.get_runtime_context().get_node_id()
            all_pids = self.pipeline.pool.pids
            pids = {device: all_pids[device] for device in self.recovery.plan.devices if device in all_pids}
            self.injector.arrived(
                self.faults.step,
                kind,
                micro_batch,
                self.pipeline.num_micro_batches,
                {device: pid for device, (pid, node) in pids.items() if node == this_node},
            )

    def _head(self) -> HeadTrainer:
        if self._own_head is None:
            spec, frozen = self.setup.spec, self.setup.frozen
            if spec.lora is None:
                head = build_head(spec)
            else:
                # What the head has in common with the embedding comes once.
                tied = self.adapter.tied(spec)
                shared = {name: frozen[f"embedding.{tied_to}"] for name, tied_to in tied.items()}
                if isinstance(frozen, FrozenBase) and spec.lora.freezes_head:
                    head = build_head(spec, {**frozen.part("head."), **shared})
                else:
                    head = build_head(spec)
                    head_weights = {} if isinstance(frozen, FrozenBase) else part_weights(frozen, "head")
                    load_parameters(frozen_parameters(head), head_weights | shared, "head (frozen)")
            self._own_head = HeadTrainer(
                head, self.setup.optimizer, unit=self.num_blocks, precision=self.setup.runtime.precision
            )
        return self._own_head

    def _checkpoint(self, round_: int, blocks: Mapping[int, MovedBlock]) -> None:
        """Write the state that a continued run needs, before the server receives the round's result."""
        setup = self.setup
        if setup.checkpoints is None:
            return
        assert self.order is not None
        states = {"embedding": part_state(self.parameters, self.optimizer)}
        states |= {f"block.{i}": block for i, block in blocks.items()}
        if self._own_head is not None:
            states["head"] = part_state(self._own_head.parameters, self._own_head.optimizer)
        checkpoint = ClusterCheckpoint(round_, self.order.drawn, states, identity=setup.identity, data=setup.data)
        if (feedback := self.feedback) is not None:
            checkpoint = checkpoint._replace(
                residual=feedback.residual, pending=feedback.pending, pending_round=feedback.pending_round
            )
        cluster_checkpoint.write_checkpoint(setup.checkpoints, checkpoint, setup.checkpoint_every)

    def _restore(self, folder: Path, committed: int) -> None:
        """Go on from a checkpoint; the weights of the next round come from the server."""
        checkpoint = cluster_checkpoint.read_checkpoint(folder, committed, self.setup.identity, self.setup.data)
        if checkpoint is None:
            return
        self.restored = True
        assert self.order is not None
        self.order.go_to(checkpoint.drawn)
        # With adapters nothing of the embedding is trained, nor of the TEBs before the first that has some.
        states = defaultdict(MovedBlock, checkpoint.states)
        self.optimizer.load_state(states["embedding"].optimizer)
        self.pipeline.placement.restore({i: states[f"block.{i}"] for i in range(self.num_blocks)})
        if self.feedback is not None:
            self.feedback.restore(checkpoint.residual, checkpoint.pending, checkpoint.pending_round)
        if "head" in checkpoint.states:
            self._head().optimizer.load_state(checkpoint.states["head"].optimizer)

    def _local_step(self, order: RoundOrder, number: int, link: DecoderLink) -> StepOutcome:
        setup = self.setup
        step = StepId(seed=setup.seed, round=order.round, step=number, cluster=setup.cluster)
        assert self.data is not None and self.order is not None
        batches = [
            self.data.collate(self.order.next_batch(), step.data_seed) for _ in range(setup.gradient_accumulation)
        ]
        if number == 1:
            self.spare_devices.ask(self.recovery.plan, batches[0]["attention_mask"])
        committed = self.pipeline.placement.committed
        global_step = (order.round - 1) * setup.local_steps + number
        # Before a round's first step the TEBs have its weights, and the optimizer states of the last commit.
        first = committed <= global_step - number
        self.recovery.begin_step(number, replayable=number == 1 or committed == global_step - 1)
        outcome, scale = self.recovery.run(
            lambda: self._attempt(order, step, batches, global_step, link),
            (lambda: self._load(order)) if first else (lambda: None),
        )
        # The step is committed: nothing of it will be run again.
        link.end_step(scale)
        self.optimizer.apply(global_step, scale)
        if number < setup.local_steps:
            self._look_for_slow_ones(outcome, setup.local_steps - number)
        return outcome

    def _look_for_slow_ones(self, outcome: StepOutcome, steps_left: int) -> None:
        """Give a device that has become slow less to do from the next step on, where that pays within the round."""
        slow = self.speed.observe(outcome.devices)
        if slow and self.recovery.relief_pays(self._slow | slow, outcome, steps_left):
            known = self._slow.keys() | self._slow_before.keys()
            self._slow |= slow
            self.recovery.unburden(self._slow, known)

    def _attempt(
        self, order: RoundOrder, step: StepId, batches: Sequence[Batch], global_step: int, link: DecoderLink
    ) -> tuple[StepOutcome, float]:
        """One local step up to its commit: what happened, and the clipping factor. Leaves nothing if it fails."""
        setup, clip = self.setup, self.setup.optimizer.clip_norm
        commits = setup.runtime.snapshots == "step" or step.step == setup.local_steps
        try:
            outcome = self.pipeline.run_step(
                step,
                batches,
                self.embedding,
                link,
                apply_step=None if clip > 0 else global_step,
                commits=commits,
                pace=order.pace.moved(order.plan, self.recovery.plan) if order.pace and order.plan else None,
                progress=self._arrived,
            )
            norm_sq = self.optimizer.gradient_norm_sq() + (outcome.decoder_norm_sq or 0.0)
            norm_sq += sum(report.norm_sq for report in outcome.devices.values())
            if not math.isfinite(norm_sq):
                raise NotFinite("the embedding's gradient holds NaN or Inf: training diverged; lower optimizer.lr")
            scale = clip_scale(clip, norm_sq)
            if clip > 0:
                self.pipeline.apply(global_step, scale, commits)
        except BaseException:
            link.drop_step()
            self.optimizer.discard()
            # Devices may have unused gradients, or have taken a step that others have not.
            self.pipeline.placement.doubt()
            raise
        return outcome, scale

    def _weights(self, blocks: Mapping[int, MovedBlock]) -> dict[str, Tensor]:
        embedding = {name: p.detach().clone() for name, p in self.parameters.items()}
        head = None
        if self._own_head is not None:
            head = {name: p.detach().clone() for name, p in self._own_head.parameters.items()}
        return join_weights(embedding, {i: block.weights for i, block in blocks.items()}, head)

    def close(self) -> None:
        """End the cluster's devices."""
        self.pipeline.close()
