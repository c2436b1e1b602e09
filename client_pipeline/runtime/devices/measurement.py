"""Measurement of real devices by Ray actors: seconds of one TEB, memory, and the links between them.

Two batch sizes separate the time per sample from the overhead of a micro-batch; two message sizes separate a link's
rate from its latency::

    seconds of a TEB       = overhead + samples * seconds per sample
    seconds of a round trip = latency + bits there and back / rate

Devices compute one after the other: those that share a machine would share its cores.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.device_nodes import check_answers, device_nodes
from client_pipeline.runtime.devices.shared_actor import NAMESPACE
from client_pipeline.runtime.ray.machine import available_memory, clock_frequency
from client_pipeline.runtime.ray.placement import ACTOR_CPUS
from client_pipeline.runtime.ray.private_ray import private_ray
from client_pipeline.runtime.stage.memory import keep_freed_memory
from client_pipeline.runtime.stage.tried_block import TriedBlock
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.shared_process import join_group, open_meeting
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD, GroupAddress, Transport

_COMPUTE_BUDGET_S = 2.0
"""A device's passes are repeated for about this long."""
_LEAST_PASSES, _MOST_PASSES = 5, 50
_SMALL_FLOATS = 4
_FIRST_FLOATS, _MOST_FLOATS = 2**14, 2**23
"""Floats of a large message: it grows fourfold from 64 KiB to 32 MiB, until its round trip takes long enough."""
_LONG_TRIP_S = 0.05
_ROUND_TRIPS = 9


class MeasurementError(RuntimeError):
    """A device could not be measured; the message names it and the cause."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """One TEB's passes of one micro-batch, medians."""

    samples: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward [s]."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class DeviceMeasurement:
    """One device."""

    node: str
    """Address of its machine."""
    frequency_hz: float
    """Clock as the system says [cycle/s]."""
    memory_bytes: float
    """Its share of the free memory of its machine [byte]."""
    small: PassTimes
    large: PassTimes
    """At the batch size asked for."""

    @property
    def overhead_s(self) -> float:
        """Seconds of a TEB for a micro-batch beside its samples: 0 where the measurement shows none."""
        return max(self.large.seconds - self.large.samples * self._slope, 0.0)

    @property
    def sample_s(self) -> float:
        """Seconds of a TEB for one sample more; with the overhead it gives the large micro-batch's time exactly."""
        return (self.large.seconds - self.overhead_s) / self.large.samples

    @property
    def _slope(self) -> float:
        slope = (self.large.seconds - self.small.seconds) / (self.large.samples - self.small.samples)
        # No faster with more samples: then noise is all there is, and all of the time belongs to the samples.
        return slope if slope > 0 else self.large.seconds / self.large.samples


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """The link between two devices, there and back."""

    first: int
    second: int
    """Indices of the devices."""
    rate_bit_s: float
    """Rate of either direction [bit/s]."""
    latency_s: float
    """Latency of both directions together: a round trip with next to nothing in it [s]."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """All devices and the links between neighbours."""

    devices: list[DeviceMeasurement]
    links: list[LinkMeasurement]
    """A ring, the link after device k at place k; one for two devices, none for one."""

    def rate_after(self, device: int) -> float:
        """Rate of the link to the next device of the ring [bit/s]."""
        return self.links[min(device, len(self.links) - 1)].rate_bit_s


class MeasuredDevice:
    """The Ray actor that stands for one device."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._spec = spec
        self._transport: Transport | None = None
        self._message = 0

    def machine(self) -> tuple[float, int]:
        """Clock [cycle/s] and free memory [byte] of the machine."""
        return clock_frequency(), available_memory()

    def passes(self, length: int, samples: Sequence[int]) -> list[PassTimes]:
        """Time one TEB's passes, all sizes in turn so that a slow moment touches them alike."""
        block = TriedBlock(self._spec)
        times: dict[int, list[tuple[float, float]]] = {size: [] for size in samples}
        until = time.monotonic() + _COMPUTE_BUDGET_S
        for turn in range(_MOST_PASSES + 1):
            if turn > _LEAST_PASSES and time.monotonic() > until:
                break
            for size in samples:
                passes = block.times(torch.ones(size, length, dtype=torch.bool))
                if turn:  # The first pass allocates.
                    times[size].append(passes)
        return [
            PassTimes(
                samples=size,
                forward_s=statistics.median(forward for forward, _ in times[size]),
                backward_s=statistics.median(backward for _, backward in times[size]),
            )
            for size in samples
        ]

    def join(self, address: GroupAddress, rank: int) -> None:
        """Meet the other device."""
        self.leave()
        self._transport, self._message = join_group(address, rank), 0

    def exchange(self, num_floats: int, trips: int) -> float:
        """Send a tensor there and back, both devices at once; the median round trip as rank 0 sees it [s]."""
        assert self._transport is not None
        transport, leads = self._transport, self._transport.rank == 0
        peer = 1 - transport.rank
        arrives, leaves = (BACKWARD, FORWARD) if leads else (FORWARD, BACKWARD)
        seconds, tensor = [], torch.zeros(num_floats)
        for _ in range(trips + 1):
            self._message += 1
            incoming = transport.receive((num_floats,), peer, arrives, self._message)
            start = time.perf_counter()
            if leads:
                transport.send(tensor, peer, leaves, self._message)
                incoming.wait()
            else:
                transport.send(incoming.wait(), peer, leaves, self._message)
            transport.flush()
            seconds.append(time.perf_counter() - start)
        # The first one opens the connection.
        return statistics.median(seconds[1:])

    def leave(self) -> None:
        """Part from the other device."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def measure(
    spec: ModelSpec,
    *,
    length: int,
    batch_size: int,
    devices_per_node: int,
    address: str = "",
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure the nodes of a Ray cluster; one that runs in this process already, or else a local one for the time.

    Parameters
    ----------
    spec : the model, whose first TEB is run
    length : T, tokens of a sample, none of them padding
    batch_size : b, the larger micro-batch (2 for b = 1: two sizes must differ); the smaller one has a quarter
    devices_per_node : how many devices each node stands for
    address : ``HOST:PORT`` or ``auto`` of an existing Ray cluster
    timeout_s : longest wait for one answer of a device
    say : told what is being measured

    Raises
    ------
    ValueError
        If no Ray answers at the address.
    MeasurementError
        If a device ended, failed or was silent.
    """
    threads = RuntimeConfig().threads
    with _ray(address):
        # Nodes that say which device they are stand for that one, and the others for none.
        named = device_nodes()
        nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: str(n["NodeManagerAddress"]))
        places = [named[k] for k in sorted(named)] or [node for node in nodes for _ in range(devices_per_node)]
        hosts = [str(node["NodeManagerAddress"]) for node in places]
        actors: list[Any] = []
        try:
            for node in places:
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = ray.remote(MeasuredDevice).options(num_cpus=ACTOR_CPUS, scheduling_strategy=where)
                actors.append(options.remote(spec, threads))
            devices = []
            sharing = Counter(node["NodeID"] for node in places)
            for k, (actor, node) in enumerate(zip(actors, places, strict=True)):
                say(f"device {k} on {hosts[k]}: one TEB")
                frequency, memory = _answers(k, timeout_s, actor.machine.remote())[0]
                sizes = (max(batch_size // 4, 1), max(batch_size, 2))
                small, large = _answers(k, timeout_s, actor.passes.remote(length, sizes))[0]
                devices.append(
                    DeviceMeasurement(
                        node=hosts[k],
                        frequency_hz=frequency,
                        memory_bytes=memory / sharing[node["NodeID"]],
                        small=small,
                        large=large,
                    )
                )
            links: list[LinkMeasurement] = []
            for first, second in _ring(len(actors)):
                say(f"link between the devices {first} and {second}")
                links.append(_measure_link(actors, hosts, first, second, len(links), timeout_s))
            return Measurement(devices=devices, links=links)
        finally:
            for actor in actors:
                ray.kill(actor)


def _ring(num_devices: int) -> list[tuple[int, int]]:
    if num_devices < 3:
        return [(0, 1)][: num_devices - 1]
    return [(k, (k + 1) % num_devices) for k in range(num_devices)]


def _measure_link(
    actors: Sequence[Any], hosts: Sequence[str], first: int, second: int, generation: int, timeout_s: float
) -> LinkMeasurement:
    own_address = ray.util.get_node_ip_address()
    # Gloo listens on the loopback where that suffices.
    host = "127.0.0.1" if hosts[first] == hosts[second] == own_address else own_address
    pair = [actors[first], actors[second]]

    def first_answer(references: list[Any]) -> Any:
        return _answers(first, timeout_s, *references)[0]

    def trip(num_floats: int, trips: int) -> float:
        return float(first_answer([actor.exchange.remote(num_floats, trips) for actor in pair]))

    try:
        meeting = open_meeting(host, timeout_s)
        address = GroupAddress(
            host=host,
            port=meeting.port,
            generation=generation,
            size=2,
            timeout_s=timeout_s / 2,
            secure=NodeTls.from_environment() is not None,
        )
        first_answer([actor.join.remote(address, rank) for rank, actor in enumerate(pair)])
        latency = trip(_SMALL_FLOATS, 5 * _ROUND_TRIPS)
        num_floats = _FIRST_FLOATS
        while num_floats < _MOST_FLOATS and trip(num_floats, 1) < _LONG_TRIP_S:
            num_floats *= 4
        num_floats = min(num_floats, _MOST_FLOATS)
        seconds = trip(num_floats, _ROUND_TRIPS)
        first_answer([actor.leave.remote() for actor in pair])
    except MeasurementError as error:
        raise MeasurementError(f"link between the devices {first} and {second}: {error}") from error
    bits = 2 * 32.0 * (num_floats - _SMALL_FLOATS)
    # Noise may hide the bits of a large message behind the latency: then all of its time is theirs.
    return LinkMeasurement(
        first=first,
        second=second,
        rate_bit_s=bits / (seconds - latency if seconds > latency else seconds),
        latency_s=latency,
    )


def _answers(device: int, timeout_s: float, *references: Any) -> list[Any]:
    try:
        return list(ray.get(list(references), timeout=timeout_s))
    except ray.exceptions.GetTimeoutError as error:
        raise MeasurementError(f"device {device}: no answer within {timeout_s:g} s") from error
    except ray.exceptions.RayActorError as error:
        raise MeasurementError(f"device {device}: its process ended: {error}") from error
    except ray.exceptions.RayTaskError as error:
        raise MeasurementError(f"device {device}: {error.cause or error}") from error


@contextlib.contextmanager
def _ray(address: str) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    if not address:
        with private_ray(namespace=NAMESPACE):
            yield
        return
    try:
        check_answers(address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--address: no Ray cluster answers at {address!r}; expected HOST:PORT as ray start --head printed it, "
            f"or auto on one of its nodes: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
