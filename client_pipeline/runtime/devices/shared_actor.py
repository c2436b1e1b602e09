"""One Ray actor for several simulated devices and control units: a process that imports torch costs seconds and memory.

Each member has a thread of its own in which it was made and answers one call after the other, as an actor would; what
actors answer at once (the group ``LIVENESS``), members do, too. They share nothing but the process: a member's name is
what its own actor would be called, so that callers treat both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import ray

from client_pipeline.runtime.ray.placement import ACTOR_CPUS, SHARED
from client_pipeline.runtime.ray.unused_actors import LIVENESS, Watch

NAMESPACE = "collapipe"
"""Ray namespace of all actors: a named actor is found by any process of the cluster."""
_ADMISSION_S = 600.0
"""Longest wait of a call for a member that was requested just before [s].

The request's class is imported first, in the thread that also counts this time; callers have waits of their own.
"""
_POLL_S = 0.05
_MOST_CALLS = 100_000
"""Calls that a shared actor holds at the same time; each member takes one after the other."""


class MemberAbsent(RuntimeError):
    """A shared actor has no such member: it was dismissed, or the process was started again."""


@dataclass(frozen=True)
class _Member:
    thread: ThreadPoolExecutor
    instance: Future[Any]


class SharedActor:
    """The members of one process.

    Parameters
    ----------
    idle_s : without members, or with members that are all without work, the process ends itself after this time [s]
    """

    def __init__(self, idle_s: float) -> None:
        self._members: dict[str, _Member] = {}
        self._admitted = asyncio.Condition()
        self._watch = Watch(idle_s)

    async def admit(self, name: str, cls: type, *arguments: Any) -> None:
        """Make a member, unless it is there already; its callers wait for it, or receive its error."""
        if name not in self._members:
            thread = ThreadPoolExecutor(1, thread_name_prefix=name)
            self._members[name] = _Member(thread, thread.submit(cls, *arguments))
            async with self._admitted:
                self._admitted.notify_all()

    async def call(self, name: str, comes: bool, method: str, *arguments: Any) -> Any:
        """Pass a call to a member.

        Parameters
        ----------
        name : of the member
        comes : whether the member may still be on its way: Ray does not promise to begin calls in their order
        method, arguments : what is called

        Raises
        ------
        MemberAbsent
            If there is no such member. Else what the member raises.
        """
        with self._watch:
            if comes and name not in self._members:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ADMISSION_S), self._admitted:
                        await self._admitted.wait_for(lambda: name in self._members)
            if name not in self._members:
                raise MemberAbsent(f"{name}: no such member of this shared actor")
            member = self._members[name]
            instance = await asyncio.wrap_future(member.instance)
            if self._members.get(name) is not member:
                raise MemberAbsent(f"{name}: it was dismissed while it was made")
            answer = partial(getattr(instance, method), *arguments)
            if getattr(answer.func, "__ray_concurrency_group__", None) == LIVENESS:
                return await asyncio.to_thread(answer)
            return await asyncio.get_running_loop().run_in_executor(member.thread, answer)

    async def alive(self) -> None:
        """Answer for the process, on behalf of all of its members."""

    async def load(self, modules: Sequence[str]) -> None:
        """Import the modules that members will need, before they come."""

        def import_all() -> None:
            for name in modules:
                import_module(name)

        await asyncio.to_thread(import_all)

    async def names(self) -> list[str]:
        """Names of all members."""
        return sorted(self._members)

    async def dismiss(self, name: str) -> None:
        """Close a member, as soon as it is made, and let go of it; it may be gone already."""
        if (member := self._members.pop(name, None)) is not None:
            try:
                await asyncio.wait([asyncio.wrap_future(member.instance)])
                if member.instance.exception() is None:
                    await asyncio.to_thread(member.instance.result().close)
            finally:
                member.thread.shutdown(wait=False)


class _Method:
    """Counterpart of ``handle.method`` of an actor."""

    def __init__(self, call: Any, name: str, comes: bool, method: str) -> None:
        self._call, self._place = call, (name, comes, method)

    def remote(self, *arguments: Any) -> Any:
        return self._call.remote(*self._place, *arguments)

    def options(self, **options: Any) -> _Method:
        return _Method(self._call.options(**options), *self._place)


class MemberHandle:
    """Calls a member as an actor of its own is called."""

    def __init__(self, actor: Any, name: str, *, comes: bool = False) -> None:
        self._actor, self._name, self._comes = actor, name, comes

    def __getattr__(self, method: str) -> _Method:
        """Return the counterpart of an actor's method."""
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self._actor.call, self._name, self._comes, method)


def start_actor(actor_class: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """Start an actor of a Ray class, which outlives its caller, or find it; ``options`` are more of Ray's."""
    named = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    return actor_class.options(**named, num_cpus=ACTOR_CPUS, **options).remote(*arguments)


def with_liveness(cls: type) -> Any:
    """Return the Ray class whose actors have a thread of their own for the group ``LIVENESS``."""
    return ray.remote(concurrency_groups={LIVENESS: 1})(cls)


def kill_stopped(pid: int, node: str) -> None:
    """Kill a process of this machine, if its id is known: a stopped one reacts to the system's signals alone."""
    if pid and ray.is_initialized() and node == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_shared_actor(name: str, idle_s: float) -> Any:
    """Start a shared actor, or find it."""
    return start_actor(ray.remote(SharedActor), name, idle_s, max_concurrency=_MOST_CALLS)


def start_when_ray_is_up(names: Sequence[str], idle_s: float, modules: Sequence[str], timeout_s: float) -> None:
    """Start shared actors, and have them import modules, as soon as there is a Ray here; not at all if none comes."""
    deadline = time.monotonic() + timeout_s
    while not ray.is_initialized():
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
    for name in names:
        start_shared_actor(name, idle_s).load.remote(modules)


def start_member(actor_name: str, idle_s: float, name: str, cls: type, *arguments: Any) -> MemberHandle:
    """Make a member of a shared actor, which is started if need be."""
    actor = start_shared_actor(actor_name, idle_s)
    actor.admit.remote(name, cls, *arguments)
    return MemberHandle(actor, name, comes=True)


def find_actor(name: str, shared_actor: str = "") -> Any:
    """Find an actor by name, or a member of a shared one.

    Raises
    ------
    ValueError
        If there is no such actor; a member that is missing says so when it is called.
    """
    if not shared_actor:
        return ray.get_actor(name, namespace=NAMESPACE)
    return MemberHandle(ray.get_actor(shared_actor, namespace=NAMESPACE), name)


def process_of(actor: Any) -> Any:
    """Return the actor whose process a member is in, to be asked whether it is there; an actor of its own as it is."""
    return actor._actor if isinstance(actor, MemberHandle) else actor


def end_actor(actor: Any, *, with_its_process: bool = False) -> None:
    """End an actor. Of a shared one the member alone goes, unless the process does not answer any more."""
    if not isinstance(actor, MemberHandle):
        ray.kill(actor)
    elif with_its_process:
        ray.kill(actor._actor)
    else:
        actor._actor.dismiss.remote(actor._name)


def all_actors(timeout_s: float) -> dict[str, str]:
    """Names of all actors and members of this Ray, with the shared actor that a member is in; empty for an actor."""
    names = [
        str(entry["name"])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]
    shared_actor_of = {name: "" for name in names if not name.startswith(f"{SHARED}/")}
    for name in names:
        if name.startswith(f"{SHARED}/"):
            try:
                members = ray.get(ray.get_actor(name, namespace=NAMESPACE).names.remote(), timeout=timeout_s)
            except (ValueError, ray.exceptions.RayError):
                continue  # it has ended in the meantime, with all its members
            shared_actor_of |= dict.fromkeys(members, name)
    return shared_actor_of
