"""When the process of actors ends itself, by a clock."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from client_pipeline.runtime import unused_actors
from client_pipeline.runtime.unused_actors import Watch


class Clock:
    """Time passes while somebody sleeps; a test says what happens after which sleep."""

    def __init__(self):
        self.now = 100.0
        self.slept = []
        self.then = {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)
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

    made = Clock()
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


def test_an_actor_that_was_let_go_keeps_no_process(process):
    watches = [Watch(4.0), Watch(1000.0)]
    process.then = {2: lambda: (watches.pop(), gc.collect())}
    run_out(process)
    assert sum(process.slept) == 10.0


@pytest.mark.parametrize(
    ("initialized", "mode", "watched"), [(True, 1, True), (True, 0, False), (True, 2, False), (False, 1, False)]
)
def test_only_a_process_that_ray_started_is_ours_to_end(process, initialized, mode, watched):
    process.initialized, process.mode = initialized, mode
    Watch(1.0)
    assert len(process.threads.started) == watched


def test_a_call_is_busy_until_it_is_over():
    watch = Watch(8.0)
    with watch, watch:
        assert watch.busy
    assert not watch.busy
