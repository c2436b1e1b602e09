"""Finding, asking and ending control units, on a Ray whose answers are written down."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from client_pipeline.runtime.control_unit import actors
from client_pipeline.runtime.control_unit.actors import (
    ControlUnitAbsent,
    ControlUnitError,
    ControlUnitLost,
    begin_round,
    collect_round,
    join_ray,
    restart_control_unit,
    start_control_unit,
    train_round,
)
from client_pipeline.runtime.devices import shared_actor
from client_pipeline.runtime.devices.shared_actor import end_actor, find_actor
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.transport.faults import FailedRound
from helpers.actor_cases import setup_of
from helpers.scripted_ray import PENDING, Reference, ScriptedActor, ScriptedRay, ended, failed

NODE = "ab" * 28
"""A Ray node's name is 56 hexadecimal digits."""


class OneNode(ScriptedRay):
    """A Ray with other runs' actors."""

    def __init__(self):
        super().__init__()
        self.namespaces = {}
        self.joined = []
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: self._names())

    def _names(self):
        return [{"name": name, "namespace": self.namespaces.get(name, "collapipe")} for name in self.named]

    def init(self, **options):
        self.joined.append(options)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: NODE)


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
    monkeypatch.setattr(actors, "check_accelerators", lambda *asked: seen.checked.append(asked))
    return seen


def setup(run="new", spread=False, **changes):
    placement = Placement(ray_address="10.0.0.9:6379", host="10.0.0.9", num_devices=3) if spread else Placement()
    return replace(setup_of(run), placement=placement, **changes)


def test_a_ray_where_nobody_answers_is_the_users_error(ray):
    ray.runs = False
    with pytest.raises(ValueError, match=r"this cluster.s Ray does not answer at 127\.0\.0\.1:1: .*collapipe join"):
        join_ray(Placement(ray_address="127.0.0.1:1"))
    assert ray.joined == []


@pytest.mark.parametrize(
    ("start", "changes", "least", "wait_s"),
    [
        (start_control_unit, {}, None, 60.0),
        (start_control_unit, {"resume_round": 4}, 1, 60.0),
        (restart_control_unit, {"lost_at": 5.0}, 1, 0.0),
        (restart_control_unit, {}, 1, 60.0),
    ],
)
def test_a_control_unit_outlives_its_starter_and_waits_for_its_devices(ray, devices, start, changes, least, wait_s):
    ray.next_actors = [unit := ScriptedActor(prepare={"num_examples": 5})]
    described = {"num_examples": 5, "machines": {}} if start is start_control_unit else None
    assert start(setup(spread=True, **changes)) == described
    assert devices.checked == ([] if described is None else [devices.joined, ("cpu", devices.joined)])
    assert devices.waits == [(3, wait_s, least)] and ("prepare",) in unit.asked
    [(_, options, (made_with,))] = ray.made
    assert made_with.absent == (1,) and options["name"] == "collapipe/new/cluster-0" and options["get_if_exists"]
    assert options["lifetime"] == "detached" and options["scheduling_strategy"].node_id == NODE
    assert not options["scheduling_strategy"].soft
    devices.joined = ValueError("none came")
    with pytest.raises(ControlUnitAbsent, match="cluster-0: the control unit cannot start again: none came"):
        restart_control_unit(setup(spread=True))


def test_actors_that_older_runs_left_for_the_cluster_are_ended_and_no_others(ray, devices):
    old = ["collapipe/old/cluster-0", "collapipe/old/cluster-0/device-1", "collapipe/silent/cluster-0"]
    others = ["collapipe/old/cluster-01", "collapipe/new/cluster-0/device-0", "collapipe/old", "another/old/cluster-0"]
    ray.named = {name: ScriptedActor(in_use=False) for name in [*old, *others, "collapipe/other/cluster-0"]}
    ray.named[old[2]].answers["in_use"] = PENDING
    ray.namespaces["collapipe/other/cluster-0"] = "somebody"
    ray.next_actors = [ScriptedActor(prepare={})]
    start_control_unit(setup())
    assert [name for name, actor in ray.named.items() if actor.killed] == old


def test_a_member_of_a_shared_actor_ends_alone_unless_its_process_does_not_answer(ray):
    ray.named = {"shared/0": (actor := ScriptedActor(names=["a"])), "collapipe/x": ScriptedActor()}
    end_actor(find_actor("a", "shared/0"))
    assert actor.asked == [("dismiss", "a")] and not actor.killed
    end_actor(find_actor("a", "shared/0"), with_its_process=True)
    end_actor(find_actor("collapipe/x"))
    assert actor.killed and ray.named["collapipe/x"].killed


def test_an_older_control_unit_in_its_round_is_waited_for_and_not_ended(ray, devices, monkeypatch):
    now, slept = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: (slept.append(s), now.__setitem__(0, now[0] + s)))
    monkeypatch.setattr(actors, "time", clock)
    monkeypatch.setattr(actors, "YIELD_S", 20.0)
    ray.named = {f"collapipe/old/cluster-0{part}": ScriptedActor(in_use=True) for part in ("/device-0", "")}
    with pytest.raises(ValueError, match="cluster 0: .* has been in a round of another run, old, for 20 s"):
        start_control_unit(setup())
    assert not any(actor.killed for actor in ray.named.values()) and ray.made == []
    assert 20.0 < sum(slept) <= 21.0


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


def test_a_control_unit_that_says_nothing_is_ended_and_lost(asked, ray, monkeypatch):
    signals, ended, end = [], [], actors.end_actor
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setattr(actors, "end_actor", lambda actor, **more: (ended.append(more), end(actor, **more)))
    unit = Unit("never", looks=99)
    unit.answers["alive"] = PENDING
    with pytest.raises(ControlUnitLost, match="collapipe/new/cluster-3: .* has given no sign of life for 8 s"):
        asked(unit)
    # Nobody knows its process; that of a shared actor, which would not dismiss a member, goes with it.
    assert unit.killed and signals == [] and ended == [{"with_its_process": True}]


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


def test_a_process_that_ended_is_lost_and_not_absent(asked):
    with pytest.raises(ControlUnitLost, match="cluster-3: the control unit's process ended") as found:
        asked(Unit(ended()))
    assert not isinstance(found.value, ControlUnitAbsent)


def test_a_round_is_waited_for_as_long_as_its_control_unit_says_that_it_lives(asked):
    result, waits, signs = asked(Unit("trained", looks=3), timeout_s=8.0)
    # The first sign may come late: a process that starts says nothing while it imports.
    assert (result, waits, signs) == ("trained", [5.0] * 4, [8.0] * 3)
    assert asked(Unit("trained", looks=2), timeout_s=100.0)[1:] == ([5.0] * 3, [100.0, 60.0])
    assert asked(Unit("trained", looks=1), timeout_s=2.0)[1:] == ([2.0] * 2, [2.0])


def test_the_result_of_a_round_that_was_begun_is_collected_later(ray):
    result = Reference(PENDING)
    ray.named["collapipe/new/cluster-3"] = unit = ScriptedActor(kept=[result])
    begin_round("new", 3, SimpleNamespace(round=7), 8.0, Placement())
    assert [entry[0] for entry in unit.asked if entry[0] != "alive"] == ["train_round", "keep"]
    [number, [kept]] = unit.asked[1][1:]
    assert number == 7 and isinstance(kept, Reference)

    def collect():
        return collect_round("new", 3, 7, 8.0, Placement(), wait_s=0.5)

    assert collect() is None and ray.waits_s[-1] == 0.5
    result.value = "trained"
    assert collect() == "trained"
    unit.answers["kept"] = []
    with pytest.raises(ControlUnitLost, match="the control unit was started again in round 7"):
        collect()
    ray.named.clear()
    with pytest.raises(ControlUnitLost, match=r"no control unit is running; .* it ended in round 7") as error:
        collect()
    assert not isinstance(error.value, ControlUnitAbsent)
