"""Costs of a round of a stock Flower strategy: all clusters train, and their uploads queue for the channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from strategies.dssda.answer import Answer, ClusterAnswer
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels, most_matched
from strategies.dssda.power import Uplinks
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_bound, round_instance
from strategies.planning.costs import ClusterCosts, RoundCosts, costs_record, pipeline_work
from strategies.planning.planner import Decision
from strategies.planning.segment_rules import choice_of, cluster_plans


def stock_record(
    scenario: Scenario, number: int, plans: Mapping[int, ClusterPlan], policy: str = "uniform"
) -> dict[str, Any]:
    """Return ``plan`` and ``virtual`` of a round's record.

    Parameters
    ----------
    scenario : the network
    number : of the round
    plans : of the clusters that trained, as they made them
    policy : name of the rule by which they made them
    """
    network, queues = NetworkTrace(scenario).round(number), Queues.empty(scenario.num_clusters)
    instance = round_instance(scenario, network, queues)
    no_clusters = Answer("feasible", tuple(ClusterAnswer("feasible", False) for _ in instance.clusters))
    decided = [plans.get(n, unused) for n, unused in enumerate(cluster_plans(instance, no_clusters))]
    channels, costs = queued_uploads(instance, decided, sorted(plans))
    decided = [
        p if j is None else replace(p, channel=j[0], power_w=j[1]) for p, j in zip(decided, channels, strict=True)
    ]
    decision = Decision(
        number=number,
        network=network,
        instance=instance,
        declared=instance,
        answer=no_clusters,
        plans=decided,
        queues=queues,
        left_out={},
        power_control=None,
    )
    gamma = round_bound(scenario, network, instance, _answer(instance, decided, channels))
    plan = {"policy": policy, "status": "feasible", "left_out": []}
    return {"plan": plan, "virtual": costs_record(decision, costs, gamma, scenario)}


def _answer(instance: Instance, plans: list[ClusterPlan], channels: list[tuple[int, float] | None]) -> Answer:
    """Return the round as a planner's answer: a cluster without an upload counts as unmatched."""
    parts = [
        ClusterAnswer("feasible", False)
        if link is None
        else ClusterAnswer("feasible", True, choice=choice_of(instance, n, plan), channel=link[0], power_w=link[1])
        for n, (plan, link) in enumerate(zip(plans, channels, strict=True))
    ]
    return Answer("feasible", tuple(parts))


def _first_matchable(possible: NDArray[np.bool_], waiting: list[int]) -> list[int]:
    """Return as many waiting clusters as can each have a channel at once; earlier ones take precedence."""
    batch: list[int] = []
    for n in waiting:
        if len(batch) < possible.shape[1] and most_matched(possible[[*batch, n]]) > len(batch):
            batch.append(n)
    return batch


def queued_uploads(
    instance: Instance, plans: list[ClusterPlan], trained: list[int]
) -> tuple[list[tuple[int, float] | None], RoundCosts]:
    """Upload up to min(N, J) clusters at a time, matched by upload time at all the power that C6 and C8 allow.

    Returns
    -------
    Channel and power of each cluster, (N,), None for one that did not train or has no channel that C8 allows; and the
    round's costs. The latency is NaN if a cluster that trained can never upload.
    """
    links, steps = Uplinks.of(instance), instance.steps
    seconds = np.where(links.feasible, links.seconds(links.high), np.inf)
    work = {n: pipeline_work(instance, n, plans[n]) for n in trained}
    ready_s = {n: steps * work[n].pipeline_s for n in trained}
    free = np.zeros(instance.num_channels)
    start: dict[int, float] = {}
    links_used: list[tuple[int, float] | None] = [None] * instance.num_clusters
    waiting = sorted((n for n in trained if np.isfinite(seconds[n]).any()), key=lambda n: (ready_s[n], n))
    while waiting:
        batch = _first_matchable(np.isfinite(seconds), waiting)
        waiting = [n for n in waiting if n not in batch]
        matching = match_channels(seconds[batch], np.zeros(len(batch)))
        assert matching is not None
        for n, channel in zip(batch, matching.channel_of, strict=True):
            if channel is None:
                continue
            start[n] = max(ready_s[n], float(free[channel]))
            free[channel] = start[n] + seconds[n, channel]
            links_used[n] = (channel, float(links.power(links.high)[n, channel]))
    ends = {n: start[n] + float(seconds[n, link[0]]) for n in start if (link := links_used[n]) is not None}
    total = max(ends.values()) if len(ends) == len(trained) and ends else math.nan
    energy = links.energy(links.high)
    clusters: list[ClusterCosts | None] = [None] * instance.num_clusters
    for n in trained:
        link = links_used[n]
        clusters[n] = ClusterCosts(
            work=work[n],
            train_s=ready_s[n],
            uplink_s=math.nan if link is None else float(seconds[n, link[0]]),
            uplink_wait_s=math.nan if link is None else start[n] - ready_s[n],
            uplink_energy_j=0.0 if link is None else float(energy[n, link[0]]),
            waiting_s=math.nan if link is None else total - ends[n],
        )
    energy_j = sum(steps * float(c.work.device_energy_j.sum()) + c.uplink_energy_j for c in clusters if c)
    # The order of the uploads depends on the pipelines' times: the other forms keep the event-simulated order.
    shift = {
        name: max((ends[n] + steps * (getattr(work[n], name) - work[n].pipeline_s) for n in ends), default=math.nan)
        for name in ("pipeline_fused_s", "pipeline_eq15_s")
    }
    costs = RoundCosts(
        clusters=clusters,
        latency_s=total,
        latency_fused_s=shift["pipeline_fused_s"],
        latency_eq15_s=shift["pipeline_eq15_s"],
        energy_j=energy_j,
    )
    return links_used, costs
