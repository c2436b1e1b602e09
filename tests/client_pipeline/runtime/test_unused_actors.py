"""The end of a process of actors that nobody uses, by a clock."""

import weakref
from types import SimpleNamespace

import pytest

from client_pipeline.runtime.ray import unused_actors
from client_pipeline.runtime.ray.unused_actors import Watch
from helpers.clocks import Clock


class EventfulClock(Clock):
    """A clock with calls that follow a sleep of a given number."""

    then = {}

    def sleep(self, seconds):
        super().sleep(seconds)
        self.then.get(len(self.slept), lambda: None)()


class Ended(BaseException):
    """In the place of the end of the process."""


class Threads:
    """Notes which threads would run."""

    def __init__(self):
        self.started = []

    def __call__(self, target, daemon, name):
        return SimpleNamespace(start=lambda: self.started.append((target, daemon)))


@pytest.fixture
def process(monkeypatch):
    """A process that Ray started: its clock, and the threads that it has started."""

    def end(code):
        assert code == 0
        raise Ended

    made = EventfulClock()
    made.threads = Threads()
    made.initialized, made.mode = True, 1
    ray = SimpleNamespace(
        is_initialized=lambda: made.initialized,
        WORKER_MODE=1,
        get_runtime_context=lambda: SimpleNamespace(worker=SimpleNamespace(mode=made.mode)),
    )
    monkeypatch.setattr(unused_actors, "ray", ray)
    monkeypatch.setattr(unused_actors, "time", made)
    monkeypatch.setattr(unused_actors.os, "_exit", end)
    monkeypatch.setattr(unused_actors.threading, "Thread", made.threads)
    monkeypatch.setattr(unused_actors, "_WATCHES", weakref.WeakSet())
    monkeypatch.setattr(unused_actors, "_STARTED", unused_actors.threading.Lock())
    return made


def run_out(process):
    [(target, daemon)] = process.threads.started
    # A daemon: it must not keep alive a process that ends otherwise.
    assert daemon
    with pytest.raises(Ended):
        target()


def test_an_actor_that_nobody_calls_ends_its_process(process):
    watch = Watch(8.0)
    run_out(process)
    assert process.slept == [5.0, 3.0] and not watch.busy


def test_an_actor_that_works_does_not_end_and_one_that_has_worked_ends_later(process):
    watch = Watch(8.0)
    process.then = {1: watch.__enter__, 4: watch.__enter__, 20: watch.__exit__, 30: watch.__exit__}
    run_out(process)
    assert process.slept == [5.0] * 31 + [3.0]


def test_a_process_of_several_actors_ends_with_the_last_of_them(process):
    short, long = Watch(4.0), Watch(20.0)
    process.then = {1: short.__enter__, 2: short.__exit__}
    run_out(process)
    assert sum(process.slept) == 20.0 and len(process.threads.started) == 1
    assert not long.busy
