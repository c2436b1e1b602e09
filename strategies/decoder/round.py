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

from client_pipeline.runtime.decoder_update import Contribution
from strategies.decoder.member import Member, Refusal, Superseded
from strategies.grid.standing import Standing

# A child of Flower's logger: its lines appear among those of the server app.
logger = logging.getLogger("flwr.collapipe.decoder")

AWAY_S = 14.0
"""How long a cluster whose stream was cut may take to open it again [s]."""
_SILENT = 2.0
"""A stream that is open and brings nothing is waited for this many times as long as a cluster that others wait for."""
_LOOK_S = 1.0
"""How often a barrier looks who is late [s]."""


class Place(NamedTuple):
    """Where a stream of a cluster came into a round."""

    member: Member
    number: int
    """Streams of the cluster before this one."""
    sync: str
    """Mode of the decoder."""
    step: int
    """Step in progress."""
    closed: bool
    """Whether the cluster has closed it and waits for the others."""


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
        self._opened_at = time.monotonic()
        self._first_hello: float | None = None

    def standings(self) -> dict[int, Standing]:
        """Where each cluster is; those that are too late leave. Never waits for the decoder."""
        with self.state:
            if self.open:
                self._expire()
            return {cluster: self._standing(member) for cluster, member in sorted(self.members.items())}

    def give_up(self, cluster: int, reason: str) -> None:
        """Take a cluster out of the round: its answer says, or its silence, that no more is to come."""
        with self.state:
            if (member := self.members.get(cluster)) is not None:
                self._take_out(member, reason)

    def dismiss(self, round_: int, cluster: int, reason: str, number: int | None = None) -> None:
        """Take a cluster out of the round that has no seat in it; with ``number`` only if that is its newest stream."""
        with self.state:
            member = self.members.get(cluster)
            if round_ == self.number and member is not None and number in (None, member.seat):
                self._take_out(member, reason)

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

    # Who may act; held.

    def check_open(self) -> None:
        """Refuse whatever comes when the round has ended; held."""
        if not self.open:
            raise Refusal(f"round {self.number} of the decoder is not open: it has ended or not yet begun")

    def check(self, place: Place) -> Member:
        """Return the cluster of a place, which may act now; held.

        Raises
        ------
        Superseded
            If the cluster has opened a newer stream.
        Refusal
            If the round has ended, or the cluster has left it.
        """
        self.check_open()
        if place.number != place.member.seat:
            raise Superseded(f"cluster {place.member.cluster} has opened another stream in round {self.number}")
        return self._admitted(place.member)

    def waits(self, member: Member) -> bool:
        """Whether a cluster has closed the step in progress and waits for the others; held."""
        return member.cluster in self.closed

    def _selected(self, round_: int, cluster: int) -> Member:
        """Return a cluster that may come in; held."""
        if not self.open:
            raise Refusal(f"round {round_} of the decoder is not open: it has ended or not yet begun")
        if round_ != self.number:
            raise Refusal(f"expected round {self.number}, found round {round_}")
        if (member := self.members.get(cluster)) is None:
            raise Refusal(f"cluster {cluster} is not selected in round {round_}")
        return self._admitted(member, finished_too=True)

    def _admitted(self, member: Member, *, finished_too: bool = False) -> Member:
        if member.departure is not None or (member.finished and not finished_too):
            reason = member.departure or "it said goodbye"
            raise Refusal(f"cluster {member.cluster} has left round {self.number}: {reason}")
        member.hear(time.monotonic())
        return member

    # Coming and going.

    def join(self, round_: int, cluster: int) -> Place:
        """Enter the round; the first round may have to wait for the mode."""
        with self.state:
            member = self._selected(round_, cluster)
            if member.joined:
                raise Refusal(f"cluster {cluster} has already joined round {round_}")
            member.join()
            if self._first_hello is None:
                self._first_hello = time.monotonic()
            self.state.notify_all()
            while self.sync == "auto":
                self._decide(self._first_hello)
                if self.sync == "auto":
                    self.state.wait(self._first_hello + self.join_timeout_s - time.monotonic())
                    self.check_open()
                    self._admitted(member)
            return self._place(member)

    def rejoin(self, round_: int, cluster: int, number: int) -> Place:
        """Come back with another stream; held, with the decoder's computation held, too."""
        member = self._check_joined(self._selected(round_, cluster))
        if number <= member.seat:  # they wait for the decoder together, and in no order
            raise Superseded(f"cluster {cluster} has opened another stream in round {round_}")
        member.come_back(number, closed=self.waits(member))
        self.state.notify_all()
        return self._place(member)

    def _check_joined(self, member: Member) -> Member:
        if not member.joined:
            raise Refusal(f"cluster {member.cluster} has not joined round {self.number}")
        return member

    def _place(self, member: Member) -> Place:
        return Place(member, member.seat, self.sync, member.step, self.waits(member))

    def away(self, place: Place) -> None:
        """Note that a cluster's stream was cut; it may come back."""
        with self.state:
            member = place.member
            if not self.open or place.number != member.seat or member.gone:
                return
            member.go_away(time.monotonic())
            logger.warning("Decoder: the stream of cluster %s was cut in round %s", member.cluster, self.number)
            self.state.notify_all()

    def finish(self, place: Place) -> None:
        """Note a cluster's goodbye; again after its stream was cut in the middle of it."""
        with self.state:
            self.check_open()
            if place.number != place.member.seat:
                raise Superseded(f"cluster {place.member.cluster} has opened another stream in round {self.number}")
            self._admitted(place.member, finished_too=True).finish(time.monotonic())
            self.state.notify_all()

    def leave(self, place: Place, reason: str) -> None:
        """Take a cluster out of the round, if the place is that of its newest stream. Never waits for the decoder."""
        with self.state:
            if place.number == place.member.seat:
                self._take_out(place.member, reason)

    def _take_out(self, member: Member, reason: str, *, silent: bool = False) -> None:
        """Take a cluster out of the round; its unclosed step does not count. ``silent``: nobody has said so for it."""
        if self.open and not member.gone:
            member.leave(reason, time.monotonic(), silent=silent)
            logger.warning("Decoder: cluster %s left round %s: %s", member.cluster, self.number, reason)
            self.state.notify_all()

    def end(self) -> None:
        """Close the round: whoever is still in it has left."""
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

    def close(self, place: Place, step: int, scale: float) -> Contribution:
        """Close a cluster's step."""
        with self.state:
            member = self.check(place)
            member.check_complete(step, scale, is_closed=self.waits(member))
            share = Contribution(cluster=member.cluster, weight=member.step_weight, scale=scale)
            self.closed[member.cluster] = share
            self.state.notify_all()
            return share

    def wait_for_others(self, place: Place, step: int) -> list[Contribution]:
        """Wait at the barrier; returns all shares to the one caller that has to apply the step, else none."""
        end = time.monotonic() + self.step_timeout_s
        with self.state:
            while self._applied < step:
                self.check(place)
                missing_members = self._missing_members()
                if not missing_members and not self._applying:
                    self._applying = True
                    return list(self.closed.values())
                if missing_members and time.monotonic() >= end and not self._applying:
                    # Those who are missing leave, and the round goes on without them.
                    for member in missing_members:
                        self._take_out(
                            member,
                            f"it did not close step {step} within {self.step_timeout_s:g} s of another cluster; raise "
                            "decoder.step-timeout if it is only slow",
                            silent=True,
                        )
                    continue
                self.state.wait(min(max(end - time.monotonic(), 0.01), _LOOK_S))
            return []

    def wait_until_taken(self, place: Place, step: int) -> None:
        """Wait for a step that another stream of the cluster has closed, and takes."""
        end = time.monotonic() + self.step_timeout_s
        with self.state:
            while self.check(place).step <= step:
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

    def _missing_members(self) -> list[Member]:
        """Clusters that the barrier waits for; those that are too late in some way are taken out of the round."""
        self._expire()
        return [member for _, member in sorted(self.members.items()) if not member.gone and not self.waits(member)]

    def _expire(self) -> None:
        """Take out of the round who is too late in some way."""
        now, away_s = time.monotonic(), min(AWAY_S, self.step_timeout_s)
        silent_s = _SILENT * max(self.join_timeout_s, self.step_timeout_s)
        for _, member in sorted(self.members.items()):
            if member.gone or self.waits(member):
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
                self._take_out(member, reason, silent=True)

    def _decide(self, first_hello: float) -> None:
        members = self.members.values()
        # A CU that came and went does not count: clients that run one after the other look like that.
        if all(member.joined and member.departure is None for member in members):
            self.sync = "step"
            logger.info("decoder-sync auto: step, all %s CUs are there at the same time", len(members))
        elif time.monotonic() >= first_hello + self.join_timeout_s:
            self.sync = "round"
            late = [m.cluster for m in members if not m.joined or m.departure is not None]
            logger.info("decoder-sync auto: round, clusters %s were not there in %g s", late, self.join_timeout_s)
        if self.sync != "auto":
            self.state.notify_all()
