"""Segments that follow a rule, not a planner; and decisions as the plans of a plan file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, uniform_plan, whole_blocks
from strategies.dssda.answer import Answer, SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance

_MICRO_BATCHES = 8
"""Of the rules here: DSSDA alone chooses m."""


def uniform_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """The ``uniform`` plan of a cluster; None if memory does not allow it (C7)."""
    devices = instance.device_arrays(cluster)
    try:
        plan = uniform_plan(
            speed=list(devices.phi * devices.f),
            memory=list(devices.mem),
            block_memory=instance.gamma0,
            num_blocks=instance.L,
            batch_size=instance.b,
        )
    except ValueError:
        return None
    return choice_of(instance, cluster, plan)


def even_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """TEBs even over the min(K, L) fastest devices, larger parts to faster ones; None if C7 does not allow it."""
    num_segments = min(len(instance.clusters[cluster].devices), instance.L)
    return _on_fastest(instance, cluster, even_parts(instance.L, num_segments))


def proportional_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """TEBs in proportion to phi_k f_k over the min(K, L) fastest devices, between 1 and what memory holds.

    Rounded by the largest remainder. None if C7 does not allow it.
    """
    devices = instance.device_arrays(cluster)
    fastest = _fastest(instance, cluster)
    speed, caps = (devices.phi * devices.f)[fastest], _capacities(instance, cluster)[fastest]
    if caps.min() < 1 or caps.sum() < instance.L:
        return None
    quota = instance.L * speed / speed.sum()
    parts = np.clip(np.floor(quota), 1, caps).astype(int)
    # Clipping moved TEBs about: hand out or take back one at a time where the quota is missed most.
    while (missing := instance.L - int(parts.sum())) != 0:
        step = 1 if missing > 0 else -1
        possible = parts < caps if step > 0 else parts > 1
        gap = np.where(possible, step * (quota - parts), -np.inf)
        parts[int(np.argmax(gap))] += step
    return _on_fastest(instance, cluster, parts.tolist())


def choice_of(instance: Instance, cluster: int, plan: ClusterPlan) -> SegmentChoice:
    """A plan's segments as a choice, with their time."""
    last = plan.segments()[-1].device if instance.names_last else None
    seconds = pipeline_seconds(instance, cluster, plan.delta, plan.m, last)
    return SegmentChoice(plan.delta, plan.m, last, seconds)


def cluster_plans(instance: Instance, answer: Answer) -> list[ClusterPlan]:
    """An answer as the plans of a plan file.

    A cluster that is not selected keeps its uniform segments, unused; or all TEBs on its fastest device, where even
    these do not fit.
    """
    plans = []
    for n, cluster in enumerate(answer.clusters):
        devices = instance.device_arrays(n)
        speed = devices.phi * devices.f
        choice = cluster.choice or uniform_choice(instance, n)
        if choice is None:
            assert not cluster.selected
            choice = SegmentChoice(
                tuple(instance.L * (k == int(np.argmax(speed))) for k in range(len(speed))), 1, None, 0
            )
        plans.append(
            ClusterPlan(
                delta=choice.delta,
                order=choice.order(speed),
                m=choice.m,
                selected=cluster.selected,
                channel=cluster.channel,
                power_w=cluster.power_w,
            )
        )
    return plans


def even_parts(num_blocks: int, num_segments: int) -> list[int]:
    """Sizes of segments that differ by at most one TEB, larger first."""
    share, larger = divmod(num_blocks, num_segments)
    return [share + 1] * larger + [share] * (num_segments - larger)


def plan_on_fastest(instance: Instance, cluster: int, parts: Sequence[int], m: int) -> ClusterPlan:
    """Parts on the fastest devices, fastest first, whatever their memory holds."""
    order = tuple(_fastest(instance, cluster)[: len(parts)])
    delta = [0] * len(instance.clusters[cluster].devices)
    for device, part in zip(order, parts, strict=True):
        delta[device] = part
    return ClusterPlan(delta=tuple(delta), order=order, m=m)


def _on_fastest(instance: Instance, cluster: int, parts: Sequence[int]) -> SegmentChoice | None:
    """The same with m = min(8, b); None if C7 does not allow it."""
    plan = plan_on_fastest(instance, cluster, parts, min(_MICRO_BATCHES, instance.b))
    if any(part > cap for part, cap in zip(plan.delta, _capacities(instance, cluster), strict=True)):
        return None
    return choice_of(instance, cluster, plan)


def _fastest(instance: Instance, cluster: int) -> list[int]:
    """The min(K, L) fastest devices, fastest first."""
    devices = instance.device_arrays(cluster)
    return [int(k) for k in np.argsort(-devices.phi * devices.f, kind="stable")[: instance.L]]


def _capacities(instance: Instance, cluster: int) -> np.ndarray:
    """TEBs that each device's memory holds, (K,)."""
    memory = instance.device_arrays(cluster).mem
    return np.array([whole_blocks(each, instance.gamma0, instance.L) for each in memory])
