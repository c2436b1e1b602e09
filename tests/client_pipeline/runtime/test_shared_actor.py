"""Several members in one actor, on a real Ray: each is called as an actor of its own is."""

import os
import threading
import time

import pytest
import ray

from client_pipeline.runtime.devices.shared_actor import (
    MemberAbsent,
    all_actors,
    end_actor,
    find_actor,
    start_member,
)
from client_pipeline.runtime.ray.unused_actors import LIVENESS

pytestmark = pytest.mark.usefixtures("local_ray")

IDLE_S = 600.0
WAIT_S = 120.0
closed = []


class Notebook:
    """A member that writes down what it is called with."""

    def __init__(self, name, fails=False):
        if fails:
            raise ValueError(f"{name} cannot be made")
        self.lines = [name]
        self.goes_on = threading.Event()
        self.thread = threading.get_ident()

    def write(self, text):
        assert threading.get_ident() == self.thread
        self.lines.append(text)
        return list(self.lines)

    def wait(self):
        assert self.goes_on.wait(WAIT_S)
        return "went on"

    def two(self):
        return "first", "second"

    def fail(self):
        raise KeyError("not written down")

    def closed(self):
        return list(closed)

    def close(self):
        closed.append(self.lines[0])

    @ray.method(concurrency_group=LIVENESS)
    def alive(self):
        self.goes_on.set()
        return os.getpid()


def answer(reference):
    return ray.get(reference, timeout=WAIT_S)


@pytest.fixture
def member(request):
    host = f"collapipe-shared/{request.node.name}"
    made = []

    def start(name, *arguments):
        made.append(start_member(host, IDLE_S, f"collapipe/test/{name}", Notebook, name, *arguments))
        return made[-1]

    yield start
    end_actor(made[0], with_its_process=True)


def test_members_share_a_process_and_nothing_else(member):
    one, other = member("one"), member("other")
    assert answer(one.alive.remote()) == answer(other.alive.remote()) != os.getpid()
    answer([each.write.remote(str(n)) for n in range(20) for each in (one, other)])
    for name, each in (("one", one), ("other", other)):
        first, *lines, last = answer(each.write.remote("last"))
        assert (first, sorted(lines), last) == (name, sorted(map(str, range(20))), "last")
    # Who asks for a member again finds it as it is.
    assert answer(member("one").write.remote("x"))[-1] == "x"
    assert answer(one.write.remote("y"))[-2:] == ["x", "y"]


def test_a_call_of_several_results_and_one_that_takes_a_reference(member):
    one, other = member("one"), member("other")
    first, second = one.two.options(num_returns=2).remote()
    assert answer(other.write.remote(first))[-1] == "first" and answer(second) == "second"


def test_errors_come_as_from_an_actor(member):
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        answer(member("one").fail.remote())
    assert isinstance(error.value.cause, KeyError)
    with pytest.raises(ray.exceptions.RayTaskError, match="two cannot be made") as error:
        answer(member("two", True).alive.remote())
    assert isinstance(error.value.cause, ValueError)


def test_a_member_that_was_dismissed_is_closed_and_absent_and_the_others_stay(member):
    one, other = member("one"), member("other")
    answer(one.write.remote("x"))
    host = other._actor
    name = "collapipe/test/one"
    assert all_actors(WAIT_S)[name].startswith("collapipe-shared/")
    end_actor(one)
    deadline = time.monotonic() + WAIT_S
    while answer(other.closed.remote()) != ["one"]:
        assert time.monotonic() < deadline
    found = find_actor(name, all_actors(WAIT_S)["collapipe/test/other"])
    with pytest.raises(ray.exceptions.RayTaskError) as error:
        answer(found.write.remote("y"))
    assert isinstance(error.value.cause, MemberAbsent) and name not in all_actors(WAIT_S)
    assert answer(host.names.remote()) == ["collapipe/test/other"]
    # Whoever asks for it gets a new one.
    assert answer(member("one").write.remote("z")) == ["one", "z"]


def test_a_process_that_ends_takes_its_members_along_and_the_next_one_has_new_ones(member):
    one = member("one")
    pid = answer(one.alive.remote())
    answer(one.write.remote("x"))
    os.kill(pid, 9)
    with pytest.raises(ray.exceptions.RayActorError):
        answer(one.write.remote("y"))
    deadline = time.monotonic() + WAIT_S
    while True:
        again = member("one")
        try:
            assert answer(again.write.remote("z")) == ["one", "z"]
            break
        except ray.exceptions.RayActorError:
            # The name may stand for the old process a moment longer.
            assert time.monotonic() < deadline
