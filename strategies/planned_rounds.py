"""Rounds of planning without training: a network that changes, a policy, and queues that evolve."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.runtime.event_simulator import FUSED, simulate, stage_times
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.latency import round_latency
from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility, SegmentChoice
from strategies.dssda.evaluation import Match, device_energy, pipeline_seconds, violations
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import per_round_bound, round_bound, round_instance
from strategies.round_policies import Round, RoundPolicy


@dataclass(frozen=True, kw_only=True)
class PlannedRound:
    """One round's plan and what it amounts to."""

    number: int
    """From 1."""
    instance: Instance
    answer: Answer
    queues: Queues
    """That the plan was made with."""
    gamma: Array
    """Convergence bound of each cluster, Eq. (28), (N,)."""
    latency_s: float
    """Round latency, Eq. (26), with the pipelines' time by Eq. (15) [s]; NaN if nobody is selected."""
    latency_event_s: float
    """The same with event-simulated pipelines: fused chunks of the real micro-batch sizes [s]."""
    pipeline_s: Array
    """One step of each selected cluster's pipeline by Eq. (15), NaN for the others, (N,) [s]."""
    pipeline_event_s: Array
    """The same, event-simulated, (N,) [s]."""
    energy_j: float
    """Joules of all devices over the local steps and of all uploads [J]."""
    violations: list[str]
    """Constraints that the plan breaks."""

    @property
    def selected(self) -> list[bool]:
        """Which clusters train, (N,)."""
        return [c.selected for c in self.answer.clusters]


def plan_rounds(
    scenario: Scenario, policy: RoundPolicy, num_rounds: int, *, drift: str = "true"
) -> Iterator[PlannedRound]:
    """Plan round after round; each round's true Gamma moves the queues once, Eq. (29).

    Parameters
    ----------
    scenario : the network; its seed gives every policy the same rounds
    policy : decides
    num_rounds : T
    drift : ``true``; or ``printed``, for ``dssda-paper`` alone
    """
    trace, losses = NetworkTrace(scenario), LossTrace(scenario.num_clusters, scenario.seed)
    queues = Queues.empty(scenario.num_clusters)
    budgets = [u.mean_energy_j for u in scenario.uplinks]
    mean_energy = None if None in budgets else np.array(budgets, dtype=np.float64)
    for number in range(1, num_rounds + 1):
        network = trace.round(number)
        instance = round_instance(scenario, network, queues, drift=drift)
        round_ = Round(
            number=number, instance=instance, losses=losses.round(number), per_round=per_round_bound(scenario)
        )
        answer = plan_whom_it_fits(policy, round_)
        done = _account(number, instance, answer, queues, round_bound(scenario, network, instance, answer))
        yield done
        spent = np.array([c.uplink_energy_j or 0.0 for c in answer.clusters])
        queues = queues.after_round(done.gamma, scenario.planner.gamma_max, spent, mean_energy)


class LossTrace:
    """Training losses that nobody trained for: each cluster's level, a slow fall, noise; for ``loss-only``."""

    def __init__(self, num_clusters: int, seed: int) -> None:
        self._seed = seed
        self._level = np.random.default_rng([seed, 0]).uniform(1.0, 3.0, num_clusters)

    def round(self, number: int) -> list[float]:
        """Losses of a round, (N,)."""
        noise = np.random.default_rng([self._seed, number]).lognormal(0.0, 0.3, len(self._level))
        return [float(v) for v in self._level * noise / math.sqrt(number)]


def plan_whom_it_fits(policy: RoundPolicy, round_: Round) -> Answer:
    """Plan; leave out clusters without any plan and plan again, until it is feasible or nobody is left.

    The reasons of those left out stay in the answer's ``infeasible``.
    """
    instance, kept = round_.instance, list(range(round_.instance.num_clusters))
    reasons: list[Infeasibility] = []
    while kept:
        part = replace(
            round_,
            instance=replace(instance, clusters=tuple(instance.clusters[n] for n in kept)),
            losses=[round_.losses[n] for n in kept],
        )
        answer = policy.plan(part)
        if answer.status != "infeasible":
            return _for_all(instance, answer, kept, reasons)
        blamed = {kept[i.cluster] for i in answer.infeasible if i.cluster is not None}
        reasons += [replace(i, cluster=None if i.cluster is None else kept[i.cluster]) for i in answer.infeasible]
        kept = [n for n in kept if n not in blamed] if blamed else []
    nobody = tuple(ClusterAnswer("infeasible", False, cost=c.skip) for c in instance.clusters)
    return Answer("infeasible", nobody, infeasible=tuple(reasons))


def _for_all(instance: Instance, answer: Answer, kept: list[int], reasons: list[Infeasibility]) -> Answer:
    """The answer of the kept clusters as one of all; the others pay for being skipped, in the bound as well."""
    left_out = [n for n in range(instance.num_clusters) if n not in kept]
    if not left_out:
        return answer
    skipped = sum(instance.clusters[n].skip for n in left_out)
    parts = {n: ClusterAnswer("infeasible", False, cost=instance.clusters[n].skip) for n in left_out}
    parts |= dict(zip(kept, answer.clusters, strict=True))
    return replace(
        answer,
        clusters=tuple(parts[n] for n in range(instance.num_clusters)),
        objective=None if answer.objective is None else answer.objective + skipped,
        lower_bound=None if answer.lower_bound is None else answer.lower_bound + skipped,
        infeasible=tuple(reasons),
    )


def _account(number: int, instance: Instance, answer: Answer, queues: Queues, gamma: Array) -> PlannedRound:
    pipeline = np.full(instance.num_clusters, np.nan)
    event, uploads, energy = pipeline.copy(), pipeline.copy(), 0.0
    matches: list[Match | None] = []
    printed = replace(instance, latency="eq15")
    for n, part in enumerate(answer.clusters):
        c = part.choice
        if not part.selected or c is None or part.channel is None or part.power_w is None:
            matches.append(None)
            continue
        matches.append(Match(c, part.channel, part.power_w))
        pipeline[n] = pipeline_seconds(printed, n, c.delta, c.m, None)
        event[n] = event_seconds(instance, n, c)
        uploads[n] = part.uplink_s
        # What a step really takes, whatever the constraint counts.
        exact = replace(instance, energy="exact")
        energy += instance.steps * float(device_energy(exact, n, c.delta, c.m, c.last).sum())
        energy += part.uplink_energy_j or 0.0
    on = ~np.isnan(pipeline)

    def latency(steps: Array) -> float:
        return round_latency(list(steps[on]), list(uploads[on]), instance.steps) if on.any() else math.nan

    return PlannedRound(
        number=number,
        instance=instance,
        answer=answer,
        queues=queues,
        gamma=gamma,
        latency_s=latency(pipeline),
        latency_event_s=latency(event),
        pipeline_s=pipeline,
        pipeline_event_s=event,
        energy_j=energy,
        violations=violations(instance, matches) if on.any() else [],
    )


def event_seconds(instance: Instance, cluster: int, choice: SegmentChoice) -> float:
    """One step of a cluster's pipeline, event-simulated: fused chunks, senders busy, real micro-batch sizes [s]."""
    devices = instance.device_arrays(cluster)
    order = list(choice.order(devices.phi * devices.f))
    times = stage_times(
        num_blocks=[choice.delta[k] for k in order],
        speed=list((devices.phi * devices.f)[order]),
        link_rate=list(devices.rate[order]),
        micro_batches=micro_batch_sizes(instance.b, min(choice.m, instance.b)),
        o_f=instance.o_f,
        o_b=instance.o_b,
        o_b_scaling=instance.o_b_scaling,
        t0=instance.t0,
        z_bits=instance.z_bits,
        g_bits=instance.g_bits,
        act_scaling=instance.act_scaling,
        lat=instance.lat,
    )
    return simulate(FUSED, *times).makespan
