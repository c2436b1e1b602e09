"""Steps of all requests through one pipeline: those that wait are computed together, in groups for several devices.

Shape legend: R rows of a request, T new tokens of each, K with the earlier ones, D width, V vocabulary.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from client_pipeline.runtime.stage.answering import AnswerStep, KeptRequests

_PATIENCE_S = 0.02
"""Longest wait of a group for a member that is still choosing its tokens [s]."""
_CLOSE_S = 10.0
"""Longest wait for the end of a step when the engine is closed [s]."""
_MOST_RESTARTS = 3
"""Failures in a row of a step after which its requests end."""


class Stages(Protocol):
    """The devices of a pipeline that answers."""

    @property
    def num_stages(self) -> int:
        """Devices that have TEBs."""
        ...

    def run(self, step: AnswerStep, x_RTD: Tensor) -> Future[Tensor]:
        """Pass new tokens through all TEBs, [R, T, D]; steps come in the order of the calls."""
        ...

    def drop(self, requests: Sequence[str]) -> None:
        """Forget the keys and values of requests."""
        ...

    def bring_up(self) -> None:
        """Bring all TEBs up again after a failure, without keys and values.

        Raises
        ------
        RuntimeError
            If there are too few devices: all requests end with it.
        """
        ...


class _Request:
    """A request, as the engine sees it."""

    def __init__(self, name: str, group: int) -> None:
        self.name, self.group = name, group
        self.ids_RK = torch.empty(0)
        self.mask_RK = torch.empty(0)
        self.num_new = self.last = 0
        self.order: Tensor | None = None
        self.answer: Future[Tensor] | None = None
        """Waits for the scores [R, last, V] of the step that was asked for; None: none was."""
        self.is_known = False
        """Whether the devices have its earlier tokens."""
        self.is_running = self.has_ended = False
        self.asked = self.stepped = 0.0
        """When it last asked for a step, and when its last one ended."""
        self.failures = 0

    @property
    def joins(self) -> bool:
        """Whether its step is one that is computed with those of others: a token behind known ones."""
        return self.is_known and self.num_new == 1


@dataclass
class _Running:
    """A step on the devices."""

    requests: list[_Request]
    step: AnswerStep
    future: Future[Tensor]


class Engine:
    """A model whose TEBs are elsewhere, for many requests at a time.

    Parameters
    ----------
    embedding, head : the control unit's and the server's part, in evaluation
    stages : the devices
    say : told of failures and what became of them
    """

    def __init__(
        self, embedding: Any, head: Any, stages: Stages, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._embedding, self._head, self._stages, self._say = embedding, head, stages, say
        self._kept = KeptRequests()
        """Keys and values of the server's layers."""
        self._requests: dict[str, _Request] = {}
        self._running: list[_Running] = []
        self._failure: BaseException | None = None
        """Of a step; the others come back before the devices are brought up again."""
        self._is_closed, self._reason = False, ""
        self._has_ended = threading.Event()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    # Called by requests, from any thread.

    def ask(
        self, name: str, new_RT: Tensor, mask_RK: Tensor, order: Tensor | None = None, last: int = 1
    ) -> Future[Tensor]:
        """Pass a request's next tokens through the model.

        Parameters
        ----------
        name : of the request; a new one begins it
        new_RT : the tokens
        mask_RK : True at real tokens, of earlier ones and these
        order : row that each row goes on from, where beams were chosen
        last : number of positions whose scores are wanted, from the end

        Returns
        -------
        Scores [R, last, V], to be waited for before the request asks again.

        Raises
        ------
        RuntimeError
            If the engine was closed.
        """
        answer: Future[Tensor] = Future()
        if self._is_closed:
            raise RuntimeError(self._reason)
        self._events.put(lambda: self._asked(name, new_RT, mask_RK, order, last, answer))
        if self._has_ended.is_set() and not answer.done():
            # It came behind the engine's end.
            raise RuntimeError(self._reason)
        return answer

    def end(self, name: str) -> None:
        """Forget a request."""
        self._events.put(lambda: self._ended(name))

    def close(self, reason: str = "the engine was closed") -> None:
        """End all requests with a reason, and the engine."""
        self._reason, self._is_closed = reason, True
        self._events.put(None)
        # It may wait for devices that are gone.
        self._thread.join(_CLOSE_S)

    # The engine's own thread.

    def _loop(self) -> None:
        try:
            with torch.no_grad():
                while (event := self._next_event()) is not None:
                    event()
                    self._start_steps()
        except Exception as error:  # noqa: BLE001 (whatever it is: no request may wait for an engine that has ended)
            self._reason, self._is_closed = f"the engine failed: {error!r}", True
        self._has_ended.set()
        self._fail(list(self._requests.values()), RuntimeError(self._reason))
        # What came behind the end.
        while not self._events.empty():
            if (late := self._events.get()) is not None:
                late()
        self._fail(list(self._requests.values()), RuntimeError(self._reason))

    def _next_event(self) -> Callable[[], None] | None:
        try:
            return self._events.get(timeout=_PATIENCE_S if self._waiting() else None)
        except queue.Empty:
            return lambda: None

    def _waiting(self) -> list[_Request]:
        return [request for request in self._requests.values() if request.answer and not request.is_running]

    def _asked(
        self, name: str, new_RT: Tensor, mask_RK: Tensor, order: Tensor | None, last: int, answer: Future[Tensor]
    ) -> None:
        request = self._requests.get(name)
        if request is None:
            sizes = [0] * self._stages.num_stages
            for other in self._requests.values():
                sizes[other.group % len(sizes)] += 1
            request = self._requests[name] = _Request(name, sizes.index(min(sizes)))
            request.ids_RK = new_RT[:, :0]
        earlier = request.ids_RK if order is None else request.ids_RK[order]
        request.ids_RK = torch.cat([earlier, new_RT], dim=1)
        request.mask_RK, request.order, request.last = mask_RK.bool(), order, last
        request.num_new, request.answer, request.asked = new_RT.shape[1], answer, time.monotonic()

    def _ended(self, name: str) -> None:
        if (request := self._requests.get(name)) is None:
            return
        if request.is_running:
            request.has_ended = True
            return
        del self._requests[name]
        self._kept.drop([name])
        try:
            self._stages.drop([name])
        except Exception as error:  # noqa: BLE001 (devices that are gone keep nothing; the other requests go on)
            self._say(f"a request's keys and values could not be dropped ({error!r})")

    def _start_steps(self) -> None:
        """Start what can be started: at most a step for each device."""
        if self._failure is not None:
            return
        for request in self._waiting():
            if len(self._running) >= self._stages.num_stages:
                return
            if not request.joins:
                self._start([request])
        for number in range(self._stages.num_stages):
            # After a loss there may be fewer devices than groups.
            members = [r for r in self._requests.values() if r.group % self._stages.num_stages == number and r.is_known]
            ready = [r for r in members if r.answer and r.joins and not r.is_running]
            if not ready or len(self._running) >= self._stages.num_stages or any(r.is_running for r in members):
                continue
            # Members that have just stepped have their time to choose, however long others wait: they would take turns.
            since = max(min(r.asked for r in ready), max(r.stepped for r in members))
            is_late = time.monotonic() - since > _PATIENCE_S
            if len(ready) == len(members) or is_late:
                self._start(ready)

    def _start(self, requests: list[_Request]) -> None:
        width = max(request.mask_RK.shape[1] for request in requests)
        mask_RK = torch.cat([F.pad(r.mask_RK, (width - r.mask_RK.shape[1], 0)) for r in requests])
        # A request that the devices do not know comes as a whole.
        ids_RT = torch.cat([r.ids_RK[:, -r.num_new :] if r.is_known else r.ids_RK for r in requests])
        step = AnswerStep(
            requests=tuple(r.name for r in requests),
            num_rows=tuple(len(r.ids_RK) for r in requests),
            mask_RK=mask_RK,
            order=_joined_order(requests),
        )
        for request in requests:
            request.is_running = True
        future: Future[Tensor] = Future()
        running = _Running(requests, step, future)
        self._running.append(running)
        try:
            future = self._stages.run(step, self._embedding.step(ids_RT, mask_RK))
        except Exception as error:  # noqa: BLE001 (whatever the devices or the model say ends in the step's future)
            future.set_exception(error)
        running.future = future
        future.add_done_callback(lambda _: self._events.put(lambda: self._done(running)))

    def _done(self, running: _Running) -> None:
        self._running.remove(running)
        for request in running.requests:
            request.is_running, request.stepped = False, time.monotonic()
        if (error := running.future.exception()) is not None:
            for request in running.requests:
                request.failures += 1
            self._failure = error
        elif self._failure is None:
            self._give_scores(running)
        if self._failure is not None and not self._running:
            self._restore(self._failure)
            self._failure = None
        for request in running.requests:
            if request.has_ended:
                self._ended(request.name)

    def _give_scores(self, running: _Running) -> None:
        try:
            scores = self._scores(running, running.future.result())
        except Exception as error:  # noqa: BLE001 (a request's own: the others go on)
            self._fail(running.requests, error)
            return
        for request, rows in zip(running.requests, scores.split(list(running.step.num_rows)), strict=True):
            request.is_known, request.failures = True, 0
            answer, request.answer = request.answer, None
            if answer:
                answer.set_result(rows[:, -request.last :])

    def _scores(self, running: _Running, x_RTD: Tensor) -> Tensor:
        keys = self._kept.of_step(running.step)
        last = max(request.last for request in running.requests)
        scores: Tensor = self._head.step(x_RTD, running.step.mask_RK, keys, last)
        self._kept.took(running.step, x_RTD.shape[1])
        return scores

    def _restore(self, error: BaseException) -> None:
        """Bring the devices up again; requests begin their next step with all of their tokens."""
        self._say(f"a step failed ({error}); its requests go on from their tokens")
        try:
            self._stages.bring_up()
        except RuntimeError as failure:
            self._fail(list(self._requests.values()), failure)
            return
        self._fail([request for request in self._requests.values() if request.failures > _MOST_RESTARTS], error)
        self._kept.clear()
        for request in self._requests.values():
            request.is_known, request.order = False, None

    def _fail(self, requests: Sequence[_Request], error: BaseException) -> None:
        for request in requests:
            answer, request.answer = request.answer, None
            # Before the devices forget the request: they may be gone.
            if answer:
                answer.set_exception(error)
        for request in requests:
            self._ended(request.name)


def _joined_order(requests: Sequence[_Request]) -> Tensor | None:
    """Return the order of all rows of a step; None: as they are."""
    if all(request.order is None or not request.is_known for request in requests):
        return None
    orders, first = [], 0
    for request in requests:
        number = len(request.ids_RK)
        own = torch.arange(number) if request.order is None else request.order
        orders.append(own + first)
        first += number
    return torch.cat(orders)
