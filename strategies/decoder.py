"""Training the decoder of one run: who takes part in a round, the barrier of a step, and both sync modes.

``step``: one decoder for all clusters. A step is applied once, by Eq. (7), when every cluster that is still in
the round has closed it. ``round``: each cluster trains its own copy, and the copies are averaged at the round's
end. ``auto`` becomes one of them in the first round: ``step`` if all CUs are there at the same time.

Two locks: ``_state`` guards who is where and is held for moments; ``_compute`` guards torch. They nest only as
``_compute`` outside ``_state``.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from client_pipeline.link.base import Gradient
from client_pipeline.partition.parts import load_parameters, target_weight
from client_pipeline.runtime.head import Contribution, HeadTrainer
from client_pipeline.runtime.micro_batches import StepId

SYNC_MODES = ("auto", "step", "round")

# A child of Flower's logger: its lines appear among those of the server app.
logger = logging.getLogger("flwr.collapipe.decoder")


class Refusal(ValueError):
    """What a CU asked cannot be done; the message says why and goes back to the CU."""


class DecoderTimeout(Refusal):
    """Other clusters did not come in time; the message names them."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Activations and targets of one micro-batch, as a cluster sent them."""

    step: StepId
    micro_batch: int
    """From 0."""
    num_micro_batches: int
    """m of this step."""
    weight: float
    """Target tokens or samples in it."""
    total_weight: float | None
    """W_n of the whole step; on its first micro-batch only."""
    hidden_BTD: Tensor
    mask_BT: Tensor
    targets: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ClusterSummary:
    """What one cluster contributed to the decoder in a round."""

    steps: int
    """Steps that counted."""
    weight: float
    """Sum of their total weights W_n."""
    loss: float
    """Mean loss per target over these steps; NaN without any."""
    left: str | None
    """Why it left before its goodbye; None if it did not."""


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """Result of one round of the decoder."""

    round: int
    decoder_sync: str
    head: dict[str, Tensor]
    """Copies of the decoder's parameters under its own names."""
    clusters: dict[int, ClusterSummary]


class _Participant:
    """Where one cluster is in the round."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster
        self.joined = False
        self.finished = False
        self.left: str | None = None
        self.step = 1
        self.steps, self.weight, self.loss_sum = 0, 0.0, 0.0
        self.reset_step()

    def reset_step(self) -> None:
        self.next_micro_batch, self.num_micro_batches = 0, 0
        self.step_weight, self.seen_weight, self.step_loss_sum = 0.0, 0.0, 0.0

    def count_step(self) -> None:
        self.step += 1
        self.steps += 1
        self.weight += self.step_weight
        self.loss_sum += self.step_loss_sum
        self.reset_step()

    def summary(self) -> ClusterSummary:
        loss = self.loss_sum / self.weight if self.weight else math.nan
        return ClusterSummary(steps=self.steps, weight=self.weight, loss=loss, left=self.left)


class DecoderTrainer:
    """Trains the decoder on what the clusters send, round after round. Safe to call from many threads.

    Parameters
    ----------
    trainer : the decoder with its optimizer
    decoder_sync : ``auto``, ``step`` or ``round``
    join_timeout_s : how long the CUs of a round wait for each other's hello, from the first one on [s]
    step_timeout_s : how long a CU waits for the others to close a step [s]
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        decoder_sync: str = "auto",
        join_timeout_s: float = 60.0,
        step_timeout_s: float = 300.0,
    ) -> None:
        self.join_timeout_s = join_timeout_s
        self.step_timeout_s = step_timeout_s
        self._trainer = trainer
        self._copies: dict[int, HeadTrainer] = {}
        self._compute = threading.Lock()
        self._state = threading.Condition()
        self._round = 0
        self._open = False
        self._local_steps = 1
        self._participants: dict[int, _Participant] = {}
        self._first_hello: float | None = None
        self._applied = 0
        self._applying = False
        self._closed: dict[int, Contribution] = {}
        self.decoder_sync = decoder_sync

    @property
    def decoder_sync(self) -> str:
        """``auto`` until it is decided; set it to what a checkpoint says."""
        return self._sync

    @decoder_sync.setter
    def decoder_sync(self, mode: str) -> None:
        if mode not in SYNC_MODES:
            raise ValueError(f"decoder-sync: expected one of {', '.join(SYNC_MODES)}, found {mode!r}")
        self._sync = mode

    @property
    def head(self) -> nn.Module:
        """The decoder itself; between rounds only, for evaluation and loading."""
        return self._trainer.head

    def open_round(self, round_: int, clusters: Iterable[int], local_steps: int) -> None:
        """Start a round in which ``clusters`` may take part.

        Raises
        ------
        ValueError
            If a round is still open, or ``local_steps`` is below 1.
        """
        if local_steps < 1:
            raise ValueError(f"local-steps: expected at least 1, found {local_steps}")
        with self._compute, self._state:
            if self._open:
                raise ValueError(f"round {round_} of the decoder cannot start: round {self._round} is still open")
            weights = {name: p.detach() for name, p in self._trainer.parameters.items()}
            for own in self._copies.values():
                load_parameters(own.parameters, weights, "decoder")
            self._round, self._local_steps, self._open = round_, local_steps, True
            self._participants = {cluster: _Participant(cluster) for cluster in clusters}
            self._first_hello = None
            self._applied, self._applying = 0, False
            self._closed = {}

    def join(self, round_: int, cluster: int) -> str:
        """Enter the round; returns the sync mode, which the first round may have to wait for.

        Raises
        ------
        Refusal
            If the cluster is not selected, is already there, or came too late.
        """
        with self._state:
            member = self._member(round_, cluster, joined=False)
            if member.joined:
                raise Refusal(f"cluster {cluster} has already joined round {round_}")
            member.joined = True
            if self._first_hello is None:
                self._first_hello = time.monotonic()
            self._state.notify_all()
            while self._sync == "auto":
                self._decide()
                if self._sync == "auto":
                    self._state.wait(self._first_hello + self.join_timeout_s - time.monotonic())
                    self._member(round_, cluster)
            return self._sync

    def micro_batch(self, cluster: int, batch: MicroBatch) -> Gradient:
        """Run the decoder forward and backward on one micro-batch.

        Raises
        ------
        Refusal
            If it is out of order, or its tensors do not fit together, are not finite, or do not fit the decoder.
        """
        with self._state:
            member = self._member(batch.step.round, cluster)
            self._check_order(member, batch)
        check_tensors(batch)
        total_weight = batch.total_weight or member.step_weight
        with self._compute:
            with self._state:
                self._member(batch.step.round, cluster)
            trainer = self._trainer_of(cluster)
            try:
                tensor, loss_sum = trainer.gradient(
                    batch.step, batch.micro_batch, batch.hidden_BTD, batch.mask_BT, batch.targets, total_weight
                )
            except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
                raise Refusal(f"the decoder cannot take micro-batch {batch.micro_batch}: {error}"[:500]) from error
            last = batch.micro_batch == batch.num_micro_batches - 1
            norm_sq = trainer.gradient_norm_sq(cluster) if last else None
        if not (math.isfinite(loss_sum) and is_finite(tensor) and math.isfinite(norm_sq or 0.0)):
            raise Refusal(
                f"loss or gradient of micro-batch {batch.micro_batch} is not finite: training diverged; "
                "lower optimizer.lr or set optimizer.clip-norm"
            )
        with self._state:
            member.step_weight = total_weight
            member.num_micro_batches = batch.num_micro_batches
            member.next_micro_batch += 1
            member.seen_weight += batch.weight
            member.step_loss_sum += loss_sum
        return Gradient(micro_batch=batch.micro_batch, tensor=tensor, loss_sum=loss_sum, norm_sq=norm_sq)

    def close_step(self, round_: int, cluster: int, step: int, scale: float) -> None:
        """Close a cluster's step with its clipping factor; returns when the decoder has taken the step.

        Raises
        ------
        Refusal
            If the step is not the one in progress or is not complete.
        DecoderTimeout
            If other clusters did not close it within the step timeout.
        """
        with self._state:
            member = self._member(round_, cluster)
            self._check_complete(member, step, scale)
            share = Contribution(cluster=cluster, weight=member.step_weight, scale=scale)
            self._closed[cluster] = share
            self._state.notify_all()
            if self._sync == "step" and not self._wait_for_others(member, round_, step):
                return
            shares = list(self._closed.values()) if self._sync == "step" else [self._closed.pop(cluster)]
        with self._compute:
            with self._state:
                if not self._open or round_ != self._round:
                    self._member(round_, cluster)
            try:
                self._trainer_of(cluster).apply(shares, (round_ - 1) * self._local_steps + step)
            except Exception as error:
                # The others wait for this step: tell them all.
                for other in shares:
                    self.leave(round_, other.cluster, f"the decoder's step {step} failed: {error}")
                raise
            with self._state:
                for other in shares:
                    self._closed.pop(other.cluster, None)
                    self._participants[other.cluster].count_step()
                self._applied, self._applying = step, False
                self._state.notify_all()

    def finish(self, round_: int, cluster: int) -> None:
        """Note a cluster's goodbye."""
        with self._state:
            member = self._member(round_, cluster)
            if member.next_micro_batch:
                raise Refusal(f"goodbye before step {member.step} was closed")
            member.finished = True
            self._state.notify_all()

    def leave(self, round_: int, cluster: int, reason: str) -> None:
        """Take a cluster out of the round; its unclosed step does not count. Never waits for the decoder."""
        with self._state:
            member = self._participants.get(cluster)
            if self._open and round_ == self._round and member and not member.finished and member.left is None:
                member.left = reason
                logger.warning("Decoder: cluster %s left round %s: %s", cluster, round_, reason)
                self._state.notify_all()

    def finish_round(self, weights: Mapping[int, float] | None = None) -> RoundSummary:
        """Close the round and return the decoder's new weights. Whoever is still in it is refused from now on.

        Parameters
        ----------
        weights : weight of each cluster in the average of mode ``round``: those of the encoders' average. Without
            it, each cluster that stayed to the end counts by what it trained.

        Raises
        ------
        ValueError
            If no round is open, or ``weights`` names a cluster that trained no step.
        """
        with self._state:
            if not self._open:
                raise ValueError("no round of the decoder is open")
            self._open = False
            for member in self._participants.values():
                if not member.finished and member.left is None:
                    member.left = "did not finish before the round ended" if member.joined else "did not join"
            clusters = {cluster: member.summary() for cluster, member in sorted(self._participants.items())}
            self._state.notify_all()
        with self._compute:
            for cluster in clusters:
                self._trainer.discard(cluster)
                if cluster in self._copies:
                    self._copies[cluster].discard(cluster)
            if self._sync == "round":
                self._average(clusters, weights)
            head = {name: p.detach().clone() for name, p in self._trainer.parameters.items()}
        return RoundSummary(round=self._round, decoder_sync=self._sync, head=head, clusters=clusters)

    # What follows runs with ``_state`` held, or with ``_compute`` where it touches tensors.

    def _member(self, round_: int, cluster: int, joined: bool = True) -> _Participant:
        """Return a cluster that may act now."""
        if not self._open:
            raise Refusal(f"round {round_} of the decoder is not open: it ended, or has not begun")
        if round_ != self._round:
            raise Refusal(f"expected round {self._round}, found round {round_}")
        member = self._participants.get(cluster)
        if member is None:
            raise Refusal(f"cluster {cluster} is not selected in round {round_}")
        if member.left is not None or member.finished:
            raise Refusal(f"cluster {cluster} has left round {round_}: {member.left or 'it said goodbye'}")
        if joined and not member.joined:
            raise Refusal(f"cluster {cluster} has not joined round {round_}")
        return member

    def _decide(self) -> None:
        members = self._participants.values()
        assert self._first_hello is not None
        # A CU that came and went does not count: clients that run one after the other look like that.
        if all(member.joined and member.left is None for member in members):
            self._sync = "step"
            logger.info("decoder-sync auto: step, all %s CUs are there at the same time", len(members))
        elif time.monotonic() >= self._first_hello + self.join_timeout_s:
            self._sync = "round"
            late = [m.cluster for m in members if not m.joined or m.left is not None]
            logger.info("decoder-sync auto: round, clusters %s were not there in %g s", late, self.join_timeout_s)
        if self._sync != "auto":
            self._state.notify_all()

    def _check_order(self, member: _Participant, batch: MicroBatch) -> None:
        step = batch.step.step
        if step > self._local_steps:
            raise Refusal(f"a round has local-steps = {self._local_steps}, found step {step}")
        if step != member.step or member.cluster in self._closed:
            raise Refusal(f"expected step {member.step}, found step {step}")
        if batch.micro_batch != member.next_micro_batch:
            raise Refusal(f"expected micro-batch {member.next_micro_batch}, found {batch.micro_batch}")
        first = batch.micro_batch == 0
        if batch.num_micro_batches != (member.num_micro_batches or batch.num_micro_batches):
            raise Refusal(f"expected {member.num_micro_batches} micro-batches, found {batch.num_micro_batches}")
        if batch.micro_batch >= batch.num_micro_batches:
            raise Refusal(f"expected {batch.num_micro_batches} micro-batches, found one more")
        if first != (batch.total_weight is not None) or (batch.total_weight is not None and batch.total_weight <= 0):
            raise Refusal(
                "the first micro-batch of a step, and no other, carries the total weight, above 0; "
                f"found {batch.total_weight} on micro-batch {batch.micro_batch}"
            )

    def _check_complete(self, member: _Participant, step: int, scale: float) -> None:
        if step != member.step or member.cluster in self._closed:
            raise Refusal(f"expected the end of step {member.step}, found that of step {step}")
        if not member.num_micro_batches or member.next_micro_batch != member.num_micro_batches:
            raise Refusal(
                f"step {step} ended after {member.next_micro_batch} of {member.num_micro_batches} micro-batches"
            )
        if not math.isclose(member.seen_weight, member.step_weight, rel_tol=1e-6):
            raise Refusal(
                f"step {step}: the micro-batches weigh {member.seen_weight:g}, announced were {member.step_weight:g}"
            )
        if not 0 <= scale <= 1:
            raise Refusal(f"step {step}: expected a clipping factor in [0, 1], found {scale}")

    def _wait_for_others(self, member: _Participant, round_: int, step: int) -> bool:
        """Wait at the barrier; True for the one caller that has to apply the step."""
        deadline = time.monotonic() + self.step_timeout_s
        while self._applied < step:
            self._member(round_, member.cluster)
            missing = self._missing()
            if not missing and not self._applying:
                self._applying = True
                return True
            now = time.monotonic()
            if now >= deadline and not self._applying:
                raise DecoderTimeout(
                    f"cluster {', '.join(map(str, missing))} did not close step {step} of round {round_} within "
                    f"{self.step_timeout_s:g} s; raise decoder.step-timeout if it is only slow"
                )
            assert self._first_hello is not None
            join_deadline = self._first_hello + self.join_timeout_s
            wake = min(deadline, join_deadline) if join_deadline > now else deadline
            self._state.wait(max(wake - now, 0.01))
        return False

    def _missing(self) -> list[int]:
        """Clusters that the barrier waits for; those that are too late to join are taken out of the round."""
        assert self._first_hello is not None
        late = time.monotonic() >= self._first_hello + self.join_timeout_s
        missing = []
        for cluster, member in sorted(self._participants.items()):
            if late and not member.joined and member.left is None:
                self.leave(self._round, cluster, f"it did not join within {self.join_timeout_s:g} s of the first")
            if member.left is None and not member.finished and cluster not in self._closed:
                missing.append(cluster)
        return missing

    def _trainer_of(self, cluster: int) -> HeadTrainer:
        if self._sync == "step":
            return self._trainer
        if cluster not in self._copies:
            self._copies[cluster] = copy.deepcopy(self._trainer)
        return self._copies[cluster]

    def _average(self, clusters: Mapping[int, ClusterSummary], weights: Mapping[int, float] | None) -> None:
        """Average the clusters' copies into the decoder, in cluster order."""
        if weights is None:
            weights = {cluster: s.weight for cluster, s in clusters.items() if s.steps and s.left is None}
        idle = sorted(c for c in weights if c not in clusters or not clusters[c].steps)
        if idle:
            raise ValueError(f"average of the decoder: clusters {idle} have a weight but trained no step of it")
        total = sum(weights.values())
        if not total > 0:
            return  # nobody trained: the decoder stays as it is
        with torch.no_grad():
            for name, parameter in self._trainer.parameters.items():
                mean = torch.zeros_like(parameter)
                for cluster in sorted(weights):
                    mean.add_(self._copies[cluster].parameters[name], alpha=weights[cluster] / total)
                parameter.copy_(mean)


def check_tensors(batch: MicroBatch) -> None:
    """Refuse tensors that do not fit together or are not finite.

    Raises
    ------
    Refusal
        Naming the tensor, and what was expected and found.
    """
    hidden, mask = batch.hidden_BTD, batch.mask_BT
    if hidden.ndim != 3 or not hidden.is_floating_point() or 0 in hidden.shape:
        raise Refusal(f"hidden: expected floats [B, T, D], found {hidden.dtype} {list(hidden.shape)}")
    if mask.dtype != torch.bool or mask.shape != hidden.shape[:2]:
        raise Refusal(f"mask: expected bool {list(hidden.shape[:2])}, found {mask.dtype} {list(mask.shape)}")
    for name, target in batch.targets.items():
        if target.ndim < 1 or len(target) != len(hidden):
            raise Refusal(f"target.{name}: expected {len(hidden)} examples, found shape {list(target.shape)}")
    if "labels" not in batch.targets or batch.targets["labels"].dtype != torch.int64:
        raise Refusal("target.labels: expected int64 labels")
    if batch.weight != target_weight(batch.targets):
        raise Refusal(f"weight: expected {target_weight(batch.targets)} as the labels say, found {batch.weight:g}")
    if not is_finite(hidden):
        raise Refusal(f"hidden: micro-batch {batch.micro_batch} holds NaN or Inf: training diverged on the CU")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor that is not empty holds neither NaN nor Inf; one pass, as NaN is both least and largest."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)
