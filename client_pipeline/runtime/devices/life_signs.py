"""Life signs of the devices during a round.

They are news for the server alone. The waits of a step decide which device is given up.

Processes are asked, not devices: many devices may share one process, and control units of many clusters another. A
question for each pair would take more of the processor than the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_pipeline.link.cluster_news import ENDED, SILENT, LifeSign
from client_pipeline.runtime.devices.frozen_devices import errors_of_answers
from client_pipeline.runtime.devices.shared_actor import process_of

LOOK_S = 0.25
"""Interval between two questions to a process [s]."""
SILENT_AFTER_S = 0.7
"""Wait for an answer before the device counts as silent [s]: a busy machine takes its time."""
_MOST_DEVICES = 64
_OLD_S = 60.0
"""Age at which an answered question is forgotten [s]."""


@dataclass
class _Question:
    sign: Any
    asked_at: float
    """[s, monotonic]"""
    answered: bool = False
    ended: bool = False

    def look(self) -> None:
        """Look for the answer, which may be that the process has ended."""
        if not (self.answered or self.ended) and (errors := errors_of_answers({0: self.sign}, 0.0)):
            self.answered, self.ended = errors[0] is None, errors[0] is not None


_asking = threading.Lock()
_questions: dict[Any, _Question] = {}
"""Last question of this process to each other process, for whichever cluster."""


def _ask(process: Any, now: float) -> _Question:
    """Ask a process for a sign, unless a question waits or was answered just now."""
    with _asking:
        question = _questions.get(process)
        if question is not None:
            question.look()
        if question is None or (question.answered and now - question.asked_at >= LOOK_S):
            for old in [p for p, q in _questions.items() if now - q.asked_at > _OLD_S and q.answered]:
                del _questions[old]
            question = _questions[process] = _Question(process.alive.remote(), now)
        return question


class LifeSigns:
    """A thread that asks for life signs while a round goes on.

    Parameters
    ----------
    handles : the actors of the devices that run, by device
    tell : called after each look with the devices that give no sign
    """

    def __init__(self, handles: Callable[[], Mapping[int, Any]], tell: Callable[[Sequence[LifeSign]], None]) -> None:
        self._handles, self._tell = handles, tell
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LifeSigns:
        """Start the thread."""
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="life-signs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread."""
        self._over.set()
        if self._thread is not None:
            # A server that does not answer holds it up for a moment.
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._tell(self.look())

    def look(self) -> list[LifeSign]:
        """Ask again, and return the devices that have not answered."""
        now = time.monotonic()
        processes = {device: process_of(actor) for device, actor in list(self._handles().items())[:_MOST_DEVICES]}
        questions = {process: _ask(process, now) for process in set(processes.values())}
        return [
            LifeSign(device, ENDED if q.ended else SILENT, round(now - q.asked_at, 1))
            for device, q in sorted((device, questions[process]) for device, process in processes.items())
            if q.ended or (not q.answered and now - q.asked_at >= SILENT_AFTER_S)
        ]
