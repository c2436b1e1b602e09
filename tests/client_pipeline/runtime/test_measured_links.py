"""Measurement of the links between devices, over wires whose seconds are known."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ray import exceptions

from client_pipeline.runtime.devices import measurement
from client_pipeline.runtime.devices.measurement import MeasuredDevice, MeasurementError
from client_pipeline.runtime.transport import transport
from client_pipeline.runtime.transport.transport import GroupAddress
from helpers.clocks import Clock
from helpers.recovery_cases import SPEC


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measurement, "time", made)
    return made


class Wire:
    """A transport whose receives take the seconds that a test says."""

    def __init__(self, clock, rank, seconds):
        self.rank, self._clock, self._seconds = rank, clock, list(seconds)
        self.done = []
        self.closed = 0

    def receive(self, shape, peer, direction, number):
        self.done.append(("receive", shape, peer, direction, number))
        return SimpleNamespace(wait=self._wait)

    def _wait(self):
        self._clock.now += self._seconds.pop(0)
        self.done.append("arrived")
        return torch.zeros(3)

    def send(self, tensor, peer, direction, number):
        self.done.append(("send", tuple(tensor.shape), peer, direction, number))

    def flush(self):
        self.done.append("flush")

    def close(self):
        self.closed += 1


@pytest.fixture
def joined(monkeypatch, clock):
    def join(rank, seconds):
        wire = Wire(clock, rank, seconds)
        monkeypatch.setattr(measurement, "join_group", lambda address, rank: wire)
        device = MeasuredDevice(SPEC, torch.get_num_threads())
        device.join(None, rank)
        return device, wire

    return join


def test_a_round_trip_is_the_median_of_all_but_the_first(joined):
    device, wire = joined(0, [9.0, 1.0, 2.0, 30.0])
    assert device.exchange(3, 3) == 2.0
    forward, backward = measurement.FORWARD, measurement.BACKWARD
    first = [("receive", (3,), 1, backward, 1), ("send", (3,), 1, forward, 1), "arrived", "flush"]
    assert wire.done[:4] == first
    assert [entry[-1] for entry in wire.done if entry[0] == "send"] == [1, 2, 3, 4]


def test_the_other_device_sends_back_what_has_come_and_numbers_go_on(joined):
    device, wire = joined(1, [1.0] * 4)
    device.exchange(3, 1)
    device.exchange(3, 1)
    forward, backward = measurement.FORWARD, measurement.BACKWARD
    assert wire.done[:4] == [("receive", (3,), 0, forward, 1), "arrived", ("send", (3,), 0, backward, 1), "flush"]
    assert [entry[-1] for entry in wire.done if entry[0] == "send"] == [1, 2, 3, 4]


def test_a_device_leaves_one_link_before_the_next(joined):
    device, wire = joined(0, [1.0] * 2)
    device.exchange(3, 1)
    device.join(None, 0)
    assert wire.closed == 1
    device.leave()
    device.leave()
    assert wire.closed == 2


def answer(value):
    return SimpleNamespace(value=value)


class TimedDevice:
    """Half of a link whose round trip takes ``latency_s`` and the time of its bits."""

    def __init__(self, latency_s, rate_bit_s):
        self._latency_s, self._rate_bit_s = latency_s, rate_bit_s
        self.asked = []
        for name in ("join", "exchange", "leave"):
            setattr(self, name, SimpleNamespace(remote=self._method(name)))

    def _method(self, name):
        def ask(*arguments):
            self.asked.append((name, *arguments))
            if name == "exchange":
                return answer(self._latency_s + 2 * 32 * arguments[0] / self._rate_bit_s)
            return answer(None)

        return ask


class ReadyRay:
    """A Ray whose answers are there at once."""

    exceptions = exceptions

    def __init__(self, own_address="127.0.0.1"):
        self.util = SimpleNamespace(get_node_ip_address=lambda: own_address)
        self.waited_s = set()

    def get(self, answers, timeout):
        self.waited_s.add(timeout)
        return [answer.value for answer in answers]


def link_between(monkeypatch, devices, hosts=("127.0.0.1",) * 3, own_address="127.0.0.1"):
    opened = []
    ray = ReadyRay(own_address)
    monkeypatch.setattr(measurement, "ray", ray)
    monkeypatch.setattr(
        measurement, "open_meeting", lambda host, timeout_s: opened.append((host, timeout_s)) or SimpleNamespace(port=7)
    )
    link = measurement._measure_link(devices, hosts, 1, 2, 5, 8.0)
    assert ray.waited_s == {8.0}
    return link, opened


@pytest.mark.parametrize(
    ("rate_bit_s", "largest"),
    [(1e6, 2**14), (1e8, 2**18), (1e12, 2**23)],
)
def test_a_links_rate_and_latency_are_those_that_it_has(monkeypatch, rate_bit_s, largest):
    devices = [None, *(TimedDevice(1e-3, rate_bit_s) for _ in range(2))]
    link, opened = link_between(monkeypatch, devices)
    assert (link.first, link.second) == (1, 2)
    assert link.rate_bit_s == pytest.approx(rate_bit_s, rel=1e-9)
    assert link.latency_s == pytest.approx(1e-3 + 2 * 32 * 4 / rate_bit_s)
    address = GroupAddress(host="127.0.0.1", port=7, generation=5, size=2, timeout_s=4.0)
    assert opened == [("127.0.0.1", 8.0)]
    for rank, device in enumerate(devices[1:]):
        (begin, few, *growing, many, end) = device.asked
        assert begin == ("join", address, rank) and end == ("leave",)
        assert few == ("exchange", 4, 45) and many == ("exchange", largest, 9)
        # Fourfold, until a trip takes 50 ms; the largest message of all is not tried before.
        tried = [2 ** (14 + 2 * k) for k in range(5)]
        assert growing == [("exchange", size, 1) for size in tried if size <= largest]


def test_noise_that_hides_the_bits_leaves_them_all_of_the_time(monkeypatch):
    class Noisy(TimedDevice):
        def _method(self, name):
            seconds = {4: 0.25}
            ask = super()._method(name)
            return lambda *a: answer(seconds.get(a[0], 0.125)) if name == "exchange" else ask(*a)

    link, _ = link_between(monkeypatch, [None, Noisy(0, 1), Noisy(0, 1)])
    assert link.latency_s == 0.25
    assert link.rate_bit_s == 2 * 32 * (2**14 - 4) / 0.125


def test_a_link_that_cannot_be_measured_names_both_devices(monkeypatch):
    class Gone(TimedDevice):
        def _method(self, name):
            return lambda *_: SimpleNamespace(value=None, error=exceptions.RayActorError())

    def get(self, answers, timeout):
        raise answers[0].error

    monkeypatch.setattr(ReadyRay, "get", get)
    with pytest.raises(MeasurementError, match="link between the devices 1 and 2: device 1: its process ended"):
        link_between(monkeypatch, [None, Gone(0, 1), Gone(0, 1)])


def test_between_machines_a_member_listens_where_it_reaches_the_control_unit_from():
    # Where nothing is set up otherwise, the system reaches 0.0.0.0 from its own loopback.
    address = GroupAddress(host="0.0.0.0", port=1234, generation=0, size=2, timeout_s=1.0)
    assert transport.member_address(address) == "127.0.0.1"
    assert transport.member_address(replace(address, host="127.0.0.9")) == "127.0.0.9"
