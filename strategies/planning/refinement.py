"""Segments that the event simulator prefers to those of the closed form: links overlap with work, the decoder waits.

The planner proposes by a formula: its choice for each number of segments. Each is timed on the action lists that the
runtime executes, with other numbers of micro-batches, too, and the best is improved step by step, as long as one of its
neighbours is faster: one TEB more or fewer on two devices, two stages exchanged, an idle device instead of a working
one, another number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from client_pipeline.partition.plan import ClusterPlan
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.evaluation import exceeds
from strategies.dssda.instance import Instance
from strategies.dssda.segments import segment_table

MOST_REFINED = 16
"""Clusters of a round up to which neighbours are tried; beyond, the planner's own choices alone are timed."""
_STEPS = 12
_LEAST = 1 - 1e-3
"""A neighbour that is hardly faster is not worth another step."""

Seconds = Callable[[ClusterPlan], float]


def refined_plan(instance: Instance, cluster: int, proposed: SegmentChoice, seconds: Seconds) -> ClusterPlan:
    """Return the plan of least time and cost, starting from the planner's.

    Parameters
    ----------
    instance : measured
    cluster : of it
    proposed : the planner's choice
    seconds : time of a round's local steps under a plan
    """
    devices, part = instance.device_arrays(cluster), instance.clusters[cluster]
    speed = devices.phi * devices.f

    def plan_of(choice: SegmentChoice) -> ClusterPlan:
        return ClusterPlan(delta=choice.delta, order=choice.order(speed), m=choice.m)

    def cost(plan: ClusterPlan) -> float:
        return instance.V * seconds(plan) + part.size_cost(len(plan.devices))

    choices = [proposed, *segment_table(instance, cluster).choices.values()]
    costs = {plan: cost(plan) for plan in dict.fromkeys(map(plan_of, choices))}
    if instance.num_clusters > MOST_REFINED or instance.energy != "none":
        return min(costs, key=costs.__getitem__)
    others = (replace(plan, m=m) for plan in list(costs) for m in _fewest_by_size(instance.b) & set(instance.m_set))
    costs |= {plan: cost(plan) for plan in others if plan not in costs}
    best = min(costs, key=costs.__getitem__)
    for _ in range(_STEPS):
        for plan in _neighbours(instance, cluster, best):
            if plan not in costs:
                costs[plan] = cost(plan)
        better = min(costs, key=costs.__getitem__)
        if better == best or costs[better] > _LEAST * costs[best]:
            break
        best = better
    return best


def _neighbours(instance: Instance, cluster: int, plan: ClusterPlan) -> Iterator[ClusterPlan]:
    memory = instance.device_arrays(cluster).mem
    sizes = instance.segment_range(cluster)
    for m in sorted({plan.m - 1, plan.m + 1, *_fewest_by_size(instance.b)} & set(instance.m_set) - {plan.m}):
        yield ClusterPlan(delta=plan.delta, order=plan.order, m=m)
    for i in range(len(plan.devices)):
        for j in range(i):
            order = plan.devices
            order[i], order[j] = order[j], order[i]
            yield ClusterPlan(delta=plan.delta, order=tuple(order), m=plan.m)
    for working in plan.devices:
        for idle in (k for k, blocks in enumerate(plan.delta) if not blocks):
            if exceeds(plan.delta[working] * instance.gamma0, float(memory[idle])):
                continue
            delta = list(plan.delta)
            delta[working], delta[idle] = 0, plan.delta[working]
            rest = [k for k in plan.devices if k != working]
            for place in range(len(rest) + 1):
                order = [*rest[:place], idle, *rest[place:]]
                yield ClusterPlan(delta=tuple(delta), order=tuple(order), m=plan.m)
    for giver in plan.devices:
        for taker in range(len(plan.delta)):
            more = plan.delta[taker] + 1
            if taker == giver or exceeds(more * instance.gamma0, float(memory[taker])):
                continue
            delta = list(plan.delta)
            delta[giver], delta[taker] = delta[giver] - 1, more
            order = [k for k in plan.devices if delta[k]]
            if taker not in order:
                order.insert(plan.devices.index(giver), taker)
            if len(order) in sizes:
                yield ClusterPlan(delta=tuple(delta), order=tuple(order), m=plan.m)


def _fewest_by_size(batch_size: int) -> set[int]:
    """Fewest micro-batches for each size of the largest one: between two of them a step gains little, or loses."""
    return {math.ceil(batch_size / size) for size in range(1, batch_size + 1)}
