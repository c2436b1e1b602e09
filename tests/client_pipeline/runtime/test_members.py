"""The members of a shared actor without Ray: who waits for whom, and what is left of one that goes."""

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from client_pipeline.runtime import shared_actor
from client_pipeline.runtime.shared_actor import (
    MemberAbsent,
    MemberHandle,
    SharedActor,
    all_actors,
    end_actor,
    find_actor,
    start_member,
    start_when_ray_is_up,
)
from client_pipeline.runtime.unused_actors import LIVENESS

SOON_S = 10.0


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


def test_a_member_that_is_there_is_not_made_again():
    async def talk(actor):
        await actor.admit("a", Member)
        await actor.call("a", False, "ask", 1)
        await actor.admit("a", Member, "fails")
        return (await actor.call("a", False, "itself")).asked

    assert with_actor(talk) == [(1,)]


def test_a_call_that_overtakes_its_member_waits_for_it():
    async def talk(actor):
        answers = [asyncio.ensure_future(actor.call(name, True, "ask", name)) for name in "ab"]
        await asyncio.sleep(0.01)
        for name in "ba":
            await actor.admit(name, Member)
        return await asyncio.gather(*answers)

    assert with_actor(talk) == [("a",), ("b",)]


def test_nobody_waits_for_ever_for_a_member_that_does_not_come(monkeypatch):
    monkeypatch.setattr(shared_actor, "_ADMISSION_S", 0.05)

    async def talk(actor):
        for comes in (True, False):
            with pytest.raises(MemberAbsent, match="a: no such member"):
                await actor.call("a", comes, "ask")
        assert not actor._watch.busy

    with_actor(talk)


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
        deadline = time.monotonic() + SOON_S
        while any(thread.name.startswith("leaver_") for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    with_actor(talk)


def test_what_members_will_need_is_imported_before_they_come():
    for name in ("colorsys", "sndhdr"):
        sys.modules.pop(name, None)

    async def talk(actor):
        await actor.load(["colorsys", "sndhdr"])

    with_actor(talk)
    assert {"colorsys", "sndhdr"} <= sys.modules.keys()


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
    def __init__(self, members=()):
        self.calls = []
        self.names = SimpleNamespace(remote=lambda: list(members))
        for method in ("admit", "call", "dismiss", "load"):
            setattr(self, method, Remote(self.calls, method))


class Ray:
    """As much of Ray as finding and starting takes."""

    exceptions = ray.exceptions

    def __init__(self):
        self.actors = {}
        self.killed = []
        self.options = []
        self.ready_after = 0
        listed = lambda all_namespaces: [{"name": n, "namespace": s} for n, s in self.listed]  # noqa: E731
        self.util = SimpleNamespace(list_named_actors=listed)
        self.listed = []

    def is_initialized(self):
        self.ready_after -= 1
        return self.ready_after < 0

    def remote(self, cls):
        assert cls is SharedActor

        def options(**options):
            self.options.append(options)
            return SimpleNamespace(remote=lambda idle_s: self.actors.setdefault(options["name"], Actor()))

        return SimpleNamespace(options=options)

    def get_actor(self, name, namespace):
        assert namespace == "collapipe"
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def get(self, answer, timeout):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self, actor):
        self.killed.append(actor)


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


def test_who_is_found_may_be_a_member_and_does_not_come_any_more(around):
    around.actors = {"collapipe/x": Actor(), "collapipe-shared/0": Actor()}
    assert find_actor("collapipe/x") is around.actors["collapipe/x"]
    member = find_actor("a", "collapipe-shared/0")
    assert isinstance(member, MemberHandle)
    member.ask.remote()
    assert around.actors["collapipe-shared/0"].calls == [("call", "a", False, "ask")]
    with pytest.raises(ValueError, match="collapipe-shared/1"):
        find_actor("a", "collapipe-shared/1")


def test_a_member_goes_alone_unless_its_process_does_not_answer(around):
    actor = around.actors["collapipe-shared/0"] = Actor()
    end_actor(find_actor("a", "collapipe-shared/0"))
    assert actor.calls == [("dismiss", "a")] and not around.killed
    end_actor(find_actor("a", "collapipe-shared/0"), with_its_process=True)
    end_actor("an actor of its own")
    assert around.killed == [actor, "an actor of its own"]


def test_all_actors_are_those_of_their_own_and_the_members(around):
    around.actors = {"collapipe-shared/0": Actor(["a", "b"]), "collapipe-shared/1": Actor()}
    around.actors["collapipe-shared/1"].names = SimpleNamespace(remote=lambda: ray.exceptions.RayActorError())
    names = ("collapipe/x", "collapipe-shared/0", "collapipe-shared/1", "collapipe-shared/gone")
    around.listed = [(name, "collapipe") for name in names] + [("collapipe/strange", "elsewhere")]
    found = all_actors(1.0)
    assert found == {"collapipe/x": "", "a": "collapipe-shared/0", "b": "collapipe-shared/0"}


def test_actors_start_as_soon_as_there_is_a_ray(around, monkeypatch):
    slept = []
    clock = SimpleNamespace(monotonic=lambda: float(sum(slept)), sleep=slept.append)
    monkeypatch.setattr(shared_actor, "time", clock)
    around.ready_after = 3
    start_when_ray_is_up(["x/0", "x/1"], 60.0, ["m"], 100.0)
    assert [actor.calls for actor in around.actors.values()] == [[("load", ["m"])]] * 2
    assert list(around.actors) == ["x/0", "x/1"] and len(slept) == 3
    around.actors.clear()
    around.ready_after = 10**6
    start_when_ray_is_up(["x/0"], 60.0, ["m"], 2.0)
    assert not around.actors
