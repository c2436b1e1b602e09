"""Finding, asking and ending control units, on a Ray whose answers are written down."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from client_pipeline.runtime import actors, shared_actor
from client_pipeline.runtime.actors import (
    ControlUnitAbsent,
    ControlUnitError,
    ControlUnitLost,
    join_ray,
    restart_control_unit,
    start_control_unit,
    train_round,
    workers_at_once,
)
from client_pipeline.runtime.control_unit_actor import ControlUnitActor
from client_pipeline.runtime.faults import FailedRound
from client_pipeline.runtime.placement import Placement
from helpers.actor_cases import setup_of
from helpers.scripted_ray import PENDING, PID, Reference, ScriptedActor, ScriptedRay, ended, failed

NODE = "ab" * 28
"""A Ray node's name is 56 hexadecimal digits."""


class OneNode(ScriptedRay):
    """A Ray with other runs' actors."""

    def __init__(self):
        super().__init__()
        self.namespaces = {}
        self.joined = []
        self.alive = [{"Alive": True, "Resources": {"CPU": 7.9, "GPU": 2.0}}]
        self.needs = {}
        self.is_actor = True
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: self._names())

    def _names(self):
        return [{"name": name, "namespace": self.namespaces.get(name, "collapipe")} for name in self.named]

    def init(self, **options):
        self.joined.append(options)

    def nodes(self):
        return self.alive

    def get_runtime_context(self):
        return SimpleNamespace(
            get_node_id=lambda: NODE,
            get_assigned_resources=lambda: self.needs,
            get_actor_id=lambda: "1" if self.is_actor else None,
        )


@pytest.fixture
def ray(monkeypatch):
    made = OneNode()
    for module in (actors, shared_actor):
        monkeypatch.setattr(module, "ray", made)
    return made


@pytest.fixture
def devices(monkeypatch):
    """What is asked of a cluster's own Ray, and the devices that have joined it."""
    seen = SimpleNamespace(waits=[], checked=[], joined={0: "10.0.0.1", 2: "10.0.0.3"})

    def wait(num_devices, timeout_s, least):
        seen.waits.append((num_devices, timeout_s, least))
        if isinstance(seen.joined, Exception):
            raise seen.joined
        return seen.joined

    monkeypatch.setattr(actors, "wait_for_devices", wait)
    monkeypatch.setattr(actors, "check_devices", lambda joined: seen.checked.append(joined) or {})
    return seen


def setup(run="new", spread=False, **changes):
    placement = Placement(ray_address="10.0.0.9:6379", host="10.0.0.9", num_devices=3) if spread else Placement()
    return replace(setup_of(run), placement=placement, **changes)


# The Ray that is asked.


def test_a_process_that_uses_a_ray_joins_no_other(ray, monkeypatch):
    monkeypatch.setattr(actors, "check_answers", None)
    join_ray(Placement(ray_address="10.0.0.9:6379"))
    assert ray.joined == []


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(), {"address": "auto"}),
        (
            Placement(ray_address="10.0.0.9:6379", host="10.0.0.9"),
            {"address": "10.0.0.9:6379", "_node_ip_address": "10.0.0.9"},
        ),
    ],
)
def test_a_program_joins_the_ray_of_its_cluster_by_its_own_address(ray, monkeypatch, placement, expected):
    checked, ray.runs = [], False
    monkeypatch.setattr(actors, "check_answers", checked.append)
    join_ray(placement)
    [options] = ray.joined
    assert options == {"namespace": "collapipe", "log_to_driver": False, "logging_level": "ERROR", **expected}
    assert checked == [placement.ray_address]


def test_a_ray_where_nobody_answers_is_the_users_error(ray):
    ray.runs = False
    with pytest.raises(ValueError, match=r"this cluster.s Ray does not answer at 127\.0\.0\.1:1: .*collapipe up cu"):
        join_ray(Placement(ray_address="127.0.0.1:1"))
    assert ray.joined == []


@pytest.mark.parametrize(
    ("needs", "expected"),
    [({"CPU": 2.0}, 3 + 1), ({"CPU": 2.0, "GPU": 1.0}, 2), ({"CPU": 1.0, "TPU": 1.0}, 0), ({"CPU": 0.0}, 0), ({}, 0)],
)
def test_workers_at_once_are_those_that_fit_each_living_node(ray, needs, expected):
    ray.needs = needs
    ray.alive.append({"Alive": True, "Resources": {"CPU": 2.0}})
    ray.alive.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    assert workers_at_once() == expected
    ray.is_actor = False
    assert workers_at_once() == 0


# Starting.


def test_a_control_unit_outlives_who_started_it_and_answers_while_it_trains(ray, devices):
    ray.next_actors = [actor := ScriptedActor(prepare={"num_examples": 7})]
    assert start_control_unit(mine := setup()) == {"num_examples": 7, "machines": {}}
    [(cls, options, [made_with])] = ray.made
    assert cls is ControlUnitActor and made_with.run == mine.run and made_with.absent == ()
    where = options.pop("scheduling_strategy")
    assert (where.node_id, where.soft) == (NODE, False)
    assert options == {
        "name": "collapipe/new/cluster-0",
        "namespace": "collapipe",
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "concurrency_groups": {"liveness": 1},
    }
    assert ("prepare",) in actor.asked
    # All actors run in the Ray that is here.
    assert devices.waits == [] and devices.checked == [{}]


@pytest.mark.parametrize(("resume_round", "least"), [(0, None), (4, 1)])
def test_a_new_run_wants_all_devices_and_one_that_goes_on_those_that_come(ray, devices, resume_round, least):
    ray.next_actors = [ScriptedActor(prepare={})]
    start_control_unit(setup(spread=True, resume_round=resume_round))
    assert devices.waits == [(3, actors.DEVICES_TIMEOUT_S, least)]
    assert devices.checked == [devices.joined]
    [(_, _, [made_with])] = ray.made
    assert made_with.absent == (1,)


@pytest.mark.parametrize(("lost_at", "wait_s"), [(None, actors.DEVICES_TIMEOUT_S), (12.0, 0.0)])
def test_one_that_was_lost_just_now_starts_with_the_devices_that_are_there(ray, devices, lost_at, wait_s):
    ray.next_actors = [actor := ScriptedActor(prepare=PENDING)]
    restart_control_unit(setup(spread=True, lost_at=lost_at))
    assert devices.waits == [(3, wait_s, 1)] and devices.checked == []
    # It loads its data while nobody waits.
    assert actor.asked == [("prepare",)]


def test_one_that_cannot_start_again_is_absent(ray, devices):
    devices.joined = ValueError("no device is there")
    with pytest.raises(ControlUnitAbsent, match="collapipe/new/cluster-0: .* cannot start again: no device is there"):
        restart_control_unit(setup(spread=True))
    assert ray.made == []


@pytest.mark.parametrize("call", [lambda: start_control_unit(setup()), lambda: train_round("new", 0, None, 1.0)])
def test_whoever_asks_joins_ray_first(ray, monkeypatch, call):
    joined = []

    def join(placement):
        joined.append(placement)
        raise KeyError("asked")

    monkeypatch.setattr(actors, "join_ray", join)
    with pytest.raises(KeyError):
        call()
    assert joined == [Placement()]


# Older runs.


def test_what_older_runs_left_for_the_cluster_is_ended_and_nothing_else(ray, devices, monkeypatch):
    monkeypatch.setattr(actors, "YIELD_S", 0.0)
    names = [
        "collapipe/old/cluster-0",
        "collapipe/old/cluster-0/device-1",
        "collapipe/old/cluster-01",
        "collapipe/old/cluster-1",
        "collapipe/new/cluster-0/device-0",
        "collapipe/old",
        "another/old/cluster-0",
        "collapipe/other/cluster-0",
    ]
    ray.named = {name: ScriptedActor(in_use=False) for name in names}
    ray.namespaces["collapipe/other/cluster-0"] = "somebody"
    ray.next_actors = [ScriptedActor(prepare={})]
    start_control_unit(setup())
    assert [name for name in names if ray.named[name].killed] == names[:2]


@pytest.mark.parametrize("answer", [ended(), PENDING, failed(AttributeError("in_use"))])
def test_an_older_control_unit_that_says_nothing_is_ended(ray, devices, answer):
    ray.named = {"collapipe/old/cluster-0": (old := ScriptedActor(in_use=answer))}
    ray.next_actors = [ScriptedActor(prepare={})]
    start_control_unit(setup())
    assert old.killed


def test_an_older_control_unit_in_its_round_is_waited_for_and_not_ended(ray, devices, monkeypatch):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(actors, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(actors, "YIELD_S", 20.0)
    ray.named = {
        "collapipe/old/cluster-0/device-0": (device := ScriptedActor(in_use=True)),
        "collapipe/old/cluster-0": (old := ScriptedActor(in_use=True)),
    }
    with pytest.raises(
        ValueError, match="cluster 0: its control unit has been in a round of another run, old, for 20 s"
    ):
        start_control_unit(setup())
    assert not old.killed and not device.killed and ray.made == []
    assert 20.0 < sum(slept) <= 21.0 and device.asked == []


# Asking.


class Unit(ScriptedActor):
    """A control unit that trains for some looks, and says each time whether it lives."""

    def __init__(self, outcome, looks=0):
        super().__init__(train_round=PENDING)
        self.outcome, self.looks = outcome, looks
        self.answer = None

    def __getattr__(self, method):
        if method == "train_round":
            return SimpleNamespace(remote=self._train)
        return super().__getattr__(method)

    def _train(self, order):
        self.asked.append(("train_round", order))
        self.answer = Reference(PENDING if self.looks else self.outcome)
        return self.answer


@pytest.fixture
def asked(ray, monkeypatch):
    """Have a control unit train one round; returns what is waited for, each look at its answer, and each sign."""

    def ask(unit, timeout_s=8.0):
        ray.named["collapipe/new/cluster-3"] = unit
        waits, signs = [], []
        wait, get = ray.wait, ray.get

        def looked(references, timeout):
            if references == [unit.answer]:
                waits.append(timeout)
                if len(waits) > unit.looks:
                    unit.answer.value = unit.outcome
            return wait(references, timeout=timeout)

        def got(reference, timeout=None):
            if timeout is not None:
                signs.append(timeout)
            return get(reference, timeout)

        monkeypatch.setattr(ray, "wait", looked)
        monkeypatch.setattr(ray, "get", got)
        return train_round("new", 3, "order", timeout_s), waits, signs

    return ask


def test_a_round_is_waited_for_as_long_as_its_control_unit_says_that_it_lives(asked):
    unit = Unit("trained", looks=3)
    result, waits, signs = asked(unit, timeout_s=300.0)
    assert result == "trained" and ("train_round", "order") in unit.asked
    assert waits == [5.0] * 4
    # One that starts may be busy with that for as long as it likes; after its first sign 60 s are much.
    assert signs == [300.0, 60.0, 60.0]


def test_no_look_takes_longer_than_the_time_that_is_allowed(asked):
    assert asked(Unit("trained", looks=1), timeout_s=2.0)[1:] == ([2.0, 2.0], [2.0])


def test_a_control_unit_that_says_nothing_is_ended_and_lost(asked, ray, monkeypatch):
    signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    unit = Unit("never", looks=99)
    unit.answers["alive"] = PENDING
    with pytest.raises(ControlUnitLost, match="collapipe/new/cluster-3: .* has given no sign of life for 8 s"):
        asked(unit)
    # Nobody knows its process.
    assert unit.killed and signals == []


@pytest.mark.parametrize(("where", "signals"), [(NODE, [(PID, signal.SIGKILL)]), ("elsewhere", [])])
def test_a_process_that_stands_still_here_is_ended_by_the_system(asked, ray, monkeypatch, where, signals):
    sent, alive = [], iter([(PID, where)])
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))

    class Stopped(Unit):
        def __getattr__(self, method):
            if method == "alive":
                return SimpleNamespace(remote=lambda: Reference(next(alive, PENDING)))
            return super().__getattr__(method)

    unit = Stopped("never", looks=99)
    with pytest.raises(ControlUnitLost, match="has given no sign of life for 8 s"):
        asked(unit)
    assert unit.killed and sent == signals


def test_no_such_process_is_absent(ray):
    with pytest.raises(ControlUnitAbsent, match="collapipe/new/cluster-3: no control unit is running"):
        train_round("new", 3, None, 1.0)


@pytest.mark.parametrize("error", [ValueError("a plan that does not fit"), FileNotFoundError("no data")])
def test_the_users_errors_come_as_they_are(asked, error):
    with pytest.raises(type(error), match=str(error)) as found:
        asked(Unit(failed(error)))
    assert found.value is error


def test_a_failed_round_brings_its_records(asked):
    records = [{"kind": "nan"}]
    with pytest.raises(ControlUnitError, match="^collapipe/new/cluster-3: Inf$") as found:
        asked(Unit(failed(FailedRound("Inf", records))))
    assert found.value.faults == records and not isinstance(found.value, ControlUnitLost)


def test_what_else_it_raises_is_named_with_its_kind(asked):
    with pytest.raises(ControlUnitError, match="^collapipe/new/cluster-3: KeyError: 'x'$") as found:
        asked(Unit(failed(KeyError("x"))))
    assert found.value.faults == [] and not isinstance(found.value, ControlUnitLost)


def test_a_process_that_ended_is_lost_and_not_absent(asked):
    with pytest.raises(ControlUnitLost, match="cluster-3: the control unit's process ended") as found:
        asked(Unit(ended()))
    assert not isinstance(found.value, ControlUnitAbsent)
