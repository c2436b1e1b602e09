"""How devices and links are measured: fake clocks and links whose seconds are known, and actors that are threads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition import transformer
from client_pipeline.runtime import device_nodes, measurement, tried_block
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


def test_a_device_computes_with_the_threads_of_a_run_and_keeps_its_memory(monkeypatch):
    before, kept = torch.get_num_threads(), []
    monkeypatch.setattr(measurement, "keep_freed_memory", lambda: kept.append(1))
    try:
        MeasuredDevice(SPEC, before + 1)
        assert torch.get_num_threads() == before + 1 and kept == [1]
    finally:
        torch.set_num_threads(before)


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


def test_a_device_runs_what_a_family_carries_beside_its_samples(passes_of):
    spec = tiny_spec("deberta-v2", "sequence-classification")
    spec = replace(spec, config={**spec.config, "relative_attention": True, "position_buckets": 4})
    assert tried_block.carried_examples(spec) > 0
    found, _ = passes_of(lambda number, size: float(size), (1, 2), spec)
    assert [times.forward_s for times in found] == [1.0, 2.0]
