"""The best plans that there are: all segments, orders, device subsets and micro-batch numbers of a small cluster.

An oracle must not be the planner that it judges. Where links do not share a medium, the order of what happens on each
stage and link is given by the action lists, whatever it takes: so one simulated plan orders the events of all plans
with as many stages and micro-batches, and their times follow by sums and maxima over whole arrays of plans. That makes
a million plans a matter of seconds. What comes out is what the event simulator says of each, to the last digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.timetable.event_simulator import Event, simulate_pipeline
from strategies.dssda.evaluation import exceeds
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, LINK, OUTLET, STREAM
from strategies.estimation.measured_network import MeasuredNetwork, declared_times

Array = NDArray[np.float64]
_SCHEDULE = "gpipe"
_SENT_BY = {"z": "F", "g": "B"}
_AT_ONCE = 8192
"""Plans whose times are made at once: what is under way of them stays in the processor's cache."""


def best_plans(instance: Instance, network: MeasuredNetwork, count: int) -> list[ClusterPlan]:
    """Return the fastest plans of cluster 0 by the event simulator, the fastest first.

    Parameters
    ----------
    instance : with the network's times
    network : that is believed to the letter
    count : of plans that are returned
    """
    fastest: list[tuple[float, ClusterPlan]] = []
    segments = list(_segments(instance))
    for m in instance.m_set:
        for deltas, orders in segments:
            seconds = batch_seconds(instance, network, m, deltas, orders)
            for i in np.argsort(seconds, kind="stable")[:count]:
                order = tuple(int(k) for k in orders[i])
                parts = dict(zip(order, deltas[i].tolist(), strict=True))
                delta = tuple(parts.get(k, 0) for k in range(len(instance.clusters[0].devices)))
                fastest.append((float(seconds[i]), ClusterPlan(delta=delta, order=order, m=m)))
    fastest.sort(key=lambda entry: entry[0])
    return [plan for _, plan in fastest[:count]]


def _segments(instance: Instance) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """TEBs of the segments, and their devices, of all plans that memory allows: (P, S) each, some of one S at once."""
    memory = [float(mem) for mem in instance.device_arrays(0).mem]
    room = np.array([max(n for n in range(instance.L + 1) if not exceeds(n * instance.gamma0, mem)) for mem in memory])
    for num_segments in range(1, min(len(memory), instance.L) + 1):
        cuts = itertools.combinations(range(1, instance.L), num_segments - 1)
        deltas = np.array([np.diff([0, *cut, instance.L]) for cut in cuts])
        orders = np.array(list(itertools.permutations(range(len(memory)), num_segments)))
        pairs = np.repeat(deltas, len(orders), axis=0), np.tile(orders, (len(deltas), 1))
        fits = (pairs[0] <= room[pairs[1]]).all(axis=1)
        deltas, orders = pairs[0][fits], pairs[1][fits]
        for first in range(0, len(deltas), _AT_ONCE):
            yield deltas[first : first + _AT_ONCE], orders[first : first + _AT_ONCE]


def batch_seconds(
    instance: Instance, network: MeasuredNetwork, m: int, deltas: NDArray[np.int64], orders: NDArray[np.int64]
) -> Array:
    """Seconds of a batch under many plans with as many segments and micro-batches.

    Parameters
    ----------
    instance, network : see :func:`best_plans`
    m : micro-batches
    deltas, orders : (P, S), TEBs of the segments, and their devices

    Returns
    -------
    (P,), as :meth:`MeasuredNetwork.predict` has them, which may add what the simulator was seen to be off by [s].
    """
    times, cluster = declared_times(instance, 0), network.clusters[0]
    sizes, num_segments = micro_batch_sizes(instance.b, m), deltas.shape[1]
    share = instance.o_f / (instance.o_f + instance.o_b)

    def seconds(key: tuple[str, int], samples: int) -> float:
        time = cluster[key] if key[0] in (OUTLET, STREAM) else times[key]
        return 0.0 if time is None else time.fixed_s + samples * time.sample_s

    devices = range(len(instance.clusters[0].devices))
    by_size = {n: [np.array([seconds((kind, k), n) for k in devices]) for kind in (DEVICE, LINK)] for n in set(sizes)}
    # By stage, (S, P): a column of plans after plans would be read in steps of S.
    blocks, owners = np.ascontiguousarray(deltas.T), np.ascontiguousarray(orders.T)
    forward = {n: share * (blocks * teb_s[owners]) for n, (teb_s, _) in by_size.items()}
    backward = {n: (1 - share) * (blocks * teb_s[owners]) for n, (teb_s, _) in by_size.items()}
    link = {n: link_s[owners] / 2 for n, (_, link_s) in by_size.items()}
    ends: dict[tuple[str, int, int], Array] = {}
    free: dict[tuple[str, int] | int, Array] = {}
    zero = np.zeros(len(deltas))
    for event in _events(num_segments, m):
        n, place, key = sizes[event.micro_batch], event.place, (event.kind, event.place, event.micro_batch)
        if event.kind in _SENT_BY:
            sender = place if event.kind == "z" else place + 1
            began = ends.pop((_SENT_BY[event.kind], sender, event.micro_batch))
            takes = link[n][place] if place + 1 < num_segments else seconds((OUTLET, 0), n) / 2
            channel = event.kind, place
            ends[key] = free[channel] = np.maximum(began, free.get(channel, zero)) + takes
            if network.paced:
                free[sender] = ends[key]
            continue
        source = ("z", place - 1, event.micro_batch) if event.kind == "F" else ("g", place, event.micro_batch)
        if place == num_segments:
            takes = seconds((STREAM, 0), n) if event.kind == "F" else 0.0
        else:
            takes = (forward if event.kind == "F" else backward)[n][place]
        ends[key] = free[place] = np.maximum(ends.pop(source, zero), free.get(place, zero)) + takes
    # No gradient is sent from the first stage: a batch ends with its last pass, and nothing is under way then.
    return np.asarray(free[0])


@lru_cache(maxsize=256)
def _events(num_segments: int, m: int) -> list[Event]:
    """Passes and messages in an order in which all that each of them waits for comes before it."""
    passes, messages = np.ones((num_segments + 1, m)), np.ones((num_segments, m))
    return simulate_pipeline(
        _SCHEDULE, passes, passes, messages, messages, links="overlapping", answers_at_once=True
    ).events
