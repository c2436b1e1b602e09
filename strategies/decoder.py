"""Training the decoder of one run: who takes part in a round, the barrier of a step, and both sync modes.

``step``: one decoder for all clusters. A step is applied once, by Eq. (7), when every cluster that is still in
the round has closed it. ``round``: each cluster trains its own copy, and the copies are averaged at the round's
end. ``auto`` becomes one of them in the first round: ``step`` if all CUs are there at the same time.

Two locks: ``_state`` guards who is where and is held for moments; ``_compute`` guards torch. They nest only as
``_compute`` outside ``_state``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from client_pipeline.link.base import Gradient
from client_pipeline.partition.parts import load_parameters, tied_names
from client_pipeline.runtime.head import Contribution, HeadTrainer, check_tied
from strategies.decoder_member import (
    ClusterSummary,
    Member,
    MicroBatch,
    Refusal,
    check_tensors,
    is_finite,
)

SYNC_MODES = ("auto", "step", "round")

# A child of Flower's logger: its lines appear among those of the server app.
logger = logging.getLogger("flwr.collapipe.decoder")


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """Result of one round of the decoder."""

    round: int
    decoder_sync: str
    head: dict[str, Tensor]
    """Copies of the decoder's parameters under its own names."""
    clusters: dict[int, ClusterSummary]


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
        self._members: dict[int, Member] = {}
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

    def state(self) -> dict[str, Tensor]:
        """Optimizer state between rounds, for a checkpoint: ``decoder/...``, and ``copy-n/...`` for each copy."""
        with self._compute:
            parts = {"decoder": self._trainer} | {f"copy-{n}": own for n, own in sorted(self._copies.items())}
            return {f"{p}/{key}": value for p, own in parts.items() for key, value in own.optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor], decoder_sync: str) -> None:
        """Go on from :meth:`state`, before the first round."""
        by_part: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            part, _, name = key.partition("/")
            by_part.setdefault(part, {})[name] = value
        with self._compute:
            self._trainer.optimizer.load_state(by_part.pop("decoder", {}))
            for part, values in by_part.items():
                own = self._copies[int(part.removeprefix("copy-"))] = self._trainer.copy()
                own.optimizer.load_state(values)
        self.decoder_sync = decoder_sync

    @property
    def tied(self) -> dict[str, str]:
        """The decoder's own name and the embedding's own name of each matrix that both read."""
        return tied_names(self._trainer.head)

    def open_round(
        self, round_: int, clusters: Iterable[int], local_steps: int, tied: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start a round in which ``clusters`` may take part.

        Parameters
        ----------
        round_ : its number
        clusters : who may take part
        local_steps : steps of each
        tied : the round's values of the tied matrices, by the decoder's own names

        Raises
        ------
        ValueError
            If a round is still open, ``local_steps`` is below 1, or a tied matrix is missing or of another shape.
        """
        if local_steps < 1:
            raise ValueError(f"local-steps: expected at least 1, found {local_steps}")
        # As the clusters do: the average may be of another floating type.
        tied = {name: value.to(torch.float32) for name, value in (tied or {}).items()}
        check_tied(self._trainer.tied, tied)
        with self._compute, self._state:
            if self._open:
                raise ValueError(f"round {round_} of the decoder cannot start: round {self._round} is still open")
            weights = {name: p.detach() for name, p in self._trainer.parameters.items()}
            for own in self._copies.values():
                load_parameters(own.parameters, weights, "decoder")
            self._round, self._local_steps, self._open = round_, local_steps, True
            self._members = {cluster: Member(cluster, local_steps, tied) for cluster in clusters}
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

    def take_tied(self, round_: int, cluster: int, step: int, name: str, start: int, rows: Tensor) -> None:
        """Take rows of a tied matrix that a cluster's step is to compute with, from ``start`` on.

        Raises
        ------
        Refusal
            If they are not expected now, or do not fit; the message names the matrix.
        """
        with self._state:
            member = self._member(round_, cluster)
            member.take_tied(step, name, start, rows, waiting=cluster in self._closed)

    def tied_gradient(self, round_: int, cluster: int) -> dict[str, Tensor]:
        """Gradient of loss_sum / W_n for the tied matrices, by the decoder's own names, after a step's last answer.

        Raises
        ------
        Refusal
            If it is not finite.
        """
        with self._compute:
            with self._state:
                self._member(round_, cluster)
            gradient = self._trainer_of(cluster).tied_gradient(cluster)
        for name, value in gradient.items():
            if not is_finite(value):
                raise Refusal(f"gradient of the tied matrix {name} is not finite: training diverged")
        return gradient

    def micro_batch(self, cluster: int, batch: MicroBatch) -> Gradient:
        """Run the decoder forward and backward on one micro-batch.

        Raises
        ------
        Refusal
            If it is out of order, or its tensors do not fit together, are not finite, or do not fit the decoder.
        """
        with self._state:
            member = self._member(batch.step.round, cluster)
            member.check_order(batch, waiting=cluster in self._closed)
            tied = member.tied_of_step()
        check_tensors(batch)
        total_weight = batch.total_weight or member.step_weight
        with self._compute:
            with self._state:
                self._member(batch.step.round, cluster)
            trainer = self._trainer_of(cluster)
            try:
                tensor, loss_sum = trainer.gradient(
                    batch.step, batch.micro_batch, batch.hidden_BTD, batch.mask_BT, batch.targets, total_weight, tied
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

        Clusters that do not close it within the step timeout are taken out of the round.

        Raises
        ------
        Refusal
            If the step is not the one in progress or is not complete.
        """
        with self._state:
            member = self._member(round_, cluster)
            member.check_complete(step, scale, waiting=cluster in self._closed)
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
                    self._members[other.cluster].count_step()
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
            member = self._members.get(cluster)
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
            for member in self._members.values():
                if not member.finished and member.left is None:
                    member.left = "did not finish before the round ended" if member.joined else "did not join"
            self._state.notify_all()
        with self._compute:
            with self._state:  # only now is a step that was being taken counted
                clusters = {cluster: member.summary() for cluster, member in sorted(self._members.items())}
            for cluster in clusters:
                self._trainer.discard(cluster)
                if cluster in self._copies:
                    self._copies[cluster].discard(cluster)
            if self._sync == "round":
                self._average(clusters, weights)
            head = {name: p.detach().clone() for name, p in self._trainer.parameters.items()}
        return RoundSummary(round=self._round, decoder_sync=self._sync, head=head, clusters=clusters)

    # What follows runs with ``_state`` held, or with ``_compute`` where it touches tensors.

    def _member(self, round_: int, cluster: int, joined: bool = True) -> Member:
        """Return a cluster that may act now."""
        if not self._open:
            raise Refusal(f"round {round_} of the decoder is not open: it ended, or has not begun")
        if round_ != self._round:
            raise Refusal(f"expected round {self._round}, found round {round_}")
        member = self._members.get(cluster)
        if member is None:
            raise Refusal(f"cluster {cluster} is not selected in round {round_}")
        if member.left is not None or member.finished:
            raise Refusal(f"cluster {cluster} has left round {round_}: {member.left or 'it said goodbye'}")
        if joined and not member.joined:
            raise Refusal(f"cluster {cluster} has not joined round {round_}")
        return member

    def _decide(self) -> None:
        members = self._members.values()
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

    def _wait_for_others(self, member: Member, round_: int, step: int) -> bool:
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
                # Those who are missing leave, and the round goes on without them.
                for cluster in missing:
                    self.leave(
                        round_,
                        cluster,
                        f"it did not close step {step} within {self.step_timeout_s:g} s of another cluster; raise "
                        "decoder.step-timeout if it is only slow",
                    )
                continue
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
        for cluster, member in sorted(self._members.items()):
            if late and not member.joined and member.left is None:
                self.leave(self._round, cluster, f"it did not join within {self.join_timeout_s:g} s of the first")
            if member.left is None and not member.finished and cluster not in self._closed:
                missing.append(cluster)
        return missing

    def _trainer_of(self, cluster: int) -> HeadTrainer:
        if self._sync == "step":
            return self._trainer
        if cluster not in self._copies:
            self._copies[cluster] = self._trainer.copy()
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
