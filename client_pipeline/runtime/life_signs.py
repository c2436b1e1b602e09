"""Devices are asked all through a round whether they are there, not only when a wait for them is overdue.

Nothing follows from it but news: who is given up, and when, the waits decide, which know how long a step may take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client_pipeline.link.cluster_news import ENDED, SILENT, LifeSign
from client_pipeline.runtime.frozen_devices import who_answered

LOOK_S = 0.25
"""How often devices are asked [s]."""
SILENT_AFTER_S = 0.7
"""How long an answer may take until it is told [s]: a busy machine takes its time."""
_MOST_DEVICES = 64


@dataclass
class _Question:
    actor: Any
    sign: Any
    asked_at: float
    """[s, monotonic]"""
    ended: bool = False


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
        self._questions: dict[int, _Question] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LifeSigns:
        """Begin to ask."""
        self._over.clear()
        self._questions.clear()
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
        handles, now = dict(list(self._handles().items())[:_MOST_DEVICES]), time.monotonic()
        questions = {d: q for d, q in self._questions.items() if handles.get(d) is q.actor}
        answered = who_answered({device: q.sign for device, q in questions.items() if not q.ended})
        for device, is_there in answered.items():
            if is_there:
                del questions[device]
            else:
                questions[device].ended = True
        for device in handles.keys() - questions.keys():
            questions[device] = _Question(handles[device], handles[device].alive.remote(), now)
        self._questions = questions
        return [
            LifeSign(device, ENDED if q.ended else SILENT, round(now - q.asked_at, 1))
            for device, q in sorted(questions.items())
            if q.ended or now - q.asked_at >= SILENT_AFTER_S
        ]
