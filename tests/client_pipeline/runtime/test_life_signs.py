"""Devices that are asked all the time whether they are there."""

import time

import pytest

from client_pipeline.runtime.devices import life_signs
from client_pipeline.runtime.devices.life_signs import LifeSigns
from helpers.patience import eventually
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
    seen = []

    def is_seen():
        seen[:] = signs.look()
        return holds(seen)

    eventually(is_seen, words=lambda: seen)
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


def test_devices_are_asked_while_a_round_goes_on_alone(devices):
    told = []
    signs = LifeSigns(lambda: devices, told.append)
    devices[0].stop_process()
    for _ in range(2):
        told.clear()
        with signs:
            eventually(lambda: any(told))
        number = len(told)
        time.sleep(0.1)
        assert len(told) == number and told[-1][0].device == 0


def test_one_whose_process_ends_is_told_at_once_and_no_longer_when_another_has_its_place(devices, monkeypatch):
    monkeypatch.setattr(life_signs, "SILENT_AFTER_S", 1e6)
    signs = LifeSigns(lambda: devices, lambda _: None)
    signs.look()
    devices[2].end_process()
    looked_for(signs, lambda seen: [(s.device, s.state) for s in seen] == [(2, "ended")])
    del devices[2]
    assert signs.look() == []
