"""Algorithms 2 to 4 of the paper for one round, typos mended, arXiv:2509.19855v1.

The paper parts the round latency, the one max over pipeline and upload of Eq. (26), into a max over the pipelines and
a max over the uploads, and so the round into problems that know nothing of each other::

    V max_n D_n + V max_n t_up,n + costs  >=  V max_n (D_n + t_up,n) + costs

Segments are scheduled blind to the uploads, channels matched blind to the pipelines. That is why it falls short of
:mod:`strategies.dssda.planner`, and it is kept: ``dssda-paper`` is there to compare with.

Once a round, not within these loops as printed, the queues change the weights that an instance carries; whether these
are of the true drift or of the printed one of P2 (wP = Y) is for :mod:`strategies.dssda.queues` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility, SegmentChoice
from strategies.dssda.evaluation import TOLERANCE, Match, score
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels
from strategies.dssda.paper_segments import paper_segment_choices
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks
from strategies.dssda.sca import PowerSolution, solve_power

Choices = Mapping[int, SegmentChoice]


@dataclass(frozen=True, kw_only=True)
class PerRoundBound:
    """C11 as printed: Gamma_n = g0 (phi^2 S_n^2 / L + epsilon_n + phi^2) <= Gamma_max in every round, Eq. (28).

    It leaves the queue Y at 0, where C10 asks for the mean over the rounds alone; so it is off unless asked for. It
    binds the selected clusters: the Gamma of an unmatched one is not for the round to choose.
    """

    g0: float
    phi: float
    gamma_max: float

    def distortion_left(self, num_segments: int, num_blocks: int) -> float:
        """Largest distortion that C11 leaves to S segments of L TEBs; negative where S alone exceeds it."""
        return self.gamma_max / self.g0 - self.phi**2 * (1.0 + num_segments**2 / num_blocks)


class PaperTrace(NamedTuple):
    """An answer and how it was arrived at."""

    answer: Answer
    objectives: tuple[float, ...]
    """The paper's objective, with two maxima, at the start and after each iteration of Algorithm 4 that was kept; empty
    if infeasible."""
    status: Literal["converged", "stopped", "infeasible"]
    """``stopped``: the limit of iterations came first."""
    powers: tuple[PowerSolution | None, ...]
    """What Algorithm 3 reported last for each cluster, (N,); None for those without a channel."""


def plan_round_paper(instance: Instance, *, per_round: PerRoundBound | None = None) -> Answer:
    """One round's plan by Algorithm 4; its status is ``feasible``, for nothing is proved, or ``infeasible``.

    Parameters
    ----------
    per_round : C11, to be held in this round
    """
    return trace_round_paper(instance, per_round=per_round).answer


def trace_round_paper(
    instance: Instance,
    *,
    per_round: PerRoundBound | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 50,
) -> PaperTrace:
    """:func:`plan_round_paper` with the steps that it took.

    Parameters
    ----------
    per_round : C11, to be held in this round
    tolerance : relative fall of the objective below which Algorithm 4 ends
    max_iterations : of Algorithm 4
    """
    round_ = _Round(instance, per_round)
    nobody = (None,) * instance.num_clusters
    powers: tuple[PowerSolution | None, ...] = nobody
    # Start: the fewest segments, and powers as large as allowed.
    kept = round_.match(_Decision(round_.fewest, nobody, np.full(instance.num_clusters, np.inf)))
    if kept is None:
        return PaperTrace(round_.infeasible(), (), "infeasible", powers)
    objectives = [round_.objective(kept)]
    for _ in range(max_iterations):
        # Step 1, Algorithm 2: segments and micro-batches.
        scheduled = round_.schedule(kept)
        # Step 2: channels, at the powers so far.
        matched = round_.match(scheduled)
        assert matched is not None  # the channels so far remain possible
        # Step 3, Algorithm 3: powers.
        new, powers = round_.allocate_power(matched)
        # Step 4: until the objective falls no more. No step looks at the whole objective: when other clusters are
        # matched, it may rise. Then the iteration before is the answer.
        fall = objectives[-1] - round_.objective(new)
        if fall >= 0:
            kept = new
            objectives.append(round_.objective(new))
        if fall <= tolerance * abs(objectives[-1]):
            return PaperTrace(round_.score(kept), tuple(objectives), "converged", powers)
    return PaperTrace(round_.score(kept), tuple(objectives), "stopped", powers)


class _Decision(NamedTuple):
    """Where the iterations stand."""

    sizes: tuple[int | None, ...]
    """S of each cluster, matched or not, (N,); None for a cluster without segments."""
    channels: tuple[int | None, ...]
    """(N,)."""
    power_w: Array
    """(N,) [W]; inf for as much as allowed: a cluster without a channel."""


class _Round:
    """The steps of Algorithm 4 on one instance."""

    def __init__(self, instance: Instance, per_round: PerRoundBound | None) -> None:
        self._instance, self._per_round = instance, per_round
        self._tables = [paper_segment_choices(instance, n) for n in range(instance.num_clusters)]
        self._uplinks = Uplinks.of(instance)

    @property
    def fewest(self) -> tuple[int | None, ...]:
        """The least S of each cluster."""
        return tuple(min(table, default=None) for table in self._tables)

    def schedule(self, decision: _Decision) -> _Decision:
        """Segments: V max D_n + wS S + wS2 S^2 of the matched clusters together, of the others each for itself."""
        matched = [n for n, j in enumerate(decision.channels) if j is not None]
        others = [n for n, j in enumerate(decision.channels) if j is None and self._tables[n]]
        sizes = list(decision.sizes)
        for group in [matched, *([n] for n in others)]:
            tables = {n: self._allowed_sizes(n, decision) for n in group}
            for n, size in self._cheapest_sizes(tables).items():
                sizes[n] = size
        return decision._replace(sizes=tuple(sizes))

    def match(self, decision: _Decision) -> _Decision | None:
        """Channels: least V t_up,n + power costs, summed, by the Hungarian method; None if too few are possible.

        The paper matches by these costs alone. A power that C8 forbids on another channel counts as the largest that
        it allows there.
        """
        uplinks = Uplinks.of(self._within_bound(decision.sizes))
        x = np.clip(np.log1p(decision.power_w[:, None] / uplinks.noise_gain), uplinks.low, uplinks.high)
        possible = uplinks.feasible & (self._distortion_left(decision.sizes) > 0)[:, None]
        costs = self._instance.V * uplinks.seconds(x) + uplinks.cost(x)
        skip = np.array([cluster.skip for cluster in self._instance.clusters])
        matching = match_channels(np.where(possible, costs, np.inf), skip)
        if matching is None:
            return None
        power = uplinks.power(x)
        power_w = [np.inf if j is None else float(power[n, j]) for n, j in enumerate(matching.channel_of)]
        return decision._replace(channels=matching.channel_of, power_w=np.array(power_w))

    def allocate_power(self, decision: _Decision) -> tuple[_Decision, tuple[PowerSolution | None, ...]]:
        """Powers: least V t_up,n + power costs of each matched cluster by itself, as if its upload were the longest."""
        within_bound = self._within_bound(decision.sizes)
        power_w, solutions = decision.power_w.copy(), []
        for n, j in enumerate(decision.channels):
            solution = None if j is None else solve_power(within_bound, n, j, latency_weight=self._instance.V)
            assert not isinstance(solution, Infeasibility)  # pairs without an allowed power are not matched
            power_w[n] = solution.power_w if solution else np.inf
            solutions.append(solution)
        return decision._replace(power_w=power_w), tuple(solutions)

    def score(self, decision: _Decision) -> Answer:
        """The decision by the formulas."""
        matches: list[Match | None] = []
        for table, size, j, power in zip(self._tables, *decision, strict=True):
            matches.append(None if size is None or j is None else Match(table[size], j, float(power)))
        return score(self._instance, matches, "feasible")

    def objective(self, decision: _Decision) -> float:
        """The paper's objective: the maxima of pipeline and upload apart."""
        clusters = self.score(decision).clusters
        pipeline_s = max(c.choice.pipeline_s for c in clusters if c.choice)
        uplink_s = max(c.uplink_s for c in clusters if c.uplink_s is not None)
        costs = sum(c.cost for c in clusters if c.cost is not None)
        return self._instance.V * (self._instance.steps * pipeline_s + uplink_s) + costs

    def infeasible(self) -> Answer:
        """All that keeps min(N, J) clusters from being matched."""
        planned = plan_round(self._instance)
        if planned.status == "infeasible" or self._per_round is None:
            return planned
        faults = self._bound_faults(self._per_round)
        at_fault = {fault.cluster for fault in faults}
        clusters = tuple(
            ClusterAnswer("infeasible" if n in at_fault else "feasible", False) for n in range(len(self._tables))
        )
        return Answer("infeasible", clusters, infeasible=tuple(faults))

    def _bound_faults(self, bound: PerRoundBound) -> list[Infeasibility]:
        """Clusters that break C11 on every channel; if there are none, the channels are too few."""
        exceeded = self._least_distortion() - self._distortion_left(self.fewest)
        faults = []
        for n in np.flatnonzero(np.isfinite(exceeded) & (exceeded > 0)):
            needs = bound.gamma_max + bound.g0 * float(exceeded[n])
            remedy = "the bound of the fewest segments and the largest power; raise Gamma_max, power or energy budget"
            faults.append(Infeasibility(int(n), "C11", needs, bound.gamma_max, remedy))
        remedy = f"fewer can be matched within Gamma_max = {bound.gamma_max:.6g}; raise it"
        needed = self._instance.num_matched
        return faults or [Infeasibility(None, "C5", needed, needed - 1, remedy)]

    def _allowed_sizes(self, cluster: int, decision: _Decision) -> Choices:
        """S that C11 allows at the power so far, or on any channel at all; the S so far among them."""
        channel, table, own = decision.channels[cluster], self._tables[cluster], decision.sizes[cluster]
        if self._per_round is None:
            return table
        if channel is None:
            distortion = float(self._least_distortion()[cluster])
        else:
            distortion = float(self._instance.distortion(cluster, decision.power_w[cluster], channel))
        limit = self._per_round.distortion_left
        # Strictly within, so that rounding cannot forbid the power after all.
        return {
            size: choice
            for size, choice in table.items()
            if size == own or distortion <= limit(size, self._instance.L) * (1 - TOLERANCE)
        }

    def _cheapest_sizes(self, tables: Mapping[int, Choices]) -> dict[int, int]:
        """The S of each cluster for the least V max D_n + size costs: exact, for the max is one of the D."""
        instance = self._instance
        seconds, costs, sizes = {}, {}, {}
        for n, table in tables.items():
            front = sorted(table.values(), key=lambda choice: choice.pipeline_s)
            seconds[n] = instance.steps * np.array([choice.pipeline_s for choice in front])
            size_cost = np.array([instance.clusters[n].size_cost(choice.num_segments) for choice in front])
            costs[n] = np.minimum.accumulate(size_cost)
            # The fastest choice of that cost.
            sizes[n] = [front[int(np.argmax(size_cost == least))].num_segments for least in costs[n]]
        latest = np.concatenate([s for s in seconds.values()])
        latest = latest[latest >= max(s[0] for s in seconds.values())]
        at = {n: np.searchsorted(s, latest, side="right") - 1 for n, s in seconds.items()}
        total = instance.V * latest + sum(costs[n][at[n]] for n in tables)
        best = int(np.argmin(total))
        return {n: sizes[n][at[n][best]] for n in tables}

    def _within_bound(self, sizes: Sequence[int | None]) -> Instance:
        """The instance with what C11 leaves to the distortion as a limit of it."""
        if self._per_round is None:
            return self._instance
        clusters = []
        for cluster, left in zip(self._instance.clusters, self._distortion_left(sizes), strict=True):
            known = np.inf if cluster.up.eps_max is None else cluster.up.eps_max
            # Without anything left the cluster is not matched, whatever its limit.
            limit = float(min(known, left)) if left > 0 else cluster.up.eps_max
            clusters.append(replace(cluster, up=replace(cluster.up, eps_max=limit)))
        return replace(self._instance, clusters=tuple(clusters))

    def _distortion_left(self, sizes: Sequence[int | None]) -> Array:
        """Distortion that C11 leaves to each cluster, (N,); -inf for a cluster without segments, inf without C11."""
        if self._per_round is None:
            return np.array([-np.inf if size is None else np.inf for size in sizes])
        limit = self._per_round.distortion_left
        return np.array([-np.inf if size is None else limit(size, self._instance.L) for size in sizes])

    def _least_distortion(self) -> Array:
        """Distortion of each cluster on its best channel at the largest power, (N,); inf without a channel."""
        uplinks = self._uplinks
        return np.min(np.where(uplinks.feasible, uplinks.distortion(uplinks.high), np.inf), axis=1)
