"""A round of the decoder: its members, the seats of their streams, and the barrier of a step.

A cluster that sends nothing may be planning anew for its remaining devices. While its stream is open, the others wait
for it as for a slow one, up to the step's timeout. A cluster whose stream was cut is *away*. The others wait for it at
most :data:`AWAY_S`, and it begins its step in progress anew when it returns. A control unit that vanished or was
stopped answers no gRPC keepalive, and is away after a minute. Each stream has a seat number. A stream that a newer one
of its cluster has replaced can do nothing any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from client_pipeline.link.base import Gradient
from client_pipeline.runtime.stage.decoder_update import Contribution
from strategies.decoder.copies import DecoderCopies
from strategies.decoder.member import (
    Member,
    MicroBatch,
    NotFiniteRefusal,
    Refusal,
    Superseded,
    check_values,
    is_finite,
)

# A child of Flower's logger: its lines appear among those of the server app.
logger = logging.getLogger("flwr.collapipe.decoder")

AWAY_S = 14.0
"""Longest time in which a cluster may open its cut stream again [s]."""
_SILENT = 2.0
"""Multiple of the longer of join and step timeout after which an open stream without frames is given up."""
_LOOK_S = 1.0
"""Interval at which a barrier looks for late clusters [s]."""


class Standing(NamedTuple):
    """Position of one cluster in a round, for a caller that waits for its answer."""

    place: str
    """``awaited`` (it has not joined), ``trains``, ``away`` (its stream is cut), ``finished``, ``left`` (a message
    announced it) or ``lost`` (it was too late)."""
    since: float
    """Begin of that; for ``trains``: time of its last message [s, monotonic]."""
    reason: str
    """In words."""


class DecoderRound:
    """The members of one round. Callers of a method marked *held* hold ``state``.

    Parameters
    ----------
    number : of the round; 0 before the first
    clusters : those that may take part
    local_steps : steps of each
    tied : the round's values of the tied matrices
    sync : ``step`` or ``round``
    join_timeout_s, step_timeout_s : see :class:`strategies.decoder.trainer.DecoderTrainer`
    """

    def __init__(
        self,
        number: int,
        clusters: Iterable[int],
        local_steps: int,
        tied: Mapping[str, Tensor],
        *,
        sync: str,
        join_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self.number, self.local_steps, self.sync = number, local_steps, sync
        self.join_timeout_s, self.step_timeout_s = join_timeout_s, step_timeout_s
        self.state = threading.Condition()
        self.open = number > 0
        self.members = {cluster: Member(cluster, local_steps, tied) for cluster in clusters}
        self.applied, self.applying = 0, False
        """Last step that the decoder has taken; and whether a thread has it take the next one."""
        self._opened_at = time.monotonic()
        self._first_hello: float | None = None

    def standings(self) -> dict[int, Standing]:
        """Return each cluster's standing; late clusters leave first. Never waits for the decoder."""
        with self.state:
            if self.open:
                self._expire()
            return {cluster: self._standing(member) for cluster, member in sorted(self.members.items())}

    def give_up(self, cluster: int, reason: str) -> None:
        """Take a cluster out of the round, because its answer or its silence shows that no more will come."""
        with self.state:
            if (member := self.members.get(cluster)) is not None:
                self.take_out(member, reason)

    def dismiss(self, round_: int, cluster: int, reason: str, number: int | None = None) -> None:
        """Take a cluster without a seat out of the round; with ``number`` only if that is its newest stream."""
        with self.state:
            member = self.members.get(cluster)
            if round_ == self.number and member is not None and number in (None, member.seat):
                self.take_out(member, reason)

    def _standing(self, member: Member) -> Standing:
        if member.departure is not None:
            return Standing("lost" if member.silent else "left", member.gone_at, member.departure)
        if member.finished:
            return Standing("finished", member.gone_at, "it has trained, and its update has not come")
        if not member.joined:
            return Standing("awaited", self._first_hello or self._opened_at, "it has not joined the decoder's round")
        if member.away_since is not None:
            return Standing("away", member.away_since, "its stream to the decoder broke off")
        return Standing("trains", member.heard_at, f"it is at step {member.step}")

    # Checks of a caller; held.

    def check_open(self) -> None:
        """Raise Refusal if the round is not open; held."""
        if not self.open:
            raise Refusal(f"round {self.number} of the decoder is not open: it has ended or not yet begun")

    def _selected(self, round_: int, cluster: int) -> Member:
        """Return a cluster if it may enter; held."""
        if not self.open:
            raise Refusal(f"round {round_} of the decoder is not open: it has ended or not yet begun")
        if round_ != self.number:
            raise Refusal(f"expected round {self.number}, found round {round_}")
        if (member := self.members.get(cluster)) is None:
            raise Refusal(f"cluster {cluster} is not selected in round {round_}")
        return self.admitted(member, finished_too=True)

    def admitted(self, member: Member, *, finished_too: bool = False) -> Member:
        """Return a cluster that has not left the round, and has been heard now; held."""
        if member.departure is not None or (member.finished and not finished_too):
            reason = member.departure or "it said goodbye"
            raise Refusal(f"cluster {member.cluster} has left round {self.number}: {reason}")
        member.heard_at = time.monotonic()
        return member

    # Joining and leaving.

    def join(self, round_: int, cluster: int) -> Member:
        """Let a cluster enter the round; held."""
        member = self._selected(round_, cluster)
        if member.joined:
            raise Refusal(f"cluster {cluster} has already joined round {round_}")
        member.joined = True
        if self._first_hello is None:
            self._first_hello = time.monotonic()
        self.state.notify_all()
        return member

    def rejoin(self, round_: int, cluster: int, number: int) -> Member:
        """Let a cluster enter again with another stream; held, and with the ``lock`` of the decoder's copies, too."""
        member = self._selected(round_, cluster)
        if not member.joined:
            raise Refusal(f"cluster {cluster} has not joined round {self.number}")
        if number <= member.seat:  # streams wait for the decoder together, in no order
            raise Superseded(f"cluster {cluster} has opened another stream in round {round_}")
        member.come_back(number)
        self.state.notify_all()
        return member

    def take_out(self, member: Member, reason: str, *, silent: bool = False) -> None:
        """Take a cluster out of the round; its unclosed step does not count; held. ``silent``: nothing announced it."""
        if self.open and not member.gone:
            member.leave(reason, time.monotonic(), silent=silent)
            logger.warning("Decoder: cluster %s left round %s: %s", member.cluster, self.number, reason)
            self.state.notify_all()

    def end(self) -> None:
        """Close the round; every cluster that is still in it leaves."""
        with self.state:
            if not self.open:
                raise ValueError("no round of the decoder is open")
            self.open = False
            for member in self.members.values():
                if not member.gone:
                    reason = "did not finish before the round ended" if member.joined else "did not join"
                    member.leave(reason, time.monotonic())
            self.state.notify_all()

    # The barrier.

    def count_step(self, step: int, shares: Iterable[Contribution]) -> None:
        """Count a step that the decoder has taken; held."""
        for share in shares:
            self.members[share.cluster].count_step()
        self.applied, self.applying = step, False
        self.state.notify_all()

    def missing_members(self) -> list[Member]:
        """Take late clusters out of the round; return those that the barrier still waits for."""
        self._expire()
        return [member for _, member in sorted(self.members.items()) if not member.gone and member.closed is None]

    def _expire(self) -> None:
        """Take late clusters out of the round."""
        now, away_s = time.monotonic(), min(AWAY_S, self.step_timeout_s)
        silent_s = _SILENT * max(self.join_timeout_s, self.step_timeout_s)
        for _, member in sorted(self.members.items()):
            if member.gone or member.closed is not None:
                continue
            reason = ""
            if not member.joined:
                # In mode round no cluster waits for one that joins late.
                late = self._first_hello is not None and now >= self._first_hello + self.join_timeout_s
                if late and self.sync == "step":
                    reason = f"it did not join within {self.join_timeout_s:g} s of the first"
            elif member.away_since is not None:
                if now >= member.away_since + away_s:
                    reason = f"its stream broke off and did not come back within {away_s:g} s"
            elif now >= member.heard_at + silent_s:
                reason = f"its stream has brought nothing for {silent_s:g} s"
            if reason:
                self.take_out(member, reason, silent=True)


class Seat:
    """Actions of a cluster's stream in a round. Safe to call from many threads.

    :meth:`DecoderTrainer.join <strategies.decoder.trainer.DecoderTrainer.join>` gives the first seat of a cluster, and
    ``rejoin`` the next one after a cut. The methods of the earlier seat then raise ``Superseded``. Made with the
    round's ``state`` held.

    Parameters
    ----------
    member : the cluster, which has just entered
    round_ : the round
    copies : the decoder's weights

    Example
    -------
    >>> seat = trainer.join(1, cluster=0)                        # doctest: +SKIP
    >>> gradient = seat.micro_batch(batch)                       # doctest: +SKIP
    >>> seat.close_step(1, scale=1.0)                            # doctest: +SKIP
    >>> seat.finish()                                            # doctest: +SKIP
    """

    def __init__(self, member: Member, round_: DecoderRound, copies: DecoderCopies) -> None:
        self.cluster, self.sync = member.cluster, round_.sync
        self.number = member.seat
        """Streams of the cluster before this one."""
        self.step = member.step
        """Step in progress when the stream came."""
        self.closed = member.closed is not None
        """True if the cluster had closed that step, and waited for the others."""
        self._member, self._round, self._copies = member, round_, copies

    def take_tied(self, step: int, name: str, start: int, rows: Tensor, *, attempt: int = 0) -> None:
        """Take rows of a tied matrix that the cluster's step is to compute with, from ``start`` on.

        Raises
        ------
        Refusal
            If they are not expected now, or do not fit; the message names the matrix.
        """
        self._begin_again(step, attempt)
        with self._round.state:
            self._check().take_tied(step, name, start, rows)

    def micro_batch(self, batch: MicroBatch) -> Gradient:
        """Run the decoder forward and backward on one micro-batch.

        Raises
        ------
        Refusal
            If it is out of order, or its tensors do not fit together, are not finite, or do not fit the decoder.
        """
        with self._turn(batch) as member:
            with self._round.state:
                # Only a step's first micro-batch announces W_n.
                tied, total_weight = member.tied_of_step(), batch.total_weight or member.progress.weight
            gradient = self._copies.gradient(self.cluster, self.sync, batch, total_weight, tied)
            with self._round.state:
                member.count_forward(batch, total_weight)
                member.count_gradient(gradient.loss_sum)
        return gradient

    def forward(self, batch: MicroBatch) -> Tensor:
        """Run the decoder's blocks forward on one micro-batch without labels; returns their states, [B, T, D].

        Raises
        ------
        Refusal
            As :meth:`micro_batch`.
        """
        with self._turn(batch) as member:
            states = self._copies.states(self.cluster, self.sync, batch)
            with self._round.state:
                member.count_forward(batch, batch.total_weight or member.progress.weight)
        return states

    def backward(self, step: int, micro_batch: int, gradient_BTD: Tensor, attempt: int = 0) -> Gradient:
        """Run the blocks backward on the gradient of loss_sum / W_n with respect to the states that were given.

        Raises
        ------
        Refusal
            As :meth:`micro_batch`.
        """
        self._begin_again(step, attempt)
        if not is_finite(gradient_BTD):
            raise NotFiniteRefusal(f"gradient of the states of micro-batch {micro_batch} holds NaN or Inf")
        with self._copies.lock:
            with self._round.state:
                member = self._check()
                member.check_waiting(step, micro_batch)
                is_last = micro_batch == member.progress.num_micro_batches - 1
                if attempt != member.attempt:
                    raise Refusal(f"expected attempt {member.attempt} of step {step}, found attempt {attempt}")
            gradient = self._copies.backward(self.cluster, self.sync, micro_batch, gradient_BTD, is_last=is_last)
            with self._round.state:
                member.count_gradient(gradient.loss_sum)
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
                self._check()
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
        with self._round.state:
            member = self._check()
            member.check_complete(step, scale)
            share = Contribution(cluster=self.cluster, weight=member.progress.weight, scale=scale)
            member.closed = share
            self._round.state.notify_all()
        if self.sync == "step":
            self.await_step(step)
        else:
            self._take([share], step)

    def await_step(self, step: int) -> None:
        """Wait until the decoder has taken a step that the cluster has closed, maybe on another stream."""
        if self.sync == "step":
            if shares := self._wait_for_others(step):
                self._take(shares, step)
            return
        end = time.monotonic() + self._round.step_timeout_s
        with self._round.state:
            while self._check().step <= step:
                if time.monotonic() >= end:
                    raise Refusal(f"step {step} was not taken within {self._round.step_timeout_s:g} s")
                self._round.state.wait(_LOOK_S)

    def finish(self) -> None:
        """Note the cluster's goodbye; a second one is accepted, because a cut may interrupt the first."""
        with self._round.state:
            self._check(finished_too=True).finish(time.monotonic())
            self._round.state.notify_all()

    def away(self) -> None:
        """Note that the stream was cut; the cluster may return."""
        with self._round.state:
            if self._round.open and self.number == self._member.seat and not self._member.gone:
                self._member.away_since = time.monotonic()
                logger.warning(
                    "Decoder: the stream of cluster %s was cut in round %s", self.cluster, self._round.number
                )
                self._round.state.notify_all()

    def leave(self, reason: str) -> None:
        """Take the cluster out of the round, unless it has a newer stream. Never waits for the decoder."""
        with self._round.state:
            if self.number == self._member.seat:
                self._round.take_out(self._member, reason)

    def _check(self, *, finished_too: bool = False) -> Member:
        """Return the cluster if this stream may act for it now; held.

        Raises
        ------
        Superseded
            If the cluster has opened a newer stream.
        Refusal
            If the round has ended, or the cluster has left it.
        """
        self._round.check_open()
        if self.number != self._member.seat:
            raise Superseded(f"cluster {self.cluster} has opened another stream in round {self._round.number}")
        return self._round.admitted(self._member, finished_too=finished_too)

    @contextmanager
    def _turn(self, batch: MicroBatch) -> Iterator[Member]:
        """Hold the decoder for the next micro-batch; refuse another one."""
        self._begin_again(batch.step.step, batch.attempt)
        check_values(batch)
        # One at a time: after a cut, the next stream must find its step as before this call or as after it.
        with self._copies.lock:
            with self._round.state:
                member = self._check()
                member.check_order(batch)
            yield member

    def _begin_again(self, step: int, attempt: int) -> None:
        """Forget the collected gradients of the cluster's step if it begins the step again."""
        with self._copies.lock, self._round.state:
            if self._check().begin_again(step, attempt):
                self._copies.of(self.cluster, self.sync).discard(self.cluster)

    def _wait_for_others(self, step: int) -> list[Contribution]:
        """Wait at the barrier; returns all shares to the one caller that must apply the step, else none."""
        round_ = self._round
        end = time.monotonic() + round_.step_timeout_s
        with round_.state:
            while round_.applied < step:
                self._check()
                missing_members = round_.missing_members()
                if not missing_members and not round_.applying:
                    round_.applying = True
                    return [member.closed for member in round_.members.values() if member.closed is not None]
                if missing_members and time.monotonic() >= end and not round_.applying:
                    # The missing clusters leave, and the round goes on without them.
                    for member in missing_members:
                        round_.take_out(
                            member,
                            f"it did not close step {step} within {round_.step_timeout_s:g} s of another cluster; "
                            "raise decoder.step-timeout if it is only slow",
                            silent=True,
                        )
                    continue
                round_.state.wait(min(max(end - time.monotonic(), 0.01), _LOOK_S))
            return []

    def _take(self, shares: list[Contribution], step: int) -> None:
        """Have the decoder take a step on the gradients of ``shares``."""
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
                self._round.count_step(step, shares)
