"""Who decides a whole round: segments, micro-batches, channels and powers of all clusters.

A policy gets the round's problem and answers it; :func:`make_round_policy` finds one by name. Only ``dssda`` proves
anything; the others are judged by the formulas like any decision, and may break constraints that they do not look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, read_plans, uniform_plan
from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, Infeasibility, SegmentChoice
from strategies.dssda.evaluation import Match, pipeline_seconds, score
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels
from strategies.dssda.paper import plan_round_paper
from strategies.dssda.per_round_bound import PerRoundBound
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks
from strategies.dssda.segments import SegmentTable, segment_tables

ROUND_POLICIES = ("dssda", "dssda-paper", "random", "loss-only", "delay-only", "uniform", "fixed")
SEGMENTS = ("uniform", "optimal")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a policy decides on."""

    number: int
    """From 1."""
    instance: Instance
    losses: Sequence[float]
    """Last known training loss of each cluster, (N,)."""
    per_round: PerRoundBound | None = None
    """C11 in the terms of this round's network; None where no scenario says what Gamma is."""


class RoundPolicy(Protocol):
    """Decides a round."""

    name: str

    def plan(self, round_: Round) -> Answer:
        """Answer the round's problem.

        Raises
        ------
        ValueError
            For a plan file that does not fit the round.
        """
        ...


class DSSDA:
    """The certified optimum of the round's problem."""

    name = "dssda"

    def plan(self, round_: Round) -> Answer:
        """Plan by :func:`strategies.dssda.planner.plan_round`."""
        return plan_round(round_.instance)


class DSSDAPaper:
    """Algorithms 2 to 4 of the paper.

    Parameters
    ----------
    c11 : whether the bound holds in every round, as printed
    """

    name = "dssda-paper"

    def __init__(self, c11: bool = False) -> None:
        self.c11 = c11

    def plan(self, round_: Round) -> Answer:
        """Plan by :func:`strategies.dssda.paper.plan_round_paper`."""
        if not self.c11:
            return plan_round_paper(round_.instance)
        if round_.per_round is None:
            raise ValueError("C11 needs a scenario: an instance does not say what Gamma and Gamma_max are")
        return plan_round_paper(round_.instance, per_round=round_.per_round)


class UniformSegments:
    """CollaPipe without segment scheduling: uniform segments, channels and powers as ``dssda``."""

    name = "uniform"

    def plan(self, round_: Round) -> Answer:
        """Plan with a single choice of segments for each cluster."""
        return _plan_with(round_.instance, [uniform_choice(round_.instance, n) for n in _clusters(round_.instance)])


class FixedPlans:
    """The plans of a plan file; where it names no channel or power, these as ``dssda``."""

    name = "fixed"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plans = read_plans(path)

    def plan(self, round_: Round) -> Answer:
        """Check the file's plans against the instance and score them."""
        instance = round_.instance
        if len(self.plans) != instance.num_clusters:
            raise ValueError(
                f"{self.path}: has plans for {len(self.plans)} clusters, the problem has {instance.num_clusters}; "
                "expected one for each"
            )
        choices = [self._choice(instance, n) for n in _clusters(instance)]
        matches: list[Match | None] = []
        for plan, choice in zip(self.plans, choices, strict=True):
            if plan.selected and (plan.channel is None or plan.power_w is None):
                return _plan_with(instance, choices)
            chosen = plan.selected and plan.channel is not None and plan.power_w is not None
            matches.append(Match(choice, plan.channel or 0, plan.power_w or 0.0) if chosen else None)
        return score(instance, matches, "feasible")

    def _choice(self, instance: Instance, n: int) -> SegmentChoice:
        plan, devices = self.plans[n], instance.device_arrays(n)
        where = f"{self.path}: clusters[{n}]"
        plan.check(
            num_blocks=instance.L,
            batch_size=instance.b,
            num_devices=len(devices.phi),
            memory=[float(m) for m in devices.mem],
            block_memory=instance.gamma0,
            where=where,
        )
        if plan.channel is not None and not 0 <= plan.channel < instance.num_channels:
            raise ValueError(
                f"{where}: channel {plan.channel}: expected null or a channel from 0 to {instance.num_channels - 1}"
            )
        return choice_of(instance, n, plan)


class Selection:
    """J clusters by a rank, channels by upload time, all the power that C6 and C8 allow.

    The baselines ``random``, ``loss-only`` and ``delay-only`` differ in the rank alone; it never sees the queues.
    """

    def __init__(self, name: str, rank: Callable[[Round, _Offers], Array], segments: str = "uniform") -> None:
        if segments not in SEGMENTS:
            raise ValueError(f"segments: expected one of {', '.join(SEGMENTS)}, found {segments!r}")
        self.name = name if segments == "uniform" else f"{name}+{segments}"
        self.segments = segments
        self._rank = rank

    def plan(self, round_: Round) -> Answer:
        """Take the clusters of the lowest rank, match them by the Hungarian algorithm, score the outcome."""
        instance = round_.instance
        offers = _offers(instance, self.segments)
        able = np.isfinite(offers.upload_s).any(axis=1) & np.isfinite(offers.pipeline_s)
        rank = np.where(able, self._rank(round_, offers), np.inf)
        chosen = np.argsort(rank, kind="stable")[: instance.num_matched]
        costs = np.full(offers.upload_s.shape, np.inf)
        costs[chosen] = np.where(able[chosen, None], offers.upload_s[chosen], np.inf)
        matching = match_channels(costs, np.zeros(instance.num_clusters))
        if matching is None:
            return _no_matching(instance)
        matches: list[Match | None] = []
        for n, channel in enumerate(matching.channel_of):
            choice = offers.choices[n]
            if channel is None or choice is None:
                matches.append(None)
            else:
                matches.append(Match(choice, channel, float(offers.power_w[n, channel])))
        return score(instance, matches, "feasible")


@dataclass(frozen=True)
class _Offers:
    """What each cluster could do by itself."""

    choices: list[SegmentChoice | None]
    pipeline_s: Array
    """(N,), infinite without a choice [s]."""
    power_w: Array
    """(N, J), the most that C6 and C8 allow [W]; NaN where none is allowed."""
    upload_s: Array
    """(N, J), upload time at that power, infinite where none is allowed [s]."""


def _offers(instance: Instance, segments: str) -> _Offers:
    if segments == "optimal":
        tables = segment_tables(instance)
        choices = [min(t.choices.values(), key=lambda c: c.pipeline_s, default=None) for t in tables]
    else:
        choices = [uniform_choice(instance, n) for n in _clusters(instance)]
    links = Uplinks.of(instance)
    power = np.where(links.feasible, links.power(links.high), np.nan)
    upload = np.where(links.feasible, links.seconds(links.high), np.inf)
    pipeline = np.array([c.pipeline_s if c else np.inf for c in choices])
    return _Offers(choices, pipeline, power, upload)


def _random_rank(seed: int) -> Callable[[Round, _Offers], Array]:
    def rank(round_: Round, _: _Offers) -> Array:
        return np.random.default_rng([seed, round_.number]).permutation(round_.instance.num_clusters).astype(float)

    return rank


def _loss_rank(round_: Round, _: _Offers) -> Array:
    return -np.asarray(round_.losses, dtype=np.float64)


def _delay_rank(round_: Round, offers: _Offers) -> Array:
    return round_.instance.steps * offers.pipeline_s + offers.upload_s.min(axis=1)


def make_round_policy(
    name: str, *, plan_file: str = "", segments: str = "uniform", seed: int = 0, c11: bool = False
) -> RoundPolicy:
    """Return the policy of that name.

    Parameters
    ----------
    name : one of :data:`ROUND_POLICIES`
    plan_file : of ``fixed``
    segments : ``uniform`` or ``optimal``, of ``random``, ``loss-only`` and ``delay-only``
    seed : of ``random``
    c11 : of ``dssda-paper``

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name, or ``fixed`` without a plan file.
    """
    if name == "fixed":
        if not plan_file:
            raise ValueError("policy fixed needs a plan file; give its path")
        return FixedPlans(Path(plan_file))
    ranks = {"random": _random_rank(seed), "loss-only": _loss_rank, "delay-only": _delay_rank}
    if name in ranks:
        return Selection(name, ranks[name], segments)
    plain: dict[str, RoundPolicy] = {p.name: p for p in (DSSDA(), DSSDAPaper(c11), UniformSegments())}
    if name not in plain:
        raise ValueError(f"policy: expected one of {', '.join(ROUND_POLICIES)}, found {name!r}")
    return plain[name]


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


def choice_of(instance: Instance, cluster: int, plan: ClusterPlan) -> SegmentChoice:
    """A plan's segments as a choice, with their time."""
    last = plan.segments()[-1].device if instance.latency == "flowshop" else None
    seconds = pipeline_seconds(instance, cluster, plan.delta, plan.m, last)
    return SegmentChoice(plan.delta, plan.m, last, seconds)


def cluster_plans(instance: Instance, answer: Answer) -> list[ClusterPlan]:
    """An answer as the plans of a plan file; a cluster that is not selected keeps its uniform segments, unused.

    Raises
    ------
    ValueError
        If a cluster has no plan at all.
    """
    plans = []
    for n, cluster in enumerate(answer.clusters):
        choice = cluster.choice or uniform_choice(instance, n)
        if choice is None:
            raise ValueError(f"cluster {n} has no plan to write: its devices do not hold the L = {instance.L} TEBs")
        devices = instance.device_arrays(n)
        plans.append(
            ClusterPlan(
                delta=choice.delta,
                order=choice.order(devices.phi * devices.f),
                m=choice.m,
                selected=cluster.selected,
                channel=cluster.channel,
                power_w=cluster.power_w,
            )
        )
    return plans


def _plan_with(instance: Instance, choices: Sequence[SegmentChoice | None]) -> Answer:
    """Channels and powers as ``dssda`` for given segments; the bound holds for these segments alone."""
    tables = [
        SegmentTable({c.num_segments: c} if c else {}, None if c else _does_not_fit(instance, n))
        for n, c in enumerate(choices)
    ]
    found = plan_round(instance, tables=tables)
    return Answer(
        "feasible" if found.status == "optimal" else found.status,
        found.clusters,
        found.objective,
        None,
        found.latency_s,
        found.infeasible,
    )


def _does_not_fit(instance: Instance, n: int) -> Infeasibility:
    memory = instance.device_arrays(n).mem
    fits = float(np.floor(memory / instance.gamma0).sum()) if instance.gamma0 > 0 else float(instance.L)
    return Infeasibility(n, "C7", instance.L, fits, "even segments do not fit; use more devices or more memory")


def _no_matching(instance: Instance) -> Answer:
    found = plan_round(instance)
    needs = Infeasibility(None, "C5", instance.num_matched, 0, "too few of the clusters can upload at any power")
    return Answer("infeasible", found.clusters, infeasible=found.infeasible or (needs,))


def _clusters(instance: Instance) -> range:
    return range(instance.num_clusters)
