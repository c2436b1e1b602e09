"""Segments of TEBs that cost differently, under Eq. (15): D = (S + m - 1) max t_k - max tau_k, exact.

A segment's time depends on which TEBs it has, so the order of the devices counts. Let B(A, j) be the least max t_k with
which the set A of devices, each with at least one TEB, holds the first j TEBs, in whatever order of the devices. The
last one of them, k, has the TEBs i to j - 1:

    B(A, j) = min over k in A and i < j of max(B(A without k, i), t_k(i, j)),     B({}, 0) = 0

where t_k(i, j) = a_k (w_i + ... + w_(j-1)) + tau_k, and infinite where memory (C7) or energy (C9) forbids the segment.
D follows from B(A, L) for each A, and max tau_k is that of A. All m go together. There are 2^K sets: clusters of more
devices count each TEB as the costliest, and so do all whose method needs equal TEBs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits

MOST_DEVICES = 8
"""Devices of a cluster up to which TEBs are told apart."""


def counted_tebs(instance: Instance, obstacle: str = "") -> tuple[Instance, str]:
    """Return the problem as it is planned, and how it counts its TEBs, in words; empty: they cost the same.

    Parameters
    ----------
    instance : of the round
    obstacle : of whoever plans by it: the reason why it cannot tell TEBs apart; empty: it can
    """
    if not instance.teb_shares:
        return instance, ""
    words = f"TEBs cost from {min(instance.teb_shares):.0%} of the costliest to all of it"
    if not (obstacle := obstacle or _obstacle(instance)):
        return instance, f"{words}; the plan counts each by itself"
    return replace(instance, teb_shares=()), f"{words}; the plan counts each as the costliest: {obstacle}"


def _obstacle(instance: Instance) -> str:
    """Return why the segments of least time need equal TEBs; empty: they do not."""
    if instance.latency != "eq15":
        return 'the exact method for latency = "flowshop" needs equal TEBs'
    if instance.wJ:
        return "the exact method for a price of energy needs equal TEBs"
    most = max(len(cluster.devices) for cluster in instance.clusters)
    if most > MOST_DEVICES:
        return f"a cluster has {most} devices, and TEBs are told apart on at most {MOST_DEVICES}"
    return ""


def unequal_choices(instance: Instance, limits: Limits) -> dict[int, SegmentChoice]:
    """Choices by S of one cluster; see :class:`strategies.dssda.segments.SegmentTable`.

    Raises
    ------
    ValueError
        For a problem with ``teb_shares`` that :func:`counted_tebs` takes off.
    """
    if obstacle := _obstacle(instance):
        raise ValueError(f"teb_shares: {obstacle}; plan the problem that counted_tebs returns")
    search = _Search(instance, limits)
    choices = {}
    for size in instance.segment_range(limits.cluster):
        choice = search.best(size)
        if choice is not None:
            choices[size] = choice
    return choices


class _Search:
    """B(A, j) for all sets A and all m, (M, L + 1) each."""

    def __init__(self, instance: Instance, limits: Limits) -> None:
        self._instance, self._cluster = instance, limits.cluster
        self._link = limits.link_s
        self._num_devices = len(limits.memory_cap)
        self._stages = [self._stage_seconds(limits, k) for k in range(self._num_devices)]
        most = max(instance.segment_range(limits.cluster), default=0)
        empty = np.full((len(instance.m_set), instance.L + 1), np.inf)
        empty[:, 0] = 0.0
        self._bottlenecks = {0: empty}
        for devices in range(1, 1 << self._num_devices):
            if devices.bit_count() <= most:
                ends = [self._with_last(devices, k).min(axis=1) for k in _members(devices)]
                self._bottlenecks[devices] = np.min(ends, axis=0)

    def _stage_seconds(self, limits: Limits, k: int) -> Array:
        """t_k(i, j) of the TEBs i to j - 1, (M, L + 1, L + 1) [s]."""
        work = np.concatenate([[0.0], np.cumsum(self._instance.teb_shares)])
        load, count = work - work[:, None], np.arange(len(work)) - np.arange(len(work))[:, None]
        most = np.broadcast_to(limits.energy_cap[:, k, None], (len(limits.energy_cap), len(work))).copy()
        most[:, -1] = limits.last_energy_cap[:, k]
        allowed = (count >= 1) & (count <= limits.memory_cap[k]) & (load <= most[:, None, :])
        seconds = limits.teb_s[:, k, None, None] * load + self._link[:, k, None, None]
        return np.where(allowed, seconds, np.inf)

    def _with_last(self, devices: int, k: int) -> Array:
        """The least max t_k where device k has the TEBs i to j - 1 and the others those before, (M, L + 1, L + 1)."""
        return np.maximum(self._bottlenecks[devices & ~(1 << k)][:, :, None], self._stages[k])

    def best(self, size: int) -> SegmentChoice | None:
        """Return the choice of least D with S segments; None: there is none."""
        num_micro_batches = np.array(self._instance.m_set)
        least, place = np.inf, (0, 0)
        for devices, bottleneck in self._bottlenecks.items():
            if devices.bit_count() != size:
                continue
            tail = self._link[:, _members(devices)].max(axis=1) if self._instance.tail == "last" else 0.0
            seconds = (size + num_micro_batches - 1) * bottleneck[:, -1] - tail
            row = int(np.argmin(seconds))
            if seconds[row] < least:
                least, place = float(seconds[row]), (devices, row)
        return self._choice(*place) if np.isfinite(least) else None

    def _choice(self, devices: int, row: int) -> SegmentChoice:
        """Return the segments that attain B(A, L) at a place of m."""
        instance, end = self._instance, self._instance.L
        delta, order = [0] * self._num_devices, list[int]()
        while devices:
            bottleneck = self._bottlenecks[devices][row, end]
            k, first = next(
                (k, int(np.argmin(column)))
                for k in _members(devices)
                if (column := self._with_last(devices, k)[row, :, end]).min() == bottleneck
            )
            delta[k], end, devices = end - first, first, devices & ~(1 << k)
            order.insert(0, k)
        m, last = instance.m_set[row], order[-1] if instance.names_last else None
        seconds = pipeline_seconds(instance, self._cluster, instance.loads(delta, order), m, last)
        return SegmentChoice(tuple(delta), m, last, seconds, tuple(order))


def _members(devices: int) -> list[int]:
    return [k for k in range(devices.bit_length()) if devices >> k & 1]
