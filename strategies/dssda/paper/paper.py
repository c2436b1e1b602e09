"""Algorithms 2 to 4 of the paper for one round, typos mended, arXiv:2509.19855v1.

The paper parts the round latency, the one max over pipeline and upload of Eq. (26), into a max over the pipelines and
a max over the uploads, and so the round into problems that know nothing of each other::

    V max_n D_n + V max_n t_up,n + costs  >=  V max_n (D_n + t_up,n) + costs

Segments are scheduled blind to the uploads, channels matched blind to the pipelines. That is why it falls short of
:mod:`strategies.dssda.planner`, and it is kept: ``dssda-paper`` is there to compare with.

Once a round, not within these loops, the queues change the weights that an instance carries; whether these are of the
true drift or of the printed one of P2 is for :mod:`strategies.dssda.queues` to say. With the printed drift and C11
together, :mod:`strategies.dssda.paper.paper_printed` follows the printed loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Answer, Infeasibility, Match, SegmentChoice
from strategies.dssda.evaluation import TOLERANCE, score
from strategies.dssda.instance import Instance
from strategies.dssda.matching import match_channels
from strategies.dssda.paper.paper_segments import cheapest_sizes, paper_segment_choices
from strategies.dssda.paper.sca import PowerSolution, solve_power
from strategies.dssda.per_round_bound import UNBOUNDED, PerRoundBound
from strategies.dssda.planner import plan_round
from strategies.dssda.power import Uplinks


class PaperTrace(NamedTuple):
    """An answer and how it was arrived at."""

    answer: Answer
    objectives: tuple[float, ...]
    """The paper's objective, with two maxima, at the start and after each iteration of Algorithm 4 that was kept; empty
    if infeasible."""
    status: Literal["converged", "stopped", "infeasible"]
    """``stopped``: the limit of iterations came first."""
    powers: tuple[PowerSolution | None, ...]
    """Last report of Algorithm 3 for each cluster, (N,); None without a channel, or where its solver gave up."""


def plan_round_paper(instance: Instance, *, per_round: PerRoundBound = UNBOUNDED) -> Answer:
    """One round's plan by Algorithm 4; its status is ``feasible``, for nothing is proved, or ``infeasible``.

    Parameters
    ----------
    per_round : C11 as printed, in this round; off as a rule
    """
    return trace_round_paper(instance, per_round=per_round).answer


def trace_round_paper(
    instance: Instance,
    *,
    per_round: PerRoundBound = UNBOUNDED,
    tolerance: float = 1e-6,
    max_iterations: int = 50,
) -> PaperTrace:
    """:func:`plan_round_paper` with the steps that it took.

    Parameters
    ----------
    per_round : C11 as printed, in this round; off as a rule
    tolerance : relative fall of the objective below which Algorithm 4 ends
    max_iterations : of Algorithm 4
    """
    round_ = PaperRound(instance, per_round)
    nobody = (None,) * instance.num_clusters
    powers: tuple[PowerSolution | None, ...] = nobody
    # Start: the fewest segments, and powers as large as allowed.
    decision = round_.match(PaperDecision(round_.fewest, nobody, np.full(instance.num_clusters, np.inf)))
    if decision is None:
        return PaperTrace(round_.infeasible(), (), "infeasible", powers)
    objectives = [round_.objective(decision)]
    for _ in range(max_iterations):
        # Step 1, Algorithm 2: segments and micro-batches.
        scheduled = round_.schedule(decision)
        # Step 2: channels, at the powers so far.
        matched = round_.match(scheduled)
        assert matched is not None  # the channels so far remain possible
        # Step 3, Algorithm 3: powers.
        new_decision, powers = round_.allocate_power(matched)
        # Step 4: until the objective falls no more. It may even rise, for no step looks at all of it: channels that
        # lower the sum of the upload times can raise their maximum. Then the iteration before is the answer.
        objective = round_.objective(new_decision)
        fall = objectives[-1] - objective
        if fall >= 0:
            decision = new_decision
            objectives.append(objective)
        if fall <= tolerance * abs(objectives[-1]):
            return PaperTrace(round_.score(decision), tuple(objectives), "converged", powers)
    return PaperTrace(round_.score(decision), tuple(objectives), "stopped", powers)


class PaperDecision(NamedTuple):
    """Decision that the iterations have reached."""

    sizes: tuple[int | None, ...]
    """S of each cluster, matched or not, (N,); None for a cluster without segments."""
    channels: tuple[int | None, ...]
    """(N,)."""
    power_w: Array
    """(N,) [W]; inf for as much as allowed: a cluster without a channel."""


class PaperRound:
    """The steps of Algorithm 4 on one instance.

    Parameters
    ----------
    tables : (N,), the segments of each cluster by S; those of Algorithm 2 if None
    """

    def __init__(
        self,
        instance: Instance,
        per_round: PerRoundBound,
        tables: Sequence[Mapping[int, SegmentChoice]] | None = None,
    ) -> None:
        self._instance, self._bound = instance, per_round
        if tables is None:
            tables = [paper_segment_choices(instance, n) for n in range(instance.num_clusters)]
        self._tables = tables
        self._uplinks = Uplinks.of(instance)

    @property
    def fewest(self) -> tuple[int | None, ...]:
        """The least S of each cluster."""
        return tuple(min(table, default=None) for table in self._tables)

    def schedule(self, decision: PaperDecision) -> PaperDecision:
        """Segments: V max D_n + wS S + wS2 S^2 of the matched clusters together, of the others each for itself."""
        matched = [n for n, j in enumerate(decision.channels) if j is not None]
        others = [n for n, j in enumerate(decision.channels) if j is None and self._tables[n]]
        sizes = list(decision.sizes)
        for group in [matched, *([n] for n in others)]:
            tables = {n: self._allowed_sizes(n, decision) for n in group}
            for n, size in cheapest_sizes(self._instance, tables).items():
                sizes[n] = size
        return decision._replace(sizes=tuple(sizes))

    def match(self, decision: PaperDecision) -> PaperDecision | None:
        """Channels: least V t_up,n + power costs, summed, by the Hungarian method; None if too few are possible.

        The paper matches by these costs alone. A power that C8 forbids on another channel counts as the largest that
        it allows there.
        """
        within_bound, can_match = self._bound.restrict(self._instance, decision.sizes)
        uplinks = Uplinks.of(within_bound, self._micro_batches(decision))
        possible = uplinks.feasible & can_match[:, None]
        x = np.clip(np.log1p(decision.power_w[:, None] / uplinks.noise_gain), uplinks.low, uplinks.high)
        x = np.where(possible, x, uplinks.capped)
        costs = self._instance.V * uplinks.seconds(x) + uplinks.cost(x)
        skip = np.array([cluster.skip for cluster in self._instance.clusters])
        matching = match_channels(np.where(possible, costs, np.inf), skip)
        if matching is None:
            return None
        power = uplinks.power(x)
        power_w = [np.inf if j is None else float(power[n, j]) for n, j in enumerate(matching.channel_of)]
        return decision._replace(channels=matching.channel_of, power_w=np.array(power_w))

    def allocate_power(self, decision: PaperDecision) -> tuple[PaperDecision, tuple[PowerSolution | None, ...]]:
        """Powers: least V t_up,n + power costs of each matched cluster by itself, as if its upload were the longest."""
        within_bound, _ = self._bound.restrict(self._instance, decision.sizes)
        micro_batches = self._micro_batches(decision)
        uplinks = Uplinks.of(within_bound, micro_batches)
        least_power, most_power = uplinks.power(uplinks.low), uplinks.power(uplinks.high)
        power_w, solutions = decision.power_w.copy(), []
        for n, j in enumerate(decision.channels):
            solution = None
            if j is not None:
                solved = solve_power(within_bound, n, j, latency_weight=within_bound.V, m=micro_batches[n])
                assert not isinstance(solved, Infeasibility)  # pairs without an allowed power are not matched
                # Where the convex solver gives up, the power so far stands.
                solution = None if solved.status == "failed" else solved
            if solution:
                # Rounding may take Algorithm 3 to a power of 0, at which no upload ends.
                power_w[n] = np.clip(solution.power_w, least_power[n, j], most_power[n, j])
            solutions.append(solution)
        return decision._replace(power_w=power_w), tuple(solutions)

    def _micro_batches(self, decision: PaperDecision) -> list[int | None]:
        """Number of micro-batches of each cluster at its S, (N,)."""
        return [None if size is None else t[size].m for t, size in zip(self._tables, decision.sizes, strict=True)]

    def score(self, decision: PaperDecision) -> Answer:
        """The decision by the formulas."""
        matches: list[Match | None] = []
        for table, size, j, power in zip(self._tables, *decision, strict=True):
            matches.append(None if size is None or j is None else Match(table[size], j, float(power)))
        return score(self._instance, matches, "feasible")

    def objective(self, decision: PaperDecision) -> float:
        """The paper's objective: the maxima of pipeline and upload apart."""
        clusters = self.score(decision).clusters
        pipeline_s = max(c.choice.pipeline_s for c in clusters if c.choice)
        uplink_s = max(c.uplink_s for c in clusters if c.uplink_s is not None)
        costs = sum(c.cost for c in clusters if c.cost is not None)
        return self._instance.V * (self._instance.steps * pipeline_s + uplink_s) + costs

    def infeasible(self) -> Answer:
        """All that keeps min(N, J) clusters from being matched."""
        planned = plan_round(self._instance)
        if planned.status == "infeasible":
            return planned
        faults = self._bound.faults(self._instance, self.fewest, self.least_distortion())
        return Answer.without_plan(faults, len(self._tables))

    def _allowed_sizes(self, cluster: int, decision: PaperDecision) -> Mapping[int, SegmentChoice]:
        """S that C11 allows at the power so far, or on any channel at all; the S so far among them."""
        channel, current_size = decision.channels[cluster], decision.sizes[cluster]
        if channel is None:
            distortion = float(self.least_distortion()[cluster])
        else:
            distortion = float(self._instance.distortion(cluster, decision.power_w[cluster], channel))
        # Strictly within, so that rounding cannot forbid the power after all.
        return {
            size: choice
            for size, choice in self._tables[cluster].items()
            if size == current_size
            or distortion <= self._bound.distortion_left(size, self._instance.L) * (1 - TOLERANCE)
        }

    def least_distortion(self) -> Array:
        """Distortion of each cluster on its best channel at the largest power, (N,); inf without a channel."""
        uplinks = self._uplinks
        return np.min(np.where(uplinks.feasible, uplinks.distortion(uplinks.high), np.inf), axis=1)
