"""Policies that decide a whole round: segments, micro-batches, channels and powers of all clusters.

A policy gets the round's problem and answers it; :func:`make_policy` finds one by name. Only ``dssda`` certifies
its answer. The formulas score the others like any decision, and these may break constraints that they do not consider.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from client_pipeline.near_names import did_you_mean
from client_pipeline.plugins import class_named
from strategies.dssda.answer import Answer
from strategies.dssda.paper.paper import plan_round_paper
from strategies.dssda.paper.paper_printed import plan_round_printed
from strategies.dssda.planner import plan_round
from strategies.planning.fixed import FixedPlans
from strategies.planning.policy import Round, RoundPolicy, plan_with
from strategies.planning.policy_names import OPTIMAL as OPTIMAL, POLICIES as POLICIES
from strategies.planning.ranked import RANKS, SEGMENTS, RankedSelection
from strategies.planning.segment_rules import uniform_choice


class DSSDA(RoundPolicy):
    """The certified optimum of the round's problem."""

    name = "dssda"
    controls_power = True
    tells_tebs_apart = True
    seeks_least_time = True

    def plan(self, round_: Round) -> Answer:
        """Plan by :func:`strategies.dssda.planner.plan_round`."""
        return plan_round(round_.instance)


class DSSDAPaper(RoundPolicy):
    """Algorithms 2 to 4 of the paper.

    Parameters
    ----------
    c11 : whether the bound holds in every round, as printed
    printed : with ``c11``: whether the loops are the printed ones, for rounds with the printed drift
    """

    name = "dssda-paper"

    def __init__(self, c11: bool = False, printed: bool = False) -> None:
        self.c11, self.printed = c11, printed

    def plan(self, round_: Round) -> Answer:
        """Plan by :func:`strategies.dssda.paper.paper.plan_round_paper`, or as printed."""
        if not self.c11:
            return plan_round_paper(round_.instance)
        if round_.per_round is None:
            raise ValueError("C11 needs a scenario: an instance does not say what Gamma and Gamma_max are")
        if self.printed:
            return plan_round_printed(round_.instance, round_.per_round).answer
        return plan_round_paper(round_.instance, per_round=round_.per_round)


class UniformSegments(RoundPolicy):
    """CollaPipe without segment scheduling: uniform segments, channels and powers as ``dssda``."""

    name = "uniform"
    controls_power = True
    tells_tebs_apart = True

    def plan(self, round_: Round) -> Answer:
        """Plan with a single choice of segments for each cluster."""
        instance = round_.instance
        return plan_with(instance, [uniform_choice(instance, n) for n in range(instance.num_clusters)])


def make_policy(
    name: str, *, plan_file: str = "", seed: int = 0, c11: bool = False, drift: str = "true"
) -> RoundPolicy:
    """Return the policy of that name.

    Parameters
    ----------
    name : one of :data:`POLICIES`; ``random+optimal`` is ``random`` with the segments of least pipeline time; or
        ``module:Class``, a class of :class:`~strategies.planning.policy.RoundPolicy`
    plan_file : of ``fixed``
    seed : of ``random``, and of a class
    c11 : of ``dssda-paper``
    drift : of the rounds that it will plan; with ``c11``, ``printed`` makes ``dssda-paper`` follow the printed loops

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name, a class that is no policy, or ``fixed`` without a plan file.
    """
    if ":" in name:
        return _policy_of_class(name, seed)
    if name == "fixed":
        if not plan_file:
            raise ValueError("policy: fixed needs a plan file; give its path")
        return FixedPlans(Path(plan_file))
    base, _, segments = name.partition("+")
    if base in RANKS and (not segments or name.endswith(OPTIMAL)) and (segments or "uniform") in SEGMENTS:
        return RankedSelection(name, RANKS[base](seed), SEGMENTS[segments or "uniform"])
    plain: dict[str, RoundPolicy] = {
        p.name: p for p in (DSSDA(), DSSDAPaper(c11, drift == "printed"), UniformSegments())
    }
    if name not in plain:
        raise ValueError(
            f"policy: expected one of {', '.join(POLICIES)} ({OPTIMAL} after {', '.join(RANKS)}) or module:Class, "
            f"found {name!r}{did_you_mean(name, POLICIES)}"
        )
    return plain[name]


def _policy_of_class(name: str, seed: int) -> RoundPolicy:
    policy = cast(type[RoundPolicy], class_named("policy", name, RoundPolicy)).of_run(seed)
    if not isinstance(getattr(policy, "name", None), str):
        raise ValueError(f"policy: {name!r}: expected the attribute name, a text that tables call it by; add it")
    return policy
