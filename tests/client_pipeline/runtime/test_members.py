"""The members of a shared actor without Ray: who waits for whom, and what is left of one that goes."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from client_pipeline.runtime.devices import shared_actor
from client_pipeline.runtime.devices.shared_actor import (
    MemberAbsent,
    SharedActor,
    start_member,
    start_when_ray_is_up,
)
from client_pipeline.runtime.ray.unused_actors import LIVENESS
from helpers.clocks import Clock

SOON_S = 120.0


class Member:
    """Waits when it is told to, and notes what was asked in which thread."""

    def __init__(self, *arguments):
        if arguments == ("fails",):
            raise ValueError("it cannot be made")
        self.asked = []
        self.may_go_on = threading.Event()
        self.closed = False
        self.made_in = threading.get_ident()

    def ask(self, *arguments):
        assert threading.get_ident() == self.made_in
        self.asked.append(arguments)
        return arguments

    def wait(self):
        return self.may_go_on.wait(SOON_S)

    def itself(self):
        return self

    def close(self):
        self.closed = True

    @ray.method(concurrency_group=LIVENESS)
    def go_on(self):
        assert threading.get_ident() != self.made_in
        self.may_go_on.set()


def with_actor(talk):
    """Run ``talk(actor)`` in an event loop, as Ray would."""

    async def run():
        return await asyncio.wait_for(talk(SharedActor(600.0)), 2 * SOON_S)

    return asyncio.run(run())


def test_each_member_answers_one_call_after_the_other_in_the_thread_that_made_it():
    async def talk(actor):
        for name in "ab":
            await actor.admit(name, Member)
        await asyncio.gather(*(actor.call(name, False, "ask", n) for n in range(20) for name in "ab"))
        members = [await actor.call(name, False, "itself") for name in "ab"]
        assert all(member.asked == [(n,) for n in range(20)] for member in members)
        assert members[0].made_in != members[1].made_in
        assert await actor.names() == ["a", "b"]

    with_actor(talk)


def test_one_that_waits_keeps_nobody_waiting_and_is_heard_of_at_once():
    async def talk(actor):
        await actor.admit("a", Member)
        await actor.admit("b", Member)
        waits = asyncio.ensure_future(actor.call("a", False, "wait"))
        assert await actor.call("b", False, "ask", 1) == (1,)
        assert not waits.done() and actor._watch.busy
        await actor.call("a", False, "go_on")
        assert await waits and not actor._watch.busy

    with_actor(talk)


def test_a_call_that_overtakes_its_member_waits_for_it():
    async def talk(actor):
        answers = [asyncio.ensure_future(actor.call(name, True, "ask", name)) for name in "ab"]
        await asyncio.sleep(0.01)
        for name in "ba":
            await actor.admit(name, Member)
        return await asyncio.gather(*answers)

    assert with_actor(talk) == [("a",), ("b",)]


def test_what_cannot_be_made_says_why_to_all_who_call_it():
    async def talk(actor):
        await actor.admit("a", Member, "fails")
        for method in ("ask", "go_on"):
            with pytest.raises(ValueError, match="it cannot be made"):
                await actor.call("a", False, method)
        # It can go, and its name be given to another.
        await actor.dismiss("a")
        await actor.admit("a", Member)
        assert await actor.call("a", False, "ask", 2) == (2,)

    with_actor(talk)


def test_who_is_dismissed_is_closed_and_leaves_no_thread():
    async def talk(actor):
        await actor.admit("leaver", Member)
        await actor.admit("b", Member)
        first = await actor.call("leaver", False, "itself")
        before = {thread.name for thread in threading.enumerate()}
        assert any(name.startswith("leaver_") for name in before)
        await actor.dismiss("leaver")
        await actor.dismiss("leaver")
        assert first.closed and await actor.names() == ["b"]
        with pytest.raises(MemberAbsent):
            await actor.call("leaver", False, "ask")
        await no_thread_of("leaver")

    with_actor(talk)


async def no_thread_of(name):
    deadline = time.monotonic() + SOON_S
    while any(thread.name.startswith(f"{name}_") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, f"a thread of {name} goes on"
        await asyncio.sleep(0.01)


def test_a_dismissed_thread_ends_though_somebody_keeps_an_error_of_its_member():
    """The traceback holds the thread: without a word to it, it would wait for ever."""

    async def talk(actor):
        await actor.admit("leaver", Member)
        with pytest.raises(TypeError) as kept:
            await actor.call("leaver", False, "close", "one argument too many")
        await actor.dismiss("leaver")
        await no_thread_of("leaver")
        assert kept.value.__traceback__ is not None

    with_actor(talk)


# From the other side.


class Remote:
    """Notes calls in the form of a Ray actor's methods."""

    def __init__(self, calls, method, **options):
        self._calls, self._method, self._options = calls, method, options

    def remote(self, *arguments):
        self._calls.append((self._method, *arguments, *([self._options] if self._options else [])))
        return self._calls[-1]

    def options(self, **options):
        return Remote(self._calls, self._method, **options)


class Actor:
    def __init__(self):
        self.calls = []
        for method in ("admit", "call", "load"):
            setattr(self, method, Remote(self.calls, method))


class Ray:
    """The part of Ray that starting needs."""

    def __init__(self):
        self.actors = {}
        self.options = []

    def remote(self, cls):
        assert cls is SharedActor

        def options(**options):
            self.options.append(options)
            return SimpleNamespace(remote=lambda idle_s: self.actors.setdefault(options["name"], Actor()))

        return SimpleNamespace(options=options)


@pytest.fixture
def around(monkeypatch):
    made = Ray()
    monkeypatch.setattr(shared_actor, "ray", made)
    return made


def test_a_member_is_asked_for_and_called_by_its_name(around):
    handle = start_member("collapipe-shared/0", 60.0, "a", Member, 1)
    [actor] = around.actors.values()
    handle.ask.remote(2, 3)
    handle.two.options(num_returns=2).remote()
    assert actor.calls == [
        ("admit", "a", Member, 1),
        ("call", "a", True, "ask", 2, 3),
        ("call", "a", True, "two", {"num_returns": 2}),
    ]
    [options] = around.options
    assert options["name"] == "collapipe-shared/0" and options["get_if_exists"] and options["num_cpus"] == 0
    assert options["lifetime"] == "detached" and options["max_concurrency"] > 10_000
    with pytest.raises(AttributeError):
        handle._private  # noqa: B018


@pytest.mark.parametrize(("up_after_s", "starts"), [(0.0, True), (1.0, True), (29.0, True), (40.0, False)])
def test_shared_actors_start_as_soon_as_there_is_a_ray_and_not_at_all_if_none_comes(
    around, monkeypatch, up_after_s, starts
):
    clock = Clock()
    begun = clock.now
    around.is_initialized = lambda: clock.now >= begun + up_after_s
    monkeypatch.setattr(shared_actor, "time", clock)
    start_when_ray_is_up(["a", "b"], 60.0, ["json"], timeout_s=30.0)
    assert [(name, actor.calls) for name, actor in around.actors.items()] == (
        [("a", [("load", ["json"])]), ("b", [("load", ["json"])])] if starts else []
    )
    # Looks often: a run waits for them.
    assert 0 <= clock.now - begun - min(up_after_s, 30.0) <= 2.0
