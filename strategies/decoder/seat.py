"""A cluster's seat at the decoder: what one of its streams may do in one round."""

from __future__ import annotations

from torch import Tensor

from client_pipeline.link.base import Gradient
from client_pipeline.runtime.decoder_update import Contribution
from strategies.decoder.copies import DecoderCopies
from strategies.decoder.member import MicroBatch, NotFiniteRefusal, check_values, is_finite
from strategies.decoder.round import DecoderRound, Place


class Seat:
    """What a stream of a cluster does in a round. Safe to call from many threads.

    :meth:`DecoderTrainer.join <strategies.decoder.trainer.DecoderTrainer.join>` gives the first seat of a cluster, and
    ``rejoin`` the next one when its stream was cut; the seat before can do nothing any more, and raises ``Superseded``.

    Parameters
    ----------
    place : where the stream came into the round
    round_ : the round
    copies : the decoder's weights

    Example
    -------
    >>> seat = trainer.join(1, cluster=0)                        # doctest: +SKIP
    >>> gradient = seat.micro_batch(batch)                       # doctest: +SKIP
    >>> seat.close_step(1, scale=1.0)                            # doctest: +SKIP
    >>> seat.finish()                                            # doctest: +SKIP
    """

    def __init__(self, place: Place, round_: DecoderRound, copies: DecoderCopies) -> None:
        self.cluster = place.member.cluster
        self.number = place.number
        """Streams of the cluster before this one."""
        self.sync = place.sync
        """Mode of the decoder."""
        self.step = place.step
        """Step in progress when the stream came."""
        self.closed = place.closed
        """Whether the cluster had closed it, and waited for the others."""
        self._place, self._round, self._copies = place, round_, copies

    def take_tied(self, step: int, name: str, start: int, rows: Tensor, *, attempt: int = 0) -> None:
        """Take rows of a tied matrix that the cluster's step is to compute with, from ``start`` on.

        Raises
        ------
        Refusal
            If they are not expected now, or do not fit; the message names the matrix.
        """
        self._begin_again(step, attempt)
        with self._round.state:
            member = self._round.check(self._place)
            member.take_tied(step, name, start, rows, is_closed=self._round.waits(member))

    def micro_batch(self, batch: MicroBatch) -> Gradient:
        """Run the decoder forward and backward on one micro-batch.

        Raises
        ------
        Refusal
            If it is out of order, or its tensors do not fit together, are not finite, or do not fit the decoder.
        """
        self._begin_again(batch.step.step, batch.attempt)
        check_values(batch)
        # One after the other: a stream that was cut meanwhile must find its step as it was before, or after.
        with self._copies.lock:
            with self._round.state:
                member = self._round.check(self._place)
                member.check_order(batch, is_closed=self._round.waits(member))
                tied, total_weight = member.tied_of_step(), member.total_weight(batch)
            gradient = self._copies.gradient(self.cluster, self.sync, batch, total_weight, tied)
            with self._round.state:
                member.count_micro_batch(batch, total_weight, gradient.loss_sum)
        return gradient

    def tied_gradient(self) -> dict[str, Tensor]:
        """Gradient of loss_sum / W_n for the tied matrices, by the decoder's own names, after a step's last answer.

        Raises
        ------
        Refusal
            If it is not finite.
        """
        with self._copies.lock:
            with self._round.state:
                self._round.check(self._place)
            gradient = self._copies.of(self.cluster, self.sync).tied_gradient(self.cluster)
        for name, value in gradient.items():
            if not is_finite(value):
                raise NotFiniteRefusal(f"gradient of the tied matrix {name} is not finite: training diverged")
        return gradient

    def close_step(self, step: int, scale: float) -> None:
        """Close the cluster's step with its clipping factor; returns when the decoder has taken the step.

        Clusters that do not close it within the step timeout are taken out of the round.

        Raises
        ------
        Refusal
            If the step is not the one in progress or is not complete.
        """
        share = self._round.close(self._place, step, scale)
        if self.sync == "step":
            self.await_step(step)
        else:
            self._take([share], step)

    def await_step(self, step: int) -> None:
        """Wait until the decoder has taken a step that the cluster has closed."""
        if self.sync == "round":
            self._round.wait_until_taken(self._place, step)
        elif shares := self._round.wait_for_others(self._place, step):
            self._take(shares, step)

    def finish(self) -> None:
        """Note the cluster's goodbye."""
        self._round.finish(self._place)

    def away(self) -> None:
        """Note that the stream was cut; the cluster may come back."""
        self._round.away(self._place)

    def leave(self, reason: str) -> None:
        """Take the cluster out of the round; its unclosed step does not count. Never waits for the decoder."""
        self._round.leave(self._place, reason)

    def _begin_again(self, step: int, attempt: int) -> None:
        """Forget what was collected of the cluster's step if it begins the step once more."""
        with self._copies.lock, self._round.state:
            member = self._round.check(self._place)
            if member.begin_again(step, attempt, is_closed=self._round.waits(member)):
                self._copies.of(self.cluster, self.sync).discard(self.cluster)

    def _take(self, shares: list[Contribution], step: int) -> None:
        """Have the decoder take a step on what ``shares`` collected."""
        with self._copies.lock:
            with self._round.state:
                self._round.check_open()
            try:
                self._copies.apply(shares, self.sync, (self._round.number - 1) * self._round.local_steps + step)
            except Exception as error:
                # The others wait for this step: tell them all.
                for share in shares:
                    self._round.give_up(share.cluster, f"the decoder's step {step} failed: {error}")
                raise
            with self._round.state:
                self._round.applied(step, shares)
