"""Costs of a decision, and the constraints that it meets, whichever planner made it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from client_pipeline.partition.plan import FIT_TOLERANCE
from client_pipeline.system.energy import chunk_energy, num_chunks
from client_pipeline.system.latency import (
    flow_shop_latency,
    link_time,
    pipeline_latency_paper,
    round_latency,
    stage_time,
    teb_time,
)
from client_pipeline.system.radio import Array, upload_energy, upload_time
from strategies.dssda.answer import Answer, ClusterAnswer, Match, SegmentChoice, Status
from strategies.dssda.instance import Instance

TOLERANCE = FIT_TOLERANCE
_TIGHT = 1e-6
"""Relative distance within which a constraint is said to bind."""


def teb_and_link_seconds(instance: Instance, cluster: int, m: float | Array) -> tuple[Array, Array]:
    """Seconds of one TEB, a_k, and of one link, tau_k, for one of m micro-batches; (K,) each, or (M, K) of m (M, 1)."""
    devices = instance.device_arrays(cluster)
    teb = teb_time(instance.work(m), devices.phi, devices.f, instance.t0 + devices.t0)
    return teb, link_time(instance.link_bits(m), devices.rate, instance.lat + devices.lat)


def choice_loads(instance: Instance, cluster: int, choice: SegmentChoice) -> Sequence[float]:
    """Work of each device under a choice of segments, (K,); see :meth:`Instance.loads`."""
    devices = instance.device_arrays(cluster)
    return instance.loads(choice.delta, choice.order(devices.phi * devices.f))


def pipeline_seconds(instance: Instance, cluster: int, loads: Sequence[float], m: int, last: int | None) -> float:
    """D_n of a choice of segments, Eq. (15) or the flow shop, as the instance says [s].

    Parameters
    ----------
    loads : (K,), TEBs of each device; where they cost differently, their work in costliest ones
    m : micro-batches
    last : the device that pays no link; read under ``flowshop`` alone
    """
    teb, link = teb_and_link_seconds(instance, cluster, m)
    busy = [k for k, load in enumerate(loads) if load > 0]
    if instance.latency == "eq15":
        stages = [float(stage_time(loads[k], teb[k], link[k])) for k in busy]
        return pipeline_latency_paper(stages, [float(link[k]) for k in busy], m, instance.tail)
    stages = [float(stage_time(loads[k], teb[k], 0.0 if k == last else link[k])) for k in busy]
    return flow_shop_latency(stages, m)


def device_energy(instance: Instance, cluster: int, loads: Sequence[float], m: int, last: int | None) -> Array:
    """Joules that count against each device's budget, C9, (K,); 0 for idle ones and without a budget.

    The last device sends nothing under ``flowshop``, and with ``tail_energy = "none"``. ``loads`` are as in
    :func:`pipeline_seconds`.
    """
    devices = instance.device_arrays(cluster)
    _, link = teb_and_link_seconds(instance, cluster, m)
    silent = last if instance.latency == "flowshop" or instance.tail_energy == "none" else None
    sends = np.array([load > 0 and k != silent for k, load in enumerate(loads)])
    chunk = chunk_energy(
        np.array(loads), instance.work(m), devices.phi, devices.f, devices.kappa, devices.p, np.where(sends, link, 0.0)
    )
    return chunk * num_chunks(instance.energy, m)


def violations(instance: Instance, matches: Sequence[Match | None]) -> list[str]:
    """Constraints C1 to C9 that a decision breaks, in words; empty if it breaks none.

    Parameters
    ----------
    matches : (N,), None for a cluster without a channel
    """
    broken = []
    channels = [match.channel for match in matches if match]
    if len(set(channels)) != len(channels):
        broken.append(f"C4: channels {sorted(channels)} are not distinct")
    if len(channels) != instance.num_matched:
        broken.append(f"C5: {len(channels)} clusters are matched, expected min(N, J) = {instance.num_matched}")
    for n, match in enumerate(matches):
        if match:
            broken += [f"cluster {n}: {text}" for text in _cluster_violations(instance, n, match)]
    return broken


def _cluster_violations(instance: Instance, n: int, match: Match) -> list[str]:
    cluster, choice, devices = instance.clusters[n], match.choice, instance.device_arrays(n)
    broken = []
    if sum(choice.delta) != instance.L:
        broken.append(f"C1: segments hold {sum(choice.delta)} TEBs, expected {instance.L}")
    if choice.num_segments not in instance.segment_range(n):
        broken.append(f"C2: S = {choice.num_segments} is outside {instance.segment_range(n)}")
    if choice.m not in instance.m_set:
        broken.append(f"m_set: m = {choice.m} is not among {list(instance.m_set)}")
    energy = device_energy(instance, n, choice_loads(instance, n, choice), choice.m, choice.last)
    for k, d in enumerate(choice.delta):
        if exceeds(d * instance.gamma0, devices.mem[k]):
            broken.append(f"C7: device {k} needs {d * instance.gamma0:.6g} byte, has {devices.mem[k]:.6g}")
        if instance.energy != "none" and exceeds(energy[k], devices.Emax[k]):
            broken.append(f"C9: device {k} needs {energy[k]:.6g} J, has {devices.Emax[k]:.6g}")
    if exceeds(match.power_w, cluster.up.Pmax) or match.power_w < 0:
        broken.append(f"C6: power {match.power_w:.6g} W is outside 0 to {cluster.up.Pmax:.6g}")
    energy_j = float(
        upload_energy(cluster.up.e_bits, match.power_w, instance.uplink_rate(n, match.power_w, match.channel))
    )
    if exceeds(energy_j, cluster.up.Emax):
        broken.append(f"C8: the upload needs {energy_j:.6g} J, has {cluster.up.Emax:.6g}")
    distortion = float(instance.distortion(n, match.power_w, match.channel))
    if cluster.up.eps_max is not None and exceeds(distortion, cluster.up.eps_max):
        broken.append(f"eps_max: distortion {distortion:.6g} is above {cluster.up.eps_max:.6g}")
    return broken


def binding(instance: Instance, answer: Answer, cluster: int) -> list[str]:
    """Name the constraints that a matched cluster meets with equality, and the round's max, in words.

    C7 and C9 bind a busy device that could not hold one TEB more.
    """
    constraints: list[str] = []
    part = answer.clusters[cluster]
    if part.choice is None or part.power_w is None or part.uplink_s is None or part.uplink_energy_j is None:
        return constraints
    choice, devices, uplink = part.choice, instance.device_arrays(cluster), instance.clusters[cluster].up
    seconds = instance.steps * choice.pipeline_s + part.uplink_s
    if answer.latency_s is not None and seconds >= answer.latency_s * (1 - _TIGHT):
        constraints.append("the round waits for it")
    for k, blocks in enumerate(choice.delta):
        if blocks == 0:
            continue
        if exceeds((blocks + 1) * instance.gamma0, devices.mem[k]):
            constraints.append(f"C7 memory of device {k}")
        loads = list(choice_loads(instance, cluster, choice))
        loads[k] += min(instance.teb_shares, default=1)
        energy = device_energy(instance, cluster, loads, choice.m, choice.last)
        if instance.energy != "none" and exceeds(energy[k], devices.Emax[k]):
            constraints.append(f"C9 energy of device {k}")
    if part.power_w >= uplink.Pmax * (1 - _TIGHT):
        constraints.append("C6 power")
    if part.uplink_energy_j >= uplink.Emax * (1 - _TIGHT):
        constraints.append("C8 upload energy")
    return constraints


def exceeds(value: float, limit: float) -> bool:
    """Return whether a value is above its limit by more than rounding."""
    return bool(value > limit + TOLERANCE * max(abs(limit), 1e-12))


def choice_cost(instance: Instance, cluster: int, choice: SegmentChoice) -> float:
    """Cost wS S + wS2 S^2 of a choice of segments, and of the joules that the devices spend on the local steps."""
    cost = instance.clusters[cluster].size_cost(choice.num_segments)
    return cost + instance.wJ * round_joules(instance, cluster, choice) if instance.wJ else cost


def round_joules(instance: Instance, cluster: int, choice: SegmentChoice) -> float:
    """Joules of a cluster's devices over the local steps, all micro-batches counted, whatever C9 counts [J]."""
    exact, loads = replace(instance, energy="exact"), choice_loads(instance, cluster, choice)
    return instance.steps * float(device_energy(exact, cluster, loads, choice.m, choice.last).sum())


def power_cost(instance: Instance, cluster: int, channel: int, power_w: float) -> float:
    """Cost wP p + (wE + wJ) E_up(p) + wG epsilon(p) of a matched cluster; a term of weight 0 is 0, even if infinite."""
    c = instance.clusters[cluster]
    cost = c.wP * power_w
    if c.wE + instance.wJ:
        rate = instance.uplink_rate(cluster, power_w, channel)
        cost += (c.wE + instance.wJ) * float(upload_energy(c.up.e_bits, power_w, rate))
    if c.wG:
        cost += c.wG * float(instance.distortion(cluster, power_w, channel))
    return cost


def score(
    instance: Instance, matches: Sequence[Match | None], status: Status, lower_bound: float = -math.inf
) -> Answer:
    """The answer that a decision amounts to: times, energies and costs by the formulas, not by the planner's word.

    Parameters
    ----------
    matches : (N,), None for a cluster without a channel
    status : what the planner proved
    lower_bound : no decision costs less
    """
    answers, steps, uploads = [], [], []
    total = 0.0
    for n, match in enumerate(matches):
        cluster = instance.clusters[n]
        if match is None:
            total += cluster.skip
            answers.append(ClusterAnswer(status=status, selected=False, cost=cluster.skip))
            continue
        c = match.choice
        pipeline_s = pipeline_seconds(instance, n, choice_loads(instance, n, c), c.m, c.last)
        rate = float(instance.uplink_rate(n, match.power_w, match.channel))
        uplink_s = float(upload_time(instance.upload_bits(n, c.m), rate))
        cost = choice_cost(instance, n, c) + power_cost(instance, n, match.channel, match.power_w)
        total += cost
        steps.append(pipeline_s)
        uploads.append(uplink_s)
        answers.append(
            ClusterAnswer(
                status=status,
                selected=True,
                channel=match.channel,
                power_w=match.power_w,
                choice=replace(c, pipeline_s=pipeline_s),
                uplink_s=uplink_s,
                uplink_energy_j=float(upload_energy(cluster.up.e_bits, match.power_w, rate)),
                cost=cost,
            )
        )
    latency = round_latency(steps, uploads, instance.steps)
    return Answer(status, tuple(answers), instance.V * latency + total, lower_bound, latency)
