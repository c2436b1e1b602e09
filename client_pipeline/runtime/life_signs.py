"""Devices are asked all through a round whether they are there, not only when a wait for them is overdue.

Nothing follows from it but news: who is given up, and when, the waits decide, which know how long a step may take.

Processes are asked, not devices: many devices may share one, and the control units of many clusters another, whose
questions would take more of the processor than the training does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_pipeline.link.cluster_news import ENDED, SILENT, LifeSign
from client_pipeline.runtime.frozen_devices import who_answered
from client_pipeline.runtime.shared_actor import process_of

LOOK_S = 0.25
"""How often a process is asked [s]."""
SILENT_AFTER_S = 0.7
"""How long an answer may take until it is told [s]: a busy machine takes its time."""
_MOST_DEVICES = 64
_OLD_S = 60.0
"""After what time a question that is over is forgotten [s]."""


@dataclass
class _Question:
    sign: Any
    asked_at: float
    """[s, monotonic]"""
    answered: bool = False
    ended: bool = False

    def look(self) -> None:
        """See whether an answer has come; the process has ended if that is what it says."""
        if not (self.answered or self.ended) and (signs := who_answered({0: self.sign})):
            self.answered, self.ended = signs[0], not signs[0]


_asking = threading.Lock()
_questions: dict[Any, _Question] = {}
"""The last one that this process has asked of each other, whichever cluster it was for."""


def _ask(process: Any, now: float) -> _Question:
    """Ask a process whether it is there, unless a question waits or was answered just now."""
    with _asking:
        question = _questions.get(process)
        if question is not None:
            question.look()
        if question is None or (question.answered and now - question.asked_at >= LOOK_S):
            for old in [p for p, q in _questions.items() if now - q.asked_at > _OLD_S and (q.answered or q.ended)]:
                del _questions[old]
            question = _questions[process] = _Question(process.alive.remote(), now)
        return question


class LifeSigns:
    """Asks, on a thread of its own, while a round goes on.

    Parameters
    ----------
    handles : the actors of the devices that run, by device
    tell : called after each look with those that give no sign
    """

    def __init__(self, handles: Callable[[], Mapping[int, Any]], tell: Callable[[Sequence[LifeSign]], None]) -> None:
        self._handles, self._tell = handles, tell
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LifeSigns:
        """Begin to ask."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="life-signs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask no more."""
        self._over.set()
        if self._thread is not None:
            # A server that does not answer holds it up for a moment.
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._tell(self.look())

    def look(self) -> list[LifeSign]:
        """Ask who has answered since, and return who has not."""
        now = time.monotonic()
        processes = {device: process_of(actor) for device, actor in list(self._handles().items())[:_MOST_DEVICES]}
        questions = {process: _ask(process, now) for process in set(processes.values())}
        return [
            LifeSign(device, ENDED if q.ended else SILENT, round(now - q.asked_at, 1))
            for device, q in sorted((device, questions[process]) for device, process in processes.items())
            if q.ended or (not q.answered and now - q.asked_at >= SILENT_AFTER_S)
        ]
