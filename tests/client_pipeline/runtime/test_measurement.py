"""Measurement of devices and links: fake clocks, links whose seconds are known, and actors that are threads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.runtime.devices import device_nodes, measurement
from client_pipeline.runtime.devices.measurement import (
    DeviceMeasurement,
    MeasuredDevice,
    MeasurementError,
    PassTimes,
    measure,
)
from client_pipeline.runtime.stage import tried_block
from client_pipeline.runtime.stage.stage import Stage
from helpers.clocks import Clock
from helpers.thread_ray import ThreadActor, ThreadRay

SPEC = transformer.spec(vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=2, decoder_layers=1)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (measurement, tried_block):
        monkeypatch.setattr(module, "time", made)
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

        monkeypatch.setattr(tried_block, "Stage", TimedStage)
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


@pytest.mark.parametrize(
    ("small_s", "overhead_s", "sample_s"), [(2.0, 1.0, 0.25), (1.25, 0.0, 0.3125), (9.0, 0.0, 0.3125)]
)
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
        for module in (measurement, device_nodes):
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


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, (1, 2)), (3, (1, 3)), (16, (4, 16))])
def test_nodes_are_measured_in_order_with_a_quarter_of_the_samples_first(cluster, batch_size, sizes):
    found, _, ray = cluster(node("b", "127.0.0.2"), node("a", "127.0.0.1"), batch_size=batch_size)
    assert [place for place, _ in ray.made] == ["a", "b"] and [(x.first, x.second) for x in found.links] == [(0, 1)]
    assert [(device.node, device.memory_bytes) for device in found.devices] == [
        ("127.0.0.1", 1200),
        ("127.0.0.2", 1200),
    ]
    assert {(device.small.samples, device.large.samples) for device in found.devices} == {sizes}


def test_a_device_that_fails_or_says_nothing_is_named_and_all_are_ended(cluster, monkeypatch):
    broken = replace(SPEC, config=SPEC.config | {"feed_forward": -1})
    with pytest.raises(MeasurementError, match="device 0: .*feed-forward: expected at least 1, found -1"):
        cluster(node("a"), spec=broken)
    monkeypatch.setattr(MeasuredDevice, "machine", lambda self: measurement.time.sleep(1.0))
    with pytest.raises(MeasurementError, match=r"device 0: no answer within 0\.01 s"):
        cluster(node("a"), timeout_s=0.01)
