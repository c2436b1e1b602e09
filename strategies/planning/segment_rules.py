"""Segments that follow a rule, not a planner; and decisions as the plans of a plan file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, even_parts, rounded_parts, uniform_plan, whole_blocks
from strategies.dssda.answer import Answer, SegmentChoice
from strategies.dssda.evaluation import pipeline_seconds
from strategies.dssda.instance import Instance

_MICRO_BATCHES = 8
"""Micro-batches of the rules here: DSSDA alone chooses m."""


def uniform_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """Return the ``uniform`` plan of a cluster; None if memory does not allow it (C7)."""
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
    """Spread TEBs evenly over the min(K, L) fastest devices, larger parts on faster ones; None if C7 forbids it."""
    num_segments = min(len(instance.clusters[cluster].devices), instance.L)
    return _on_fastest(instance, cluster, even_parts(instance.L, num_segments))


def proportional_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """Spread TEBs in proportion to phi_k f_k over the min(K, L) fastest devices, from 1 to what memory holds.

    Rounded by the largest remainder. None if C7 does not allow it.
    """
    devices = instance.device_arrays(cluster)
    fastest = _fastest(instance, cluster)
    speed, caps = (devices.phi * devices.f)[fastest], _capacities(instance, cluster)[fastest]
    if caps.min() < 1 or caps.sum() < instance.L:
        return None
    parts = rounded_parts((instance.L * speed / speed.sum()).tolist(), caps.tolist())
    return _on_fastest(instance, cluster, parts)


def choice_of(instance: Instance, cluster: int, plan: ClusterPlan) -> SegmentChoice:
    """Return a plan's segments as a choice, with their time."""
    last = plan.devices[-1] if instance.names_last else None
    seconds = pipeline_seconds(instance, cluster, instance.loads(plan.delta, plan.devices), plan.m, last)
    return SegmentChoice(plan.delta, plan.m, last, seconds, tuple(plan.devices) if instance.teb_shares else ())


def cluster_plans(instance: Instance, answer: Answer) -> list[ClusterPlan]:
    """Return an answer as the plans of a plan file.

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


def plan_on_fastest(instance: Instance, cluster: int, parts: Sequence[int], m: int) -> ClusterPlan:
    """Place parts on the fastest devices, fastest first, whatever their memory holds."""
    order = tuple(_fastest(instance, cluster)[: len(parts)])
    delta = [0] * len(instance.clusters[cluster].devices)
    for device, part in zip(order, parts, strict=True):
        delta[device] = part
    return ClusterPlan(delta=tuple(delta), order=order, m=m)


def _on_fastest(instance: Instance, cluster: int, parts: Sequence[int]) -> SegmentChoice | None:
    """Place parts on the fastest devices with m = min(8, b); None if C7 forbids it."""
    plan = plan_on_fastest(instance, cluster, parts, min(_MICRO_BATCHES, instance.b))
    if any(part > cap for part, cap in zip(plan.delta, _capacities(instance, cluster), strict=True)):
        return None
    return choice_of(instance, cluster, plan)


def _fastest(instance: Instance, cluster: int) -> list[int]:
    """Return the min(K, L) fastest devices, fastest first."""
    devices = instance.device_arrays(cluster)
    return [int(k) for k in np.argsort(-devices.phi * devices.f, kind="stable")[: instance.L]]


def _capacities(instance: Instance, cluster: int) -> np.ndarray:
    """Return the number of TEBs that each device's memory holds, (K,)."""
    memory = instance.device_arrays(cluster).mem
    return np.array([whole_blocks(each, instance.gamma0, instance.L) for each in memory])
