"""Training the decoder of one run on what the clusters send, in both sync modes.

``step``: one decoder for all clusters. A step is applied once, by Eq. (7), when every cluster that is still in
the round has closed it. ``round``: each cluster trains its own copy, and the copies are averaged at the round's
end. ``auto`` becomes one of them in the first round: ``step`` if all CUs are there at the same time.

Two locks: the round's ``state`` guards who is where and is held for moments; ``_compute`` guards torch. They nest only
as ``_compute`` outside ``state``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from client_pipeline.link.base import Gradient
from client_pipeline.partition.parts import load_parameters, tied_names
from client_pipeline.runtime.head import Contribution, HeadTrainer, check_tied
from strategies.decoder.member import (
    ClusterSummary,
    MicroBatch,
    NotFiniteRefusal,
    Refusal,
    check_values,
    is_finite,
)
from strategies.decoder.round import DecoderRound, Seat

SYNC_MODES = ("auto", "step", "round")


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
        self.decoder_sync = decoder_sync
        self._round = self._new_round(0, (), 1, {})
        self._ended: dict[int, ClusterSummary] | None = None
        """Of a round that has ended and whose weights are still to come."""

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
        """Names of each matrix that both read: the decoder's own, and the embedding's own."""
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
        with self._compute:
            if self._round.open:
                raise ValueError(
                    f"round {round_} of the decoder cannot start: round {self._round.number} is still open"
                )
            weights = {name: p.detach() for name, p in self._trainer.parameters.items()}
            for own in self._copies.values():
                load_parameters(own.parameters, weights, "decoder")
            self._round = self._new_round(round_, clusters, local_steps, tied)
            self._ended = None

    def _new_round(
        self, round_: int, clusters: Iterable[int], local_steps: int, tied: Mapping[str, Tensor]
    ) -> DecoderRound:
        return DecoderRound(
            round_,
            clusters,
            local_steps,
            tied,
            sync=self._sync,
            join_timeout_s=self.join_timeout_s,
            step_timeout_s=self.step_timeout_s,
        )

    def join(self, round_: int, cluster: int) -> Seat:
        """Enter the round; the first round may have to wait for the sync mode.

        Raises
        ------
        Refusal
            If the cluster is not selected, is already there, or came too late.
        """
        seat = self._round.join(round_, cluster)
        self._sync = seat.sync
        return seat

    def rejoin(self, round_: int, cluster: int, seat: int) -> Seat:
        """Come back with another stream after one that was cut: a step that was not closed is begun anew.

        ``seat`` is the stream's number among the cluster's.

        Raises
        ------
        Superseded
            If a newer stream of the cluster came first.
        Refusal
            If the cluster has left the round in the meantime.
        """
        with self._compute, self._round.state:
            taken = self._round.rejoin(round_, cluster, seat)
            if not taken.closed:
                self._trainer_of(cluster).discard(cluster)
            return taken

    def _begin_again(self, round_: int, cluster: int, step: int, attempt: int, seat: int | None) -> None:
        """Forget what was collected of a cluster's step if it begins the step once more."""
        with self._compute, self._round.state:
            member = self._round.member(round_, cluster, seat)
            if member.begins_again(step, attempt, waiting=cluster in self._round.closed):
                member.reset_step()
                member.attempt = attempt
                self._trainer_of(cluster).discard(cluster)

    def take_tied(
        self,
        round_: int,
        cluster: int,
        step: int,
        name: str,
        start: int,
        rows: Tensor,
        *,
        attempt: int = 0,
        seat: int | None = None,
    ) -> None:
        """Take rows of a tied matrix that a cluster's step is to compute with, from ``start`` on.

        Raises
        ------
        Refusal
            If they are not expected now, or do not fit; the message names the matrix.
        """
        self._begin_again(round_, cluster, step, attempt, seat)
        with self._round.state:
            member = self._round.member(round_, cluster, seat)
            member.take_tied(step, name, start, rows, waiting=cluster in self._round.closed)

    def tied_gradient(self, round_: int, cluster: int, seat: int | None = None) -> dict[str, Tensor]:
        """Gradient of loss_sum / W_n for the tied matrices, by the decoder's own names, after a step's last answer.

        Raises
        ------
        Refusal
            If it is not finite.
        """
        with self._compute:
            with self._round.state:
                self._round.member(round_, cluster, seat)
            gradient = self._trainer_of(cluster).tied_gradient(cluster)
        for name, value in gradient.items():
            if not is_finite(value):
                raise NotFiniteRefusal(f"gradient of the tied matrix {name} is not finite: training diverged")
        return gradient

    def micro_batch(self, cluster: int, batch: MicroBatch, seat: int | None = None) -> Gradient:
        """Run the decoder forward and backward on one micro-batch.

        Raises
        ------
        Refusal
            If it is out of order, or its tensors do not fit together, are not finite, or do not fit the decoder.
        """
        round_, step = self._round, batch.step
        self._begin_again(step.round, cluster, step.step, batch.attempt, seat)
        check_values(batch)
        # One after the other: a stream that was cut meanwhile must find its step as it was before, or after.
        with self._compute:
            with round_.state:
                member = round_.member(step.round, cluster, seat)
                member.check_order(batch, waiting=cluster in round_.closed)
                tied = member.tied_of_step()
            total_weight = batch.total_weight or member.step_weight
            gradient = self._gradient(cluster, batch, total_weight, tied)
            with round_.state:
                member.step_weight = total_weight
                member.num_micro_batches = batch.num_micro_batches
                member.next_micro_batch += 1
                member.seen_weight += batch.weight
                member.step_loss_sum += gradient.loss_sum
        return gradient

    def _gradient(self, cluster: int, batch: MicroBatch, total_weight: float, tied: Mapping[str, Tensor]) -> Gradient:
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
            raise NotFiniteRefusal(
                f"loss or gradient of micro-batch {batch.micro_batch} is not finite: training diverged; "
                "lower optimizer.lr or set optimizer.clip-norm"
            )
        return Gradient(micro_batch=batch.micro_batch, tensor=tensor, loss_sum=loss_sum, norm_sq=norm_sq)

    def close_step(self, round_: int, cluster: int, step: int, scale: float, seat: int | None = None) -> None:
        """Close a cluster's step with its clipping factor; returns when the decoder has taken the step.

        Clusters that do not close it within the step timeout are taken out of the round.

        Raises
        ------
        Refusal
            If the step is not the one in progress or is not complete.
        """
        share = self._round.share_of(round_, cluster, step, scale, seat)
        if self._sync == "step":
            self.await_step(round_, cluster, step, seat)
        else:
            self._take([share], round_, step)

    def await_step(self, round_: int, cluster: int, step: int, seat: int | None = None) -> None:
        """Wait until the decoder has taken a step that the cluster has closed."""
        if self._sync == "round":
            self._round.wait_until_taken(round_, cluster, step, seat)
        elif self._round.wait_for_others(round_, cluster, step, seat):
            self._take(list(self._round.closed.values()), round_, step)

    def _take(self, shares: list[Contribution], round_: int, step: int) -> None:
        current = self._round
        with self._compute:
            with current.state:
                if not current.open or round_ != current.number:
                    current.member(round_, shares[0].cluster)
            try:
                self._trainer_of(shares[0].cluster).apply(shares, (round_ - 1) * current.local_steps + step)
            except Exception as error:
                # The others wait for this step: tell them all.
                for other in shares:
                    current.leave(round_, other.cluster, f"the decoder's step {step} failed: {error}")
                raise
            with current.state:
                current.applied(step, shares)

    def finish(self, round_: int, cluster: int, seat: int | None = None) -> None:
        """Note a cluster's goodbye."""
        self._round.finish(round_, cluster, seat)

    def away(self, round_: int, cluster: int, seat: int) -> None:
        """Note that a cluster's stream was cut; it may come back."""
        self._round.away(round_, cluster, seat)

    def leave(self, round_: int, cluster: int, reason: str, seat: int | None = None) -> None:
        """Take a cluster out of the round; its unclosed step does not count. Never waits for the decoder."""
        self._round.leave(round_, cluster, reason, seat)

    @property
    def current(self) -> DecoderRound:
        """The round that was opened last."""
        return self._round

    def end_round(self) -> dict[int, ClusterSummary]:
        """Close the round: whoever is still in it is refused from now on. Returns what each cluster contributed.

        Raises
        ------
        ValueError
            If no round is open.
        """
        self._round.end()
        # Only now is a step that was being taken counted.
        with self._compute, self._round.state:
            self._ended = {cluster: member.summary() for cluster, member in sorted(self._round.members.items())}
        return self._ended

    def finish_round(self, weights: Mapping[int, float] | None = None) -> RoundSummary:
        """Return the decoder's new weights; closes the round if it is open.

        Parameters
        ----------
        weights : weight of each cluster in the average of mode ``round``: those of the encoders' average. Without
            it, each cluster that stayed to the end counts by what it trained.

        Raises
        ------
        ValueError
            If no round is open or has ended, or ``weights`` names a cluster that trained no step.
        """
        clusters = self.end_round() if self._ended is None else self._ended
        self._ended = None
        with self._compute:
            for cluster in clusters:
                self._trainer.discard(cluster)
                if cluster in self._copies:
                    self._copies[cluster].discard(cluster)
            if self._sync == "round":
                self._average(clusters, weights)
            head = {name: p.detach().clone() for name, p in self._trainer.parameters.items()}
        return RoundSummary(round=self._round.number, decoder_sync=self._sync, head=head, clusters=clusters)

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
