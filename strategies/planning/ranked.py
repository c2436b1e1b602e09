"""Policies that select clusters by a rank: the baselines ``random``, ``loss-only`` and ``delay-only``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, Infeasibility, Match, SegmentChoice
from strategies.dssda.evaluation import score
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels, most_matched
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks
from strategies.dssda.segments import segment_table
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.segment_rules import uniform_choice

Segments = Callable[[Instance, int], SegmentChoice | None]
"""Function that returns a cluster's segments; None where there are none."""


@dataclass(frozen=True)
class Offers:
    """Segments, times and powers of each cluster by itself."""

    choices: list[SegmentChoice | None]
    pipeline_s: Array
    """Time of a step's pipeline, (N,), infinite without a choice [s]."""
    power_w: Array
    """Largest power that C6 and C8 allow, (N, J) [W]; NaN where none is allowed."""
    upload_s: Array
    """Upload time at that power, (N, J), infinite where none is allowed [s]."""

    @classmethod
    def of(cls, instance: Instance, choices: list[SegmentChoice | None]) -> Offers:
        """Return the offers at all allowed power, for every cluster on every channel."""
        links = Uplinks.of(instance, [c.m if c else None for c in choices])
        power = np.where(links.feasible, links.power(links.high), np.nan)
        upload = np.where(links.feasible, links.seconds(links.high), np.inf)
        pipeline = np.array([c.pipeline_s if c else np.inf for c in choices])
        return cls(choices, pipeline, power, upload)


Rank = Callable[[Round, Offers], Array]
"""Function that returns each cluster's rank, (N,); the lowest are selected."""


class RankedSelection(RoundPolicy):
    """J clusters by a rank, channels by upload time, all the power that C6 and C8 allow.

    The rank never sees the queues.

    Parameters
    ----------
    name : of the policy
    rank : of the clusters; the lowest are selected
    segments : of the clusters
    """

    tells_tebs_apart = True

    def __init__(self, name: str, rank: Rank, segments: Segments) -> None:
        self.name = name
        self._rank, self._segments = rank, segments

    def plan(self, round_: Round) -> Answer:
        """Take the clusters of the lowest rank, match them by the Hungarian algorithm, score the outcome."""
        instance = round_.instance
        offers = Offers.of(instance, [self._segments(instance, n) for n in range(instance.num_clusters)])
        is_able = np.isfinite(offers.upload_s).any(axis=1) & np.isfinite(offers.pipeline_s)
        rank = np.where(is_able, self._rank(round_, offers), np.inf)
        # Able clusters come first: a rank may be infinite, too.
        order = np.lexsort((rank, ~is_able))[: int(is_able.sum())]
        chosen = _matchable(order, np.isfinite(offers.upload_s), instance.num_matched)
        costs = np.full(offers.upload_s.shape, np.inf)
        costs[chosen] = offers.upload_s[chosen]
        matching = match_channels(costs, np.zeros(instance.num_clusters))
        if matching is None:
            return _no_matching(instance, offers)
        matches: list[Match | None] = []
        for n, channel in enumerate(matching.channel_of):
            choice = offers.choices[n]
            if channel is None or choice is None:
                matches.append(None)
            else:
                matches.append(Match(choice, channel, float(offers.power_w[n, channel])))
        return score(instance, matches, "feasible")


def _matchable(order: NDArray[np.intp], possible: NDArray[np.bool_], most: int) -> NDArray[np.intp]:
    """Return the first clusters that can each have a channel at once; skip one that is left without any."""
    if most_matched(possible[order[:most]]) == most:
        return order[:most]
    chosen: list[int] = []
    for n in order:
        if len(chosen) < most and most_matched(possible[[*chosen, n]]) > len(chosen):
            chosen.append(n)
    return np.array(chosen, dtype=np.intp)


def optimal_choice(instance: Instance, cluster: int) -> SegmentChoice | None:
    """Return the segments of least pipeline time of a cluster."""
    return min(segment_table(instance, cluster).choices.values(), key=lambda c: c.pipeline_s, default=None)


SEGMENTS: dict[str, Segments] = {"uniform": uniform_choice, "optimal": optimal_choice}


def random_rank(seed: int) -> Rank:
    """Return a rank that is drawn anew in every round."""

    def rank(round_: Round, _: Offers) -> Array:
        return np.random.default_rng([seed, round_.number]).permutation(round_.instance.num_clusters).astype(float)

    return rank


def loss_rank(round_: Round, _: Offers) -> Array:
    """Rank the largest training loss first, and a cluster that has not trained yet before all."""
    return -np.asarray(round_.losses, dtype=np.float64)


def delay_rank(round_: Round, offers: Offers) -> Array:
    """Rank the shortest round by itself first."""
    return round_.instance.steps * offers.pipeline_s + offers.upload_s.min(axis=1)


RANKS: dict[str, Callable[[int], Rank]] = {
    "random": random_rank,
    "loss-only": lambda _: loss_rank,
    "delay-only": lambda _: delay_rank,
}
"""Ranks by policy name, made from a seed."""


def _no_matching(instance: Instance, offers: Offers) -> Answer:
    """Return the reasons why too few clusters can be matched; the planner names each one's obstacle."""
    answer = plan_round(instance)
    if answer.infeasible:
        return Answer("infeasible", answer.clusters, infeasible=answer.infeasible)
    unfit = tuple(
        Infeasibility(n, "C7", instance.L, 0, "these segments do not fit; use more devices or more memory")
        for n, choice in enumerate(offers.choices)
        if choice is None
    )
    needs = Infeasibility(None, "C5", instance.num_matched, 0, "too few of the clusters can upload at any power")
    return Answer("infeasible", answer.clusters, infeasible=unfit or (needs,))
