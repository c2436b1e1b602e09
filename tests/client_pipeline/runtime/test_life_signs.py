"""Devices that are asked all the time whether they are there."""

import time

import pytest

from client_pipeline.link.cluster_news import LifeSign
from client_pipeline.runtime import life_signs
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.runtime.life_signs import LifeSigns
from client_pipeline.runtime.round_faults import RoundFaults
from client_pipeline.runtime.shared_actor import MemberHandle
from helpers.thread_ray import run_in_threads

QUICK_S = 0.15


class Device:
    def alive(self):
        return 1, "here"


@pytest.fixture
def devices(monkeypatch):
    ray = run_in_threads(monkeypatch)
    monkeypatch.setattr(life_signs, "SILENT_AFTER_S", QUICK_S)
    monkeypatch.setattr(life_signs, "LOOK_S", 0.02)
    made = {n: ray.remote()(Device).options(name=str(n)).remote() for n in range(3)}
    yield made
    for actor in made.values():
        actor.end_process()


def looked_for(signs, holds):
    deadline = time.monotonic() + 60
    while not holds(seen := signs.look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen


def test_devices_that_answer_are_not_told_of(devices):
    signs = LifeSigns(lambda: devices, lambda _: None)
    begun = time.monotonic()
    while time.monotonic() - begun < 3 * QUICK_S:
        signs.look()
        time.sleep(0.01)
    looked_for(signs, lambda seen: seen == [])


def test_one_that_is_stopped_is_silent_for_longer_and_longer_and_then_there_again(devices):
    signs, begun = LifeSigns(lambda: devices, lambda _: None), time.monotonic()
    signs.look()
    devices[1].stop_process()
    (first,) = looked_for(signs, lambda seen: [(s.device, s.state) for s in seen] == [(1, "silent")])
    (later,) = looked_for(signs, lambda seen: seen and seen[0].seconds >= first.seconds + 0.2)
    assert first.seconds >= QUICK_S / 2 and later.state == "silent"
    # Not since the machine started, or the like.
    assert later.seconds <= time.monotonic() - begun + 0.1
    devices[1].continue_process()
    looked_for(signs, lambda seen: seen == [])


def test_one_whose_process_ends_is_told_at_once_and_no_longer_when_another_has_its_place(devices, monkeypatch):
    monkeypatch.setattr(life_signs, "SILENT_AFTER_S", 1e6)
    signs = LifeSigns(lambda: devices, lambda _: None)
    signs.look()
    devices[2].end_process()
    looked_for(signs, lambda seen: [(s.device, s.state) for s in seen] == [(2, "ended")])
    del devices[2]
    assert signs.look() == []


def test_they_are_asked_while_a_round_goes_on_alone(devices):
    told = []
    signs = LifeSigns(lambda: devices, told.append)
    devices[0].stop_process()
    with signs:
        deadline = time.monotonic() + 60
        while not any(told):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    number = len(told)
    time.sleep(0.2)
    assert len(told) == number and told[-1][0].device == 0


def test_a_process_is_asked_once_for_all_clusters_and_devices_in_it(monkeypatch):
    monkeypatch.setattr(life_signs, "LOOK_S", 1e6)
    ray = run_in_threads(monkeypatch)
    asked = []

    class Shared:
        def alive(self):
            asked.append(time.monotonic())

    actor = ray.remote()(Shared).options(name="shared/0").remote()
    try:
        clusters = [
            LifeSigns(lambda n=n: {d: MemberHandle(actor, f"cluster-{n}/device-{d}") for d in range(5)}, lambda _: None)
            for n in range(4)
        ]
        for signs in clusters:
            looked_for(signs, lambda seen: seen == [])
            while not asked:
                time.sleep(0.01)
        assert len(asked) == 1
        monkeypatch.setattr(life_signs, "LOOK_S", 0.02)
        monkeypatch.setattr(life_signs, "SILENT_AFTER_S", QUICK_S)
        time.sleep(0.03)
        actor.end_process()
        for signs in clusters:
            looked_for(signs, lambda seen: [(s.device, s.state) for s in seen] == [(d, "ended") for d in range(5)])
    finally:
        actor.end_process()


class Link:
    """Notes what is told."""

    cuts = ()

    def __init__(self):
        self.told = []

    def tell(self, news):
        self.told.append(news)


class Recovery:
    round = 4

    def __init__(self):
        self.all_records = []


def test_changes_are_told_at_once_and_otherwise_a_heartbeat(monkeypatch):
    clock = type("Clock", (), {"now": 100.0, "monotonic": lambda self: self.now, "time": lambda self: self.now})()
    monkeypatch.setattr("client_pipeline.runtime.round_faults.time", clock)
    recovery, link = Recovery(), Link()
    faults = RoundFaults(recovery, 1, None, None)
    faults.begin_round(4)
    faults.tell([])
    assert link.told == []
    faults.begin_link(link)
    for _ in range(3):
        faults.tell([])
    assert len(link.told) == 1
    faults.tell([LifeSign(0, "silent", 0.8)])
    faults.tell([LifeSign(0, "silent", 1.1)])
    assert len(link.told) == 2
    recovery.all_records = [FaultRecord(kind="freeze", cluster=1, round=4, device=0, recovered=False)]
    faults.tell([LifeSign(0, "silent", 1.3)])
    assert len(link.told) == 3 and '"freeze"' in link.told[-1]
    clock.now += 0.6
    faults.tell([LifeSign(0, "silent", 1.9)])
    assert len(link.told) == 4 and "1.9" in link.told[-1]
    faults.tell_end()
    faults.tell([])
    assert len(link.told) == 5 and '"is_over": true' in link.told[-1]
