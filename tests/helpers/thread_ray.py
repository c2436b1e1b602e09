"""Ray's actors as threads of this process, for tests of the runtime that take milliseconds.

What goes in and out of an actor is pickled, as Ray does it; an actor that is killed answers nothing any more, its
neighbours in the gloo group lose it, and the next one of its name is another.
"""

import contextlib
import io
import os
import pickle
import queue
import threading
import time
from concurrent.futures import Future, TimeoutError as NotInTime
from types import SimpleNamespace

import torch
from ray import exceptions

from client_pipeline.runtime.control_unit import control_unit, recovery
from client_pipeline.runtime.devices import (
    device,
    device_pool,
    frozen_devices,
    group,
    pipeline,
    shared_actor,
    snapshots,
)
from client_pipeline.runtime.ray import ray_tensors, unused_actors

AT_ONCE = ("alive", "interrupt")
"""Methods of the liveness group, which answer while others run."""


class RayPickler(pickle.Pickler):
    """Pickles tensors as they go in Ray's messages, too."""

    def reducer_override(self, value):
        if type(value) is torch.Tensor:
            return ray_tensors._from_wire, (ray_tensors._to_wire(value),)
        return NotImplemented


def message_of(value):
    """Serialise a value for another process."""
    message = io.BytesIO()
    RayPickler(message).dump(value)
    return message.getvalue()


def sent(value):
    """Return the copy of a value that arrives at another process."""
    return pickle.loads(message_of(value))


class ThreadActor:
    """One actor: a thread for its work, and one for what it answers at once."""

    def __init__(self, cls, args, process=-1, starts_s=0.0):
        self._process = process
        self._queues = {"work": queue.Queue(), "alive": queue.Queue()}
        self._instance = None
        self._ended = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._open = set()
        self._lock = threading.Lock()
        self._make = lambda: cls(*sent(args))
        self._starts_s = starts_s
        self._made = threading.Event()
        for name in self._queues:
            threading.Thread(target=self._run, args=(name,), daemon=True).start()

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)

        def remote(*args, num_returns=1):
            answers = [Future() for _ in range(num_returns)]
            with self._lock:
                if self._ended.is_set():
                    for answer in answers:
                        answer.set_exception(exceptions.RayActorError())
                else:
                    self._open.update(answers)
                    self._queues["alive" if method in AT_ONCE else "work"].put((method, args, answers))
            return answers[0] if num_returns == 1 else answers

        def options(num_returns):
            return SimpleNamespace(remote=lambda *args: remote(*args, num_returns=num_returns))

        return SimpleNamespace(remote=remote, options=options)

    def _run(self, name):
        if name == "work":
            time.sleep(self._starts_s)
            self._instance = self._make()
            self._made.set()
        self._made.wait()
        while not self._ended.is_set():
            method, args, answers = self._queues[name].get()
            self._goes_on.wait()
            try:
                args = [sent(a.result() if isinstance(a, Future) else a) for a in args]
                result = sent(getattr(self._instance, method)(*args))
                if result == (os.getpid(), "here"):
                    result = (self._process, "here")
                outcomes = list(result) if len(answers) > 1 else [result]
            except exceptions.RayError as error:
                outcomes = [error] * len(answers)
            except BaseException as error:
                outcomes = [exceptions.RayTaskError(method, str(error), error, ip="here")] * len(answers)
            with self._lock:
                for answer, outcome in zip(answers, outcomes, strict=True):
                    if answer in self._open:
                        self._open.remove(answer)
                        (answer.set_exception if isinstance(outcome, BaseException) else answer.set_result)(outcome)

    def stop_process(self):
        """Stop it, as SIGSTOP does."""
        self._goes_on.clear()

    def continue_process(self):
        self._goes_on.set()

    def end_process(self):
        """End it, as SIGKILL does: calls stay without an answer, its connections close."""
        self.answer_no_more()
        self.close_connections()

    def answer_no_more(self):
        with self._lock:
            self._ended.set()
            unanswered, self._open = self._open, set()
        self._goes_on.set()
        for answer in unanswered:
            answer.set_exception(exceptions.RayActorError())

    def close_connections(self):
        if self._instance is not None:
            with contextlib.suppress(Exception):
                self._instance.interrupt(1 << 30)

    @property
    def has_ended(self):
        return self._ended.is_set()


class ThreadRay:
    """The part of Ray that the runtime uses; set it in the place of a module's ``ray``."""

    exceptions = exceptions
    WORKER_MODE = 1

    def __init__(self, process_of=lambda name: None):
        self.process_of = process_of
        """Number of the process that an actor says it is in, by its name; None: one of its own."""
        self.actors = {}
        self.number_made = 0
        self.refuses = set()
        """Names of which no actor starts."""

    def remote(self, **_):
        return lambda cls: SimpleNamespace(
            options=lambda name, **_: SimpleNamespace(remote=lambda *args: self._actor(name, cls, args))
        )

    def _actor(self, name, cls, args):
        if name not in self.actors or self.actors[name].has_ended:
            self.number_made += 1
            # One that is started again takes a while, as a process does.
            starts_s = 0.03 if name in self.actors else 0.0
            self.actors[name] = ThreadActor(cls, args, self.process_of(name) or -self.number_made, starts_s)
            if name in self.refuses:
                self.actors[name].end_process()
        return self.actors[name]

    def wait(self, answers, num_returns=1, timeout=None, fetch_local=True):
        end = None if timeout is None else time.monotonic() + timeout
        while sum(answer.done() for answer in answers) < num_returns:
            if end is not None and time.monotonic() >= end:
                break
            time.sleep(0.001)
        return [a for a in answers if a.done()], [a for a in answers if not a.done()]

    def get(self, answer, timeout=None):
        try:
            return answer.result(timeout)
        except NotInTime as error:
            raise exceptions.GetTimeoutError() from error

    def kill(self, actor):
        actor.end_process()

    def is_initialized(self):
        return False

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")


def run_in_threads(monkeypatch, process_of=lambda name: None):
    """Have the whole runtime use threads in the place of Ray's actors; nobody needs seconds to start there."""
    ray = ThreadRay(process_of)
    for module in (control_unit, device, device_pool, frozen_devices, group, unused_actors, shared_actor, snapshots):
        monkeypatch.setattr(module, "ray", ray)
    # A member of a shared actor is a thread, too.
    monkeypatch.setattr(device_pool, "start_member", lambda _, idle_s, name, cls, *args: ray._actor(name, cls, args))
    for module in (device_pool, pipeline):
        monkeypatch.setattr(module, "LEAST_S", 0.5)
    monkeypatch.setattr(device_pool, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(frozen_devices, "GRACE_S", 0.3)
    monkeypatch.setattr(recovery, "_LOOK_S", 0.01)
    return ray
