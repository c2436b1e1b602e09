"""A bell is heard once however often it was rung, on the other side of a fork, too."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from flower_app.deployment.bell import Bell, when_told


def test_it_is_heard_once_also_if_nobody_waited_when_it_was_rung():
    bell = Bell()
    assert not bell.wait(0.0)
    for _ in range(200_000):
        bell.ring()
    assert bell.wait(0.0) and not bell.wait(0.0)


@pytest.mark.slow
def test_whoever_waits_in_a_fork_is_woken():
    bell, answer = Bell(), Bell()
    if (fork := os.fork()) == 0:
        heard = bell.wait(60.0)
        answer.ring()
        os._exit(0 if heard else 1)
    try:
        time.sleep(0.2)
        bell.ring()
        assert answer.wait(60.0)
    finally:
        _, status = os.waitpid(fork, 0)
    assert status == 0 and not bell.wait(0.0)


def test_a_signal_that_another_thread_raises_is_seen_while_it_is_waited_for():
    class Ended(BaseException):
        pass

    def end(number, frame):
        raise Ended

    previous = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR1])
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(Ended):
            Bell().wait(60.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert time.monotonic() - start < 30.0


def test_a_superexec_asks_when_it_is_told_of_work_and_seldom_besides(monkeypatch):
    bell, waits, loop = Bell(), [], SimpleNamespace(time=time)
    heard = iter([False, True, False, False, True])
    monkeypatch.setattr(bell, "wait", lambda seconds: waits.append(seconds) or next(heard))
    assert when_told(bell, loop, print) is print
    for seconds in (0.5, 0.5, 0.5, 0.5, 7.0):
        loop.time.sleep(seconds)
    # Twice where it was told: there may have been two things to do.
    assert waits == [5.0, 5.0, 0.5, 5.0, 7.0]
