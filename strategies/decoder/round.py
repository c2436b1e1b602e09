"""Who takes part in a round of the decoder: joining, leaving, cut streams, and the barrier of a step.

A cluster that sends nothing may be planning anew for the devices that are left: as long as its stream is open, the
others wait for it as for a slow one, up to the step's timeout. One whose stream was cut is *away*: its step in progress
is begun anew when it comes back, and it is waited for at most :data:`AWAY_S`. A control unit that vanished, or was
stopped, answers no keepalive of gRPC's, and is away after a minute. Each stream has a seat number; one that was
replaced by a newer stream of its cluster can do nothing any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from client_pipeline.runtime.head import Contribution
from strategies.decoder.member import Member, Refusal, Superseded

# A child of Flower's logger: its lines appear among those of the server app.
logger = logging.getLogger("flwr.collapipe.decoder")

AWAY_S = 18.0
"""How long a cluster whose stream was cut may take to open it again [s]."""
_SILENT = 2.0
"""A stream that is open and brings nothing is waited for this many times as long as a cluster that others wait for."""
_LOOK_S = 1.0
"""How often a barrier looks who is late [s]."""


class Seat(NamedTuple):
    """A stream's place in a round."""

    number: int
    """Streams of the cluster before this one."""
    sync: str
    """Mode of the decoder."""
    step: int
    """Step in progress."""
    closed: bool
    """Whether the cluster has closed it and waits for the others."""


class Standing(NamedTuple):
    """Where a cluster is in a round, for whoever waits for its answer."""

    place: str
    """``awaited`` (it has not joined), ``trains``, ``away`` (its stream is cut), ``finished``, ``left`` (somebody said
    so for it) or ``lost`` (it was too late)."""
    since: float
    """Since when; for ``trains``: when it was heard last [s, monotonic]."""
    reason: str
    """In words."""


class DecoderRound:
    """The members of one round. What is marked *held* is called with ``state`` held.

    Parameters
    ----------
    number : of the round; 0 before the first
    clusters : who may take part
    local_steps : steps of each
    tied : the round's values of the tied matrices
    sync : ``auto``, ``step`` or ``round``
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
        self.closed: dict[int, Contribution] = {}
        """Shares of the clusters that have closed the step in progress."""
        self._applied, self._applying = 0, False
        self._opened = time.monotonic()
        self._first_hello: float | None = None

    def standings(self) -> dict[int, Standing]:
        """Where each cluster is; those that are too late leave. Never waits for the decoder."""
        with self.state:
            if self.open:
                self._expire()
            return {cluster: self._standing(member) for cluster, member in sorted(self.members.items())}

    def give_up(self, cluster: int, reason: str) -> None:
        """Take a cluster out of the round: its answer says, or its silence, that no more is to come."""
        self.leave(self.number, cluster, reason)

    def _standing(self, member: Member) -> Standing:
        if member.left is not None:
            return Standing("lost" if member.silent else "left", member.gone_at, member.left)
        if member.finished:
            return Standing("finished", member.gone_at, "it has trained, and its update has not come")
        if not member.joined:
            return Standing("awaited", self._first_hello or self._opened, "it has not joined the decoder's round")
        if member.away_since is not None:
            return Standing("away", member.away_since, "its stream to the decoder broke off")
        return Standing("trains", member.heard_at, f"it is at step {member.step}")

    def member(self, round_: int, cluster: int, seat: int | None = None, *, joined: bool = True) -> Member:
        """Return a cluster that may act now; held.

        Raises
        ------
        Superseded
            If ``seat`` is not that of the cluster's newest stream.
        Refusal
            If it may not.
        """
        if not self.open:
            raise Refusal(f"round {round_} of the decoder is not open: it ended, or has not begun")
        if round_ != self.number:
            raise Refusal(f"expected round {self.number}, found round {round_}")
        member = self.members.get(cluster)
        if member is None:
            raise Refusal(f"cluster {cluster} is not selected in round {round_}")
        if seat is not None and seat != member.seat:
            raise Superseded(f"cluster {cluster} has opened another stream in round {round_}")
        if member.left is not None or (member.finished and joined):
            raise Refusal(f"cluster {cluster} has left round {round_}: {member.left or 'it said goodbye'}")
        if joined and not member.joined:
            raise Refusal(f"cluster {cluster} has not joined round {round_}")
        member.heard_at = time.monotonic()
        return member

    # Coming and going.

    def join(self, round_: int, cluster: int) -> Seat:
        """Enter the round; the first round may have to wait for the mode."""
        with self.state:
            member = self.member(round_, cluster, joined=False)
            if member.joined:
                raise Refusal(f"cluster {cluster} has already joined round {round_}")
            member.joined = True
            if self._first_hello is None:
                self._first_hello = time.monotonic()
            self.state.notify_all()
            while self.sync == "auto":
                self._decide(self._first_hello)
                if self.sync == "auto":
                    self.state.wait(self._first_hello + self.join_timeout_s - time.monotonic())
                    self.member(round_, cluster)
            return self._seat(member)

    def rejoin(self, round_: int, cluster: int, seat: int) -> Seat:
        """Come back with another stream; held, with the decoder's computation held, too."""
        member = self.member(round_, cluster, joined=False)
        if not member.joined:
            raise Refusal(f"cluster {cluster} has not joined round {round_}")
        if seat <= member.seat:  # they wait for the decoder together, and in no order
            raise Superseded(f"cluster {cluster} has opened another stream in round {round_}")
        member.seat = seat
        member.away_since = None
        if cluster not in self.closed and not member.finished:
            member.reset_step()
        self.state.notify_all()
        return self._seat(member)

    def _seat(self, member: Member) -> Seat:
        return Seat(member.seat, self.sync, member.step, member.cluster in self.closed)

    def away(self, round_: int, cluster: int, seat: int) -> None:
        """Note that a cluster's stream was cut; it may come back."""
        with self.state:
            member = self.members.get(cluster)
            if not (self.open and round_ == self.number and member and seat == member.seat) or member.gone:
                return
            member.away_since = time.monotonic()
            logger.warning("Decoder: the stream of cluster %s was cut in round %s", cluster, round_)
            self.state.notify_all()

    def finish(self, round_: int, cluster: int, seat: int | None) -> None:
        """Note a cluster's goodbye; again after its stream was cut in the middle of it."""
        with self.state:
            member = self.member(round_, cluster, seat, joined=False)
            if not member.joined:
                raise Refusal(f"cluster {cluster} has not joined round {round_}")
            if member.next_micro_batch:
                raise Refusal(f"goodbye before step {member.step} was closed")
            member.finished, member.gone_at = True, time.monotonic()
            self.state.notify_all()

    def leave(self, round_: int, cluster: int, reason: str, seat: int | None = None, *, silent: bool = False) -> None:
        """Take a cluster out of the round; its unclosed step does not count. Never waits for the decoder.

        ``silent``: nobody has said so for it.
        """
        with self.state:
            member = self.members.get(cluster)
            if not (self.open and round_ == self.number and member) or member.gone:
                return
            if seat is None or seat == member.seat:
                member.left, member.gone_at, member.silent = reason, time.monotonic(), silent
                logger.warning("Decoder: cluster %s left round %s: %s", cluster, round_, reason)
                self.state.notify_all()

    def end(self) -> None:
        """Close the round: whoever is still in it has left."""
        with self.state:
            if not self.open:
                raise ValueError("no round of the decoder is open")
            self.open = False
            for member in self.members.values():
                if not member.gone:
                    member.left = "did not finish before the round ended" if member.joined else "did not join"
                    member.gone_at = time.monotonic()
            self.state.notify_all()

    # The barrier.

    def share_of(self, round_: int, cluster: int, step: int, scale: float, seat: int | None) -> Contribution:
        """Close a cluster's step."""
        with self.state:
            member = self.member(round_, cluster, seat)
            member.check_complete(step, scale, waiting=cluster in self.closed)
            share = self.closed[cluster] = Contribution(cluster=cluster, weight=member.step_weight, scale=scale)
            self.state.notify_all()
            return share

    def wait_for_others(self, round_: int, cluster: int, step: int, seat: int | None) -> bool:
        """Wait at the barrier; True for the one caller that has to apply the step."""
        end = time.monotonic() + self.step_timeout_s
        with self.state:
            while self._applied < step:
                self.member(round_, cluster, seat)
                missing = self._missing()
                if not missing and not self._applying:
                    self._applying = True
                    return True
                if missing and time.monotonic() >= end and not self._applying:
                    # Those who are missing leave, and the round goes on without them.
                    for other in missing:
                        self.leave(
                            round_,
                            other,
                            f"it did not close step {step} within {self.step_timeout_s:g} s of another cluster; raise "
                            "decoder.step-timeout if it is only slow",
                            silent=True,
                        )
                    continue
                self.state.wait(min(max(end - time.monotonic(), 0.01), _LOOK_S))
            return False

    def wait_until_taken(self, round_: int, cluster: int, step: int, seat: int | None) -> None:
        """Wait for a step that another stream of the cluster has closed, and takes."""
        end = time.monotonic() + self.step_timeout_s
        with self.state:
            while self.member(round_, cluster, seat).step <= step:
                if time.monotonic() >= end:
                    raise Refusal(f"step {step} was not taken within {self.step_timeout_s:g} s")
                self.state.wait(_LOOK_S)

    def applied(self, step: int, shares: Iterable[Contribution]) -> None:
        """Count a step that the decoder has taken; held."""
        for share in shares:
            self.closed.pop(share.cluster, None)
            self.members[share.cluster].count_step()
        self._applied, self._applying = step, False
        self.state.notify_all()

    def _missing(self) -> list[int]:
        """Clusters that the barrier waits for; those that are too late in some way are taken out of the round."""
        self._expire()
        return [n for n, member in sorted(self.members.items()) if not member.gone and n not in self.closed]

    def _expire(self) -> None:
        """Take out of the round who is too late in some way."""
        now, away_s = time.monotonic(), min(AWAY_S, self.step_timeout_s)
        silent_s = _SILENT * max(self.join_timeout_s, self.step_timeout_s)
        for cluster, member in sorted(self.members.items()):
            if member.gone or cluster in self.closed:
                continue
            reason = ""
            if not member.joined:
                # Clients that run one after the other join late.
                late = self._first_hello is not None and now >= self._first_hello + self.join_timeout_s
                if late and self.sync == "step":
                    reason = f"it did not join within {self.join_timeout_s:g} s of the first"
            elif member.away_since is not None:
                if now >= member.away_since + away_s:
                    reason = f"its stream broke off and did not come back within {away_s:g} s"
            elif now >= member.heard_at + silent_s:
                reason = f"its stream has brought nothing for {silent_s:g} s"
            if reason:
                self.leave(self.number, cluster, reason, silent=True)

    def _decide(self, first_hello: float) -> None:
        members = self.members.values()
        # A CU that came and went does not count: clients that run one after the other look like that.
        if all(member.joined and member.left is None for member in members):
            self.sync = "step"
            logger.info("decoder-sync auto: step, all %s CUs are there at the same time", len(members))
        elif time.monotonic() >= first_hello + self.join_timeout_s:
            self.sync = "round"
            late = [m.cluster for m in members if not m.joined or m.left is not None]
            logger.info("decoder-sync auto: round, clusters %s were not there in %g s", late, self.join_timeout_s)
        if self.sync != "auto":
            self.state.notify_all()
