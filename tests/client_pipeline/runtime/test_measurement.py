"""How devices and links are measured: fake clocks and links whose seconds are known, and actors that are threads."""

import contextlib
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ray import exceptions

from client_pipeline.partition import transformer
from client_pipeline.runtime import measurement, placement
from client_pipeline.runtime.measurement import (
    DeviceMeasurement,
    LinkMeasurement,
    MeasuredDevice,
    Measurement,
    MeasurementError,
    PassTimes,
    measure,
)
from client_pipeline.runtime.stage import Stage
from client_pipeline.runtime.transport import GroupAddress
from helpers.thread_ray import ThreadActor, ThreadRay
from helpers.tiny_models import tiny_spec

SPEC = transformer.spec(vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=2, decoder_layers=1)


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measurement, "time", made)
    return made


@pytest.fixture
def passes_of(monkeypatch, clock):
    """Time the passes of a stage that computes, on a clock which moves as a test says."""

    def run(forward_s, samples=(4, 16), spec=SPEC):
        sizes = []

        class TimedStage(Stage):
            def forward(self, step, micro_batch, x_BTD, mask_BT):
                assert mask_BT.all() and mask_BT.shape[1] == x_BTD.shape[1] == 5
                sizes.append(len(mask_BT))
                clock.now += forward_s(len(sizes), len(mask_BT))
                return super().forward(step, micro_batch, x_BTD, mask_BT)

            def backward(self, step, micro_batch, gradient_BTD, mask_BT):
                clock.now += 2 * forward_s(len(sizes), len(mask_BT))
                return super().backward(step, micro_batch, gradient_BTD, mask_BT)

        monkeypatch.setattr(measurement, "Stage", TimedStage)
        return MeasuredDevice(spec, torch.get_num_threads()).passes(5, samples), sizes

    return run


def test_passes_are_told_by_their_medians_without_the_first_one_that_allocates(passes_of):
    # The first of each size takes long, and one in between is disturbed.
    found, sizes = passes_of(lambda number, size: 50.0 if number in (1, 2, 5) else 0.25 * size)
    assert found == [
        PassTimes(samples=4, forward_s=1.0, backward_s=2.0),
        PassTimes(samples=16, forward_s=4.0, backward_s=8.0),
    ]
    assert sizes == [4, 16] * 6
    assert found[1].seconds == 12.0


def test_passes_are_repeated_for_two_seconds_and_fifty_times_at_most(passes_of):
    # A turn of both sizes takes 0.3 s: 2 s are over after the seventh.
    assert len(passes_of(lambda *_: 0.05)[1]) == 2 * 7
    assert len(passes_of(lambda *_: 0.001)[1]) == 2 * 51


def test_a_device_computes_with_the_threads_of_a_run_and_keeps_its_memory(monkeypatch):
    before, kept = torch.get_num_threads(), []
    monkeypatch.setattr(measurement, "keep_freed_memory", lambda: kept.append(1))
    try:
        MeasuredDevice(SPEC, before + 1)
        assert torch.get_num_threads() == before + 1 and kept == [1]
    finally:
        torch.set_num_threads(before)


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
        monkeypatch.setattr(measurement, "GlooTransport", lambda address, rank: wire)
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
        measurement, "open_store", lambda host, timeout_s: opened.append((host, timeout_s)) or SimpleNamespace(port=7)
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


@pytest.mark.parametrize(
    ("hosts", "own_address", "expected"),
    [
        (("10.0.0.1",) * 3, "10.0.0.1", "127.0.0.1"),
        (("10.0.0.1", "10.0.0.1", "10.0.0.2"), "10.0.0.1", "10.0.0.1"),
        (("10.0.0.1", "10.0.0.2", "10.0.0.2"), "10.0.0.1", "10.0.0.1"),
    ],
)
def test_devices_meet_on_the_loopback_where_nobody_else_needs_to_hear_them(monkeypatch, hosts, own_address, expected):
    devices = [None, TimedDevice(1e-3, 1e6), TimedDevice(1e-3, 1e6)]
    assert link_between(monkeypatch, devices, hosts, own_address)[1] == [(expected, 8.0)]


def test_a_link_that_cannot_be_measured_names_both_devices(monkeypatch):
    class Gone(TimedDevice):
        def _method(self, name):
            return lambda *_: SimpleNamespace(value=None, error=exceptions.RayActorError())

    def get(self, answers, timeout):
        raise answers[0].error

    monkeypatch.setattr(ReadyRay, "get", get)
    with pytest.raises(MeasurementError, match="link between the devices 1 and 2: device 1: its process ended"):
        link_between(monkeypatch, [None, Gone(0, 1), Gone(0, 1)])


@pytest.mark.parametrize(("small_s", "overhead_s", "sample_s"), [(2.0, 1.0, 0.25), (1.25, 0.0, 0.3125), (9.0, 0.0, 0.3125)])
def test_overhead_and_samples_add_up_to_the_large_micro_batchs_seconds(small_s, overhead_s, sample_s):
    times = [PassTimes(samples=n, forward_s=s / 5, backward_s=s * 4 / 5) for n, s in ((4, small_s), (16, 5.0))]
    found = DeviceMeasurement(node="a", frequency_hz=1e9, memory_bytes=1.0, small=times[0], large=times[1])
    assert found.overhead_s == pytest.approx(overhead_s, abs=1e-12)
    assert found.sample_s == pytest.approx(sample_s)


def test_every_device_has_a_link_to_the_next_and_the_last_one_to_the_first():
    assert [measurement._ring(n) for n in range(1, 5)] == [
        [],
        [(0, 1)],
        [(0, 1), (1, 2), (2, 0)],
        [(0, 1), (1, 2), (2, 3), (3, 0)],
    ]


def test_two_devices_share_their_one_link():
    one = LinkMeasurement(first=0, second=1, rate_bit_s=5.0, latency_s=0.0)
    ring = [one, LinkMeasurement(first=1, second=2, rate_bit_s=6.0, latency_s=0.0)]
    assert [Measurement(devices=[], links=[one]).rate_after(k) for k in (0, 1)] == [5.0, 5.0]
    assert [Measurement(devices=[], links=ring).rate_after(k) for k in (0, 1)] == [5.0, 6.0]


class Nodes(ThreadRay):
    """Nodes of a Ray on which devices are threads."""

    def __init__(self, nodes):
        super().__init__()
        self._nodes = nodes
        self.made = []
        self.initialized = True
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def nodes(self):
        return self._nodes

    def remote(self, cls):
        def options(num_cpus, scheduling_strategy):
            assert num_cpus == 0 and not scheduling_strategy.soft
            return SimpleNamespace(remote=lambda *args: self._place(scheduling_strategy.node_id, cls, args))

        return SimpleNamespace(options=options)

    def _place(self, node, cls, args):
        self.made.append((node[0], ThreadActor(cls, args)))
        return self.made[-1][1]

    def get(self, answers, timeout=None):
        return [ThreadRay.get(self, answer, timeout) for answer in answers]

    def is_initialized(self):
        return self.initialized


def node(letter, address="127.0.0.1", alive=True, **resources):
    return {"NodeID": 56 * letter, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


@pytest.fixture
def cluster(monkeypatch):
    """Measure nodes with next to no repetition."""
    monkeypatch.setattr(measurement, "_COMPUTE_BUDGET_S", 0.0)
    monkeypatch.setattr(measurement, "_LONG_TRIP_S", 0.0)
    monkeypatch.setattr(measurement, "clock_frequency", lambda: 2e9)
    monkeypatch.setattr(measurement, "available_memory", lambda: 1200)

    def run(*nodes, spec=SPEC, **options):
        ray = Nodes(list(nodes))
        for module in (measurement, placement):
            monkeypatch.setattr(module, "ray", ray)
        said = []
        options = {"length": 4, "batch_size": 8, "devices_per_node": 1, "timeout_s": 60.0, **options}
        try:
            return measure(spec, say=said.append, **options), said, ray
        finally:
            assert all(actor.has_ended for _, actor in ray.made)

    return run


def test_three_devices_of_one_machine_share_its_memory_and_form_a_ring(cluster):
    found, said, ray = cluster(node("a"), node("e", alive=False), devices_per_node=3)
    assert [place for place, _ in ray.made] == ["a"] * 3
    assert [(d.node, d.frequency_hz, d.memory_bytes) for d in found.devices] == [("127.0.0.1", 2e9, 400.0)] * 3
    assert all((d.small.samples, d.large.samples) == (2, 8) and d.large.seconds > 0 for d in found.devices)
    assert [(link.first, link.second) for link in found.links] == [(0, 1), (1, 2), (2, 0)]
    assert all(link.rate_bit_s > 0 and link.latency_s > 0 for link in found.links)
    devices = [f"device {k} on 127.0.0.1: one TEB" for k in range(3)]
    assert said == devices + [f"link between the devices {a} and {b}" for a, b in ((0, 1), (1, 2), (2, 0))]


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, (1, 2)), (2, (1, 2)), (3, (1, 3)), (16, (4, 16))])
def test_the_smaller_micro_batch_has_a_quarter_of_the_samples(cluster, batch_size, sizes):
    [device] = cluster(node("a"), batch_size=batch_size)[0].devices
    assert (device.small.samples, device.large.samples) == sizes


def test_nodes_are_measured_in_the_order_of_their_addresses(cluster):
    found, _, ray = cluster(node("b", "127.0.0.2"), node("a", "127.0.0.1"))
    assert [place for place, _ in ray.made] == ["a", "b"]
    assert [(device.node, device.memory_bytes) for device in found.devices] == [
        ("127.0.0.1", 1200),
        ("127.0.0.2", 1200),
    ]
    assert [(link.first, link.second) for link in found.links] == [(0, 1)]


def test_nodes_that_say_which_device_they_are_stand_for_those_alone(cluster):
    nodes = [node("a"), node("b", **{"collapipe-device-1": 1.0}), node("c", **{"collapipe-device-0": 1.0})]
    _, _, ray = cluster(*nodes, devices_per_node=2)
    assert [place for place, _ in ray.made] == ["c", "b"]


def test_a_device_that_fails_is_named_and_all_are_ended(cluster):
    broken = replace(SPEC, config=SPEC.config | {"feed_forward": -1})
    with pytest.raises(MeasurementError, match="device 0: .*feed-forward: expected at least 1, found -1"):
        cluster(node("a"), spec=broken)


def test_a_device_that_says_nothing_is_named(cluster, monkeypatch):
    monkeypatch.setattr(MeasuredDevice, "machine", lambda self: measurement.time.sleep(1.0))
    with pytest.raises(MeasurementError, match=r"device 0: no answer within 0\.01 s"):
        cluster(node("a"), timeout_s=0.01)


class OwnRay:
    """As much of Ray as joining a cluster needs."""

    def __init__(self, *, runs):
        self.runs = runs
        self.calls = []

    def is_initialized(self):
        return self.runs

    def init(self, **options):
        self.calls.append(options)

    def shutdown(self):
        self.calls.append("shutdown")


def test_the_ray_that_runs_here_is_used_and_kept(monkeypatch):
    monkeypatch.setattr(measurement, "ray", ray := OwnRay(runs=True))
    with measurement._ray("10.0.0.1:6379"):
        pass
    assert ray.calls == []


def test_a_ray_of_its_own_is_started_where_no_address_is_given(monkeypatch):
    monkeypatch.setattr(measurement, "ray", ray := OwnRay(runs=False))

    @contextlib.contextmanager
    def private(namespace):
        ray.calls.append(namespace)
        yield
        ray.calls.append("ended")

    monkeypatch.setattr(measurement, "private_ray", private)
    with measurement._ray(""):
        assert ray.calls == ["collapipe"]
    assert ray.calls == ["collapipe", "ended"]


def test_the_ray_at_an_address_is_joined_and_left(monkeypatch):
    monkeypatch.setattr(measurement, "ray", ray := OwnRay(runs=False))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(KeyError), measurement._ray(address):
            [joined] = ray.calls
            assert (joined["address"], joined["namespace"]) == (address, "collapipe")
            raise KeyError
    assert ray.calls[1:] == ["shutdown"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_an_address_where_no_ray_answers_is_refused_before_ray_is_asked(monkeypatch, address):
    monkeypatch.setattr(measurement, "ray", ray := OwnRay(runs=False))
    with (
        pytest.raises(ValueError, match=f"--address: no Ray cluster answers at '{address}'"),
        measurement._ray(address),
    ):
        pass
    assert ray.calls == []


def test_a_device_runs_what_a_family_carries_beside_its_samples(passes_of):
    spec = tiny_spec("deberta-v2", "sequence-classification")
    spec = replace(spec, config={**spec.config, "relative_attention": True, "position_buckets": 4})
    assert measurement.carried_examples(spec) > 0
    found, _ = passes_of(lambda number, size: float(size), (1, 2), spec)
    assert [times.forward_s for times in found] == [1.0, 2.0]
