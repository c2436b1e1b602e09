"""One order whose answer is awaited, in a thread of its own: an answer that comes slowly holds up no other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from threading import Event, Lock, Thread

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.flower_names import log

_TURN_S = 5.0
"""Time to fetch an answer, after which another is fetched beside it [s]."""
_SLOW_BYTES_S = 20e6
"""Rate at which a large answer is granted more time [byte/s]."""
_MOST_TURN_S = 60.0
"""Longest such time [s]; a slower cluster is stuck."""
_INTERNAL_ERROR, _FAILS = 500, 30
"""Internal errors in a row after which the SuperLink is asked no more."""


class FetchTurns:
    """Turns of fetching: one answer at a time, another beside a slow one, and more if both are slow.

    What is fetched is in memory, in pieces, until it has been put together.
    """

    def __init__(self) -> None:
        self._turns = (Lock(), Lock())

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Fetch within; waits for those that do, but not for ever.

        Parameters
        ----------
        num_bytes : of an answer, about
        """
        patience_s = min(_TURN_S + num_bytes / _SLOW_BYTES_S, _MOST_TURN_S)
        turn = next((turn for turn in self._turns if turn.acquire(timeout=patience_s)), None)
        try:
            yield
        finally:
            if turn is not None:
                turn.release()


class AwaitedAnswer(Thread):
    """An order whose answer is awaited.

    Parameters
    ----------
    grid : Flower's
    message_id, node_id : of the order, after it was sent; the order itself, with its weights, may go
    num_bytes : of the order's arrays, which an answer has about as many of
    activated : when the SuperNode that gets it was started, as the SuperLink says
    poll_s : between two looks [s], until :meth:`expect` says otherwise
    turns : when it may look
    ended : set when the answer is there, or an error
    """

    def __init__(
        self,
        grid: Grid,
        message_id: str,
        node_id: int,
        num_bytes: int,
        activated: str,
        poll_s: float,
        turns: FetchTurns,
        ended: Event,
    ) -> None:
        super().__init__(name="answer", daemon=True)
        self._turns, self._ended, self._num_bytes = turns, ended, num_bytes
        self.message_id, self.node_id, self.activated = message_id, node_id, activated
        self.has_come = False
        """True if the answer is there, or was."""
        self.exchange_s = 0.0
        """Time from the order to its answer, by this process's clock [s]."""
        self.error: BaseException | None = None
        self._reply: Message | None = None
        self._fails = 0
        """Errors of the SuperLink's in a row."""
        self._grid, self._poll_s = grid, poll_s
        self._is_last, self._look_now = False, Event()
        self._late: AwaitedAnswer | None = None
        """Looks again, after nobody waits any more."""
        self._began_at = time.monotonic()
        self.start()

    def run(self) -> None:
        """Look until the answer is there, whose time is noted on it, or nobody waits for it any more."""
        try:
            while True:
                self._look_now.clear()
                last = self._is_last
                reply = self._pull()
                if reply is not None:
                    self.exchange_s = time.monotonic() - self._began_at
                    self._reply, self.has_come = reply, True
                    return
                if last:
                    return
                self._look_now.wait(self._poll_s)
                if self._is_last:
                    return
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def expect(self, poll_s: float) -> None:
        """Look so often from now on, and at once if that is more often than before: the answer is on its way."""
        is_sooner, self._poll_s = poll_s < self._poll_s, poll_s
        if is_sooner:
            self._look_now.set()

    def take(self) -> Message | None:
        """Return the answer if it is there, once: nothing of it stays here."""
        reply, self._reply = self._reply, None
        return reply

    def give_up(self) -> None:
        """Look no more; an answer that is on its way is still taken."""
        self._is_last = True
        self._look_now.set()

    def look(self, seconds: float) -> bool:
        """Look again, and return whether the answer has come; takes at most twice as long [s]."""
        self.join(seconds)
        if not self.has_come and not self.is_alive():
            if self._late is None or not self._late.is_alive():
                self._late = AwaitedAnswer(
                    self._grid,
                    self.message_id,
                    self.node_id,
                    self._num_bytes,
                    self.activated,
                    0.0,
                    self._turns,
                    Event(),
                )
                self._late.give_up()
            # One that takes longer is asked for again: the SuperLink gives an answer once.
            self._late.join(seconds)
            self.has_come = self._late.has_come
        self.take()
        return self.has_come

    def _pull(self) -> Message | None:
        """Ask the SuperLink once; what it cannot do at the moment it can a moment later, or its error is raised."""
        with self._turns.held(self._num_bytes):
            try:
                reply = next(iter(self._grid.pull_messages([self.message_id])), None)
            except Exception as error:
                # Flower's client raises what its HTTP library does, and that has the response.
                status = int(getattr(getattr(error, "response", None), "status_code", 0))
                self._fails += 1
                if status < _INTERNAL_ERROR or self._fails > _FAILS:
                    raise
                log(WARNING, "could not ask the SuperLink for an answer, trying again: %s", error)
                return None
            self._fails = 0
            return reply
