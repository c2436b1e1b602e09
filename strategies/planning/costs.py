"""Costs of a round under the system model: seconds, joules, bytes and memory of weak devices, not of this machine.

Virtual time is that of the event simulator, on the action lists that the runtime executes and the real sizes of the
micro-batches; Eq. (15) and fused chunks are reported beside it. Downlink, server and evaluation are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.latency import round_latency
from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario
from client_pipeline.timetable.event_simulator import FUSED, StageTimes, simulate_pipeline
from strategies.dssda.evaluation import device_energy, pipeline_seconds
from strategies.dssda.instance import Instance
from strategies.planning.plan_demands import device_memory, pipeline_of, plan_times
from strategies.planning.planner import Decision
from strategies.planning.streamed_round import streamed_latency


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one local step of one cluster."""

    pipeline_s: float
    """D_n: event-simulated, with the plan's schedule [s]."""
    pipeline_fused_s: float
    """Event-simulated with fused chunks of forward and backward [s]."""
    pipeline_eq15_s: float
    """By Eq. (15) [s]."""
    device_s: Array
    """Time that each device computes, (K,) [s]."""
    device_energy_j: Array
    """Energy of each device, (K,) [J]."""
    link_bytes: Array
    """Activations and gradients over the link after each device, as the costs count them, (K,) [byte]."""
    device_memory_bytes: Array
    """Modelled memory of each device, (K,) [byte]."""

    def of_share(self, share: float) -> StepWork:
        """Return the mean of steps of which so many, from 0 to 1, are worked and the others not."""
        return replace(
            self,
            pipeline_s=share * self.pipeline_s,
            pipeline_fused_s=share * self.pipeline_fused_s,
            pipeline_eq15_s=share * self.pipeline_eq15_s,
            device_s=share * self.device_s,
            device_energy_j=share * self.device_energy_j,
            link_bytes=share * self.link_bytes,
        )


Work = Callable[[Instance, int, ClusterPlan], StepWork]
"""Function that returns the work of a cluster's step under a plan."""

Times = Callable[[Instance, int, ClusterPlan], StageTimes]
"""Seconds of each stage and link for each micro-batch; see :func:`plan_times`."""


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """Costs of one selected cluster in a round."""

    work: StepWork
    train_s: float
    """All local steps [s]."""
    uplink_s: float
    """Time of the upload [s]."""
    uplink_wait_s: float
    """Wait for a channel that another cluster uses [s]; 0 where every cluster has its own."""
    uplink_energy_j: float
    """Energy of the upload [J]."""
    waiting_s: float
    """Time from its upload's end to the round's [s]."""
    share: float = 1.0
    """Share of its steps that were worked; the figures above are of these."""


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Costs of a round."""

    clusters: list[ClusterCosts | None]
    """Costs of each cluster, (N,); None for one that does not train."""
    latency_s: float
    """Eq. (26) with event-simulated pipelines [s]; NaN if nobody trains."""
    latency_fused_s: float
    """With fused chunks [s]."""
    latency_eq15_s: float
    """With the pipelines by Eq. (15) [s]."""
    latency_streamed_s: float | None = None
    """With activations and gradients streamed to and from the decoder [s]; None where the scenario has none."""
    energy_j: float
    """Devices and uploads [J]."""


def pipeline_work(instance: Instance, cluster: int, plan: ClusterPlan) -> StepWork:
    """Return the work of a step of a pipeline."""
    link_bits = float(instance.link_bits(plan.m)) * plan.m
    order = plan.devices
    last = order[-1]
    carried = np.array([link_bits / 8 if d > 0 and k != last else 0.0 for k, d in enumerate(plan.delta)])
    # The closed expressions know micro-batches alone.
    whole = replace(plan, token_slices=1)
    # The exact energy, whatever the constraint counts.
    exact, loads = replace(instance, energy="exact"), instance.loads(plan.delta, order)
    times, device_s = plan_times(instance, cluster, plan), np.zeros(len(plan.delta))
    device_s[list(order)] = (times.forward_s + times.backward_s).sum(axis=1)
    return StepWork(
        pipeline_s=pipeline_of(instance, cluster, plan).makespan,
        pipeline_fused_s=simulate_pipeline(FUSED, *plan_times(instance, cluster, whole)).makespan,
        pipeline_eq15_s=pipeline_seconds(replace(instance, latency="eq15"), cluster, loads, plan.m, None),
        device_s=device_s,
        device_energy_j=device_energy(exact, cluster, loads, plan.m, last),
        link_bytes=carried,
        device_memory_bytes=device_memory(instance, plan),
    )


def round_costs(
    decision: Decision,
    work: Work,
    trained: list[bool] | None = None,
    computed: Mapping[int, float] = MappingProxyType({}),
) -> RoundCosts:
    """Sum up a round in which every selected cluster has a channel of its own.

    Parameters
    ----------
    decision : the round's
    work : function for the work of a step
    trained : True for clusters that trained, (N,); None: all selected ones
    computed : steps of a cluster in which devices ran and activations went up, by its number; all where it is missing
    """
    instance, answer = decision.instance, decision.answer
    # Of a cluster whose activations were with the server already, shares of the steps and of what they send.
    shares = {n: steps / instance.steps for n, steps in computed.items()}
    work_and_upload: list[tuple[StepWork, float, float] | None] = []
    for n, part in enumerate(answer.clusters):
        if not part.selected or part.uplink_s is None or not (trained is None or trained[n]):
            work_and_upload.append(None)
            continue
        done = work(instance, n, decision.plans[n])
        share = shares.get(n, 1.0)
        work_and_upload.append((done.of_share(share), share * part.uplink_s, part.uplink_energy_j or 0.0))

    def latency(seconds: Callable[[StepWork], float]) -> float:
        present = [t for t in work_and_upload if t is not None]
        if not present:
            return math.nan
        return round_latency([seconds(w) for w, _, _ in present], [up for _, up, _ in present], instance.steps)

    total = latency(lambda w: w.pipeline_s)
    clusters = [
        None
        if t is None
        else ClusterCosts(
            work=t[0],
            train_s=instance.steps * t[0].pipeline_s,
            uplink_s=t[1],
            uplink_wait_s=0.0,
            uplink_energy_j=t[2],
            waiting_s=total - instance.steps * t[0].pipeline_s - t[1],
            share=shares.get(n, 1.0),
        )
        for n, t in enumerate(work_and_upload)
    ]
    return RoundCosts(
        clusters=clusters,
        latency_s=total,
        latency_fused_s=latency(lambda w: w.pipeline_fused_s),
        latency_eq15_s=latency(lambda w: w.pipeline_eq15_s),
        latency_streamed_s=streamed_latency(
            instance,
            {n: (decision.plans[n], answer.clusters[n]) for n, c in enumerate(clusters) if c is not None},
            shares,
        ),
        energy_j=_energy(clusters, instance.steps),
    )


def _energy(clusters: list[ClusterCosts | None], steps: int) -> float:
    return sum(steps * float(c.work.device_energy_j.sum()) + c.uplink_energy_j for c in clusters if c)


def costs_record(decision: Decision, costs: RoundCosts, gamma: Array, scenario: Scenario) -> dict[str, Any]:
    """Return a round's costs as JSON values: ``virtual`` of a run's ``rounds.jsonl``."""
    instance = decision.instance
    clusters = []
    for n, (plan, cluster_costs) in enumerate(zip(decision.plans, costs.clusters, strict=True)):
        record: dict[str, Any] = {
            "cluster": n,
            **({"name": scenario.names[n]} if scenario.names[n] else {}),
            "selected": cluster_costs is not None,
            "gamma": float(gamma[n]),
            "queue": float(decision.queues.virtual[n]),
            "energy_queue": float(decision.queues.energy[n]),
            "whole_model_bytes": instance.L * instance.gamma0,
        }
        if cluster_costs is not None:
            work, band_hz = cluster_costs.work, decision.answer.clusters[n].band_hz
            record |= {
                "channel": plan.channel,
                "power_w": plan.power_w,
                "segments": sum(d > 0 for d in plan.delta),
                "m": plan.m,
                "token_slices": plan.token_slices,
                **({} if band_hz is None else {"band_hz": band_hz}),
                "delta": list(plan.delta),
                "order": list(plan.order),
                "pipeline_s": work.pipeline_s,
                "pipeline_fused_s": work.pipeline_fused_s,
                "pipeline_eq15_s": work.pipeline_eq15_s,
                "train_s": cluster_costs.train_s,
                "uplink_s": cluster_costs.uplink_s,
                "uplink_wait_s": cluster_costs.uplink_wait_s,
                "waiting_s": cluster_costs.waiting_s,
                "uplink_energy_j": cluster_costs.uplink_energy_j,
                "uplink_bytes": cluster_costs.share * instance.upload_bits(n, plan.m) / 8,
                "device_s": (instance.steps * work.device_s).tolist(),
                "device_energy_j": (instance.steps * work.device_energy_j).tolist(),
                "link_bytes": (instance.steps * work.link_bytes).tolist(),
                "device_memory_bytes": work.device_memory_bytes.tolist(),
            }
        clusters.append(record)
    return {
        "latency_s": costs.latency_s,
        "latency_fused_s": costs.latency_fused_s,
        "latency_eq15_s": costs.latency_eq15_s,
        **({} if costs.latency_streamed_s is None else {"latency_streamed_s": costs.latency_streamed_s}),
        "energy_j": costs.energy_j,
        "gamma_max": scenario.planner.threshold,
        "clusters": clusters,
    }
