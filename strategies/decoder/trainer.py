"""Training of a run's decoder on the clusters' micro-batches, in both sync modes.

``step``: one decoder for all clusters. A step is applied once, by Eq. (7), when every cluster that is still in
the round has closed it. ``round``: each cluster trains its own copy, and the copies are averaged at the round's
end.

Two locks: the round's ``state`` guards the members and is held for moments; ``lock`` of
:class:`~strategies.decoder.copies.DecoderCopies` guards torch. They nest only as ``lock`` outside ``state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from client_pipeline.partition.parts import tied_names
from client_pipeline.runtime.stage.decoder_update import HeadTrainer, check_tied
from strategies.decoder.copies import DecoderCopies
from strategies.decoder.member import ClusterSummary
from strategies.decoder.round import DecoderRound, Seat

SYNC_MODES = ("step", "round")


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """Result of one round of the decoder."""

    round: int
    decoder_sync: str
    head: dict[str, Tensor]
    """The decoder's parameters under its own names: its own tensors, which the next round trains."""
    clusters: dict[int, ClusterSummary]


class DecoderTrainer:
    """Training of the decoder, round after round. Safe to call from many threads.

    Parameters
    ----------
    trainer : the decoder with its optimizer
    decoder_sync : ``step`` or ``round``
    join_timeout_s : longest wait of a round's CUs for each other's hello, from the first one on [s]
    step_timeout_s : longest wait of a CU for the others to close a step [s]
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        decoder_sync: str = "step",
        join_timeout_s: float = 60.0,
        step_timeout_s: float = 300.0,
    ) -> None:
        self.join_timeout_s, self.step_timeout_s = join_timeout_s, step_timeout_s
        self._timeouts = {"join_timeout_s": join_timeout_s, "step_timeout_s": step_timeout_s}
        self.copies = DecoderCopies(trainer)
        self._sync = _checked_mode(decoder_sync)
        self.current = DecoderRound(0, (), 1, {}, sync=self._sync, **self._timeouts)
        """The round that was opened last."""
        self._summaries: dict[int, ClusterSummary] | None = None
        """Summaries of an ended round whose weights are still to come."""

    @property
    def decoder_sync(self) -> str:
        """``step`` or ``round``."""
        return self._sync

    def settle_sync(self, mode: str) -> None:
        """Decide the mode, before the first round."""
        self._sync = _checked_mode(mode)

    @property
    def head(self) -> nn.Module:
        """The decoder itself; between rounds only, for evaluation and loading."""
        return self.copies.shared.head

    def state(self) -> dict[str, Tensor]:
        """Optimizer state between rounds, for a checkpoint: ``decoder/...``, and ``copy-n/...`` for each copy."""
        return self.copies.state()

    def restore(self, state: Mapping[str, Tensor], decoder_sync: str) -> None:
        """Go on from :meth:`state`, before the first round."""
        self.copies.restore(state)
        self.settle_sync(decoder_sync)

    @property
    def tied(self) -> dict[str, str]:
        """Names of each matrix that decoder and embedding share: the embedding's by the decoder's."""
        return tied_names(self.head)

    def open_round(
        self, round_: int, clusters: Iterable[int], local_steps: int, tied: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start a round in which ``clusters`` may take part.

        Parameters
        ----------
        round_ : its number
        clusters : those that may take part
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
        check_tied(self.copies.shared.tied, tied)
        with self.copies.lock:
            if self.current.open:
                raise ValueError(
                    f"round {round_} of the decoder cannot start: round {self.current.number} is still open"
                )
            self.copies.hand_out()
            self.current = DecoderRound(round_, clusters, local_steps, tied, sync=self._sync, **self._timeouts)
            self._summaries = None

    def join(self, round_: int, cluster: int) -> Seat:
        """Enter the round.

        Raises
        ------
        Refusal
            If the cluster is not selected, is already there, or came too late.
        """
        current = self.current
        with current.state:
            return Seat(current.join(round_, cluster), current, self.copies)

    def rejoin(self, round_: int, cluster: int, number: int) -> Seat:
        """Enter the round again after a cut, with another stream; an unclosed step begins anew.

        ``number`` is the stream's number among those of the cluster.

        Raises
        ------
        Superseded
            If a newer stream of the cluster came first.
        Refusal
            If the cluster has left the round in the meantime.
        """
        with self.copies.lock:
            current = self.current
            with current.state:
                seat = Seat(current.rejoin(round_, cluster, number), current, self.copies)
                if not seat.closed:
                    self.copies.of(cluster, seat.sync).discard(cluster)
                return seat

    def dismiss(self, round_: int, cluster: int, reason: str, number: int | None = None) -> None:
        """Take a cluster without a seat out of the round. Never waits for the decoder.

        With ``number``, only if its newest stream has that number.
        """
        self.current.dismiss(round_, cluster, reason, number)

    def end_round(self) -> dict[int, ClusterSummary]:
        """Close the round and return each cluster's contribution; later calls of its clusters are refused.

        Raises
        ------
        ValueError
            If no round is open.
        """
        self.current.end()
        # A step that was being taken is counted only now.
        with self.copies.lock, self.current.state:
            self._summaries = {cluster: member.summary() for cluster, member in sorted(self.current.members.items())}
        return self._summaries

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
        clusters = self.end_round() if self._summaries is None else self._summaries
        self._summaries = None
        head = self.copies.finish(clusters, self._sync, weights)
        return RoundSummary(round=self.current.number, decoder_sync=self._sync, head=head, clusters=clusters)


def _checked_mode(mode: str) -> str:
    if mode not in SYNC_MODES:
        raise ValueError(f"decoder-sync: expected one of {', '.join(SYNC_MODES)}, found {mode!r}")
    return mode
