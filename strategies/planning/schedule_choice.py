"""Choice of a cluster's schedule and token slices: by the event simulator, from a finite list, after the plan.

The certificate is for the closed expressions, which know neither schedules nor token slices. The choice comes after
it, and keeps the planned segments and micro-batches. It tries every schedule with every number of slices that the
devices' memory allows. It takes the one of least simulated time, and of equal ones the one of least memory.

Memory couples both. GPipe keeps the activations of a whole batch, as gamma_0 counts them; the others keep less, and so
does GPipe where devices recompute activations. Where less may be kept, the plan is first made as if a TEB kept one
micro-batch alone. Where no schedule then fits a cluster, its segments are those of least cost among the planner's
choices for each S and m that fit under some schedule; and where none does, the round is planned again with a
whole batch's activations, which every schedule fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.timetable.schedules import SCHEDULES
from strategies.dssda.answer import Answer, SegmentChoice
from strategies.dssda.evaluation import choice_cost, score
from strategies.dssda.instance import Instance
from strategies.dssda.segments import segment_table
from strategies.dssda.split_band import divided
from strategies.planning.pipeline_choices import AUTO_SLICES, PipelineChoices
from strategies.planning.plan_demands import device_memory, lean_instance, memory_violations, pipeline_of
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.segment_rules import choice_of

_EQUAL = 1 + 1e-9
"""Ratio below which two times are equal, and memory decides."""

Seconds = Callable[[int, ClusterPlan], float]
"""Time of a cluster's step under a plan [s]."""


def simulated_seconds(instance: Instance) -> Seconds:
    """Return the event simulator's time of a step, by the costs of a round."""
    return lambda n, plan: pipeline_of(instance, n, plan).makespan


def best_schedule(
    instance: Instance, cluster: int, plan: ClusterPlan, choices: PipelineChoices, seconds: Seconds
) -> ClusterPlan | None:
    """Return a plan with the fastest of the ways to run it that fit its devices; None if none does (C7).

    Parameters
    ----------
    instance : of the round
    cluster : of it
    plan : its segments, order and micro-batches stay
    choices : to choose from
    seconds : of a step
    """
    fitting = [p for p in choices.plans(plan) if not memory_violations(instance, cluster, p)]
    if len(fitting) <= 1:
        return fitting[0] if fitting else None
    times = [seconds(cluster, p) for p in fitting]
    fastest = [p for p, time in zip(fitting, times, strict=True) if time <= min(times) * _EQUAL]
    return min(fastest, key=lambda p: float(device_memory(instance, p).sum()))


def scheduled_plans(
    instance: Instance, answer: Answer, plans: Sequence[ClusterPlan], choices: PipelineChoices, seconds: Seconds
) -> list[ClusterPlan]:
    """Return the plans with schedules and token slices decided, those of clusters that do not train as they are.

    A policy that waives memory (C7) may have none that fits; it gets the first schedule, without slices.
    """
    decided = []
    for n, (part, plan) in enumerate(zip(answer.clusters, plans, strict=True)):
        best = best_schedule(instance, n, plan, choices, seconds) if part.selected else plan
        decided.append(best or replace(choices.plans(plan)[0], token_slices=1))
    return decided


def schedule_rows(
    instance: Instance, answer: Answer, plans: Sequence[ClusterPlan], slices: bool
) -> list[dict[str, Any]]:
    """Return the time of each schedule that fits the memory on the selected clusters, as JSON values.

    With ``slices``, also the time of each number of token slices under the cluster's schedule.
    """
    seconds, rows = simulated_seconds(instance), []

    def times(n: int, others: Mapping[str, ClusterPlan]) -> dict[str, float]:
        return {name: seconds(n, p) for name, p in others.items() if not memory_violations(instance, n, p)}

    for n, (part, plan) in enumerate(zip(answer.clusters, plans, strict=True)):
        if not part.selected:
            continue
        row = {"cluster": n, "schedule": plan.schedule}
        row["step_s"] = times(n, {name: replace(plan, schedule=name) for name in SCHEDULES})
        if slices:
            numbers = sorted({*AUTO_SLICES, plan.token_slices})
            row["token_slices"] = plan.token_slices
            row["slices_s"] = times(n, {str(number): replace(plan, token_slices=number) for number in numbers})
        rows.append(row)
    return rows


class ScheduledPolicy(RoundPolicy):
    """Policy whose segments fit the devices under some schedule, not under GPipe alone.

    Parameters
    ----------
    policy : decides
    choices : to choose from
    """

    def __init__(self, policy: RoundPolicy, choices: PipelineChoices) -> None:
        self.name, self._policy, self._choices = policy.name, policy, choices

    def plan(self, round_: Round) -> Answer:
        """Plan with the least memory of a TEB first."""
        instance = round_.instance
        makes_own_plans = type(self._policy).plans is not RoundPolicy.plans
        keeps_all = self._choices.only_gpipe and not instance.recomputes
        if not instance.gamma_act or keeps_all or makes_own_plans:
            return self._policy.plan(replace(round_, choices=self._choices))
        lean = lean_instance(instance)
        answer = self._policy.plan(replace(round_, instance=lean))
        if answer.status == "infeasible":
            return answer
        choices = [
            part.choice and self._fitting(instance, lean, n, part.choice) for n, part in enumerate(answer.clusters)
        ]
        if any(part.selected and choice is None for part, choice in zip(answer.clusters, choices, strict=True)):
            return self._policy.plan(round_)
        if all(choice is part.choice for part, choice in zip(answer.clusters, choices, strict=True)):
            return answer
        matches = [replace(part, choice=choice).match for part, choice in zip(answer.clusters, choices, strict=True)]
        scored = score(divided(lean, answer), matches, "feasible") if any(matches) else answer
        # A cluster without a channel, as in a policy without uploads, has nothing to score.
        parts = (
            replace(of_match, band_hz=part.band_hz) if match or not part.selected else replace(part, choice=choice)
            for part, of_match, match, choice in zip(answer.clusters, scored.clusters, matches, choices, strict=True)
        )
        return replace(scored, clusters=tuple(parts))

    def _fitting(self, instance: Instance, lean: Instance, n: int, choice: SegmentChoice) -> SegmentChoice | None:
        """Return a choice that fits: the planner's own, or else the cheapest of its choices for each S and m."""
        devices = instance.device_arrays(n)
        speed, seconds = devices.phi * devices.f, simulated_seconds(instance)

        def scheduled(tried: SegmentChoice) -> ClusterPlan | None:
            plan = ClusterPlan(delta=tried.delta, order=tried.order(speed), m=tried.m)
            return best_schedule(instance, n, plan, self._choices, seconds)

        if scheduled(choice) is not None:
            return choice
        best, least = None, float("inf")
        for m in instance.m_set:
            # The joules of C9 depend on m: so do the segments that it allows.
            for tried in segment_table(replace(lean, m_set=(m,)), n).choices.values():
                plan = scheduled(tried)
                if plan is None:
                    continue
                cost = instance.V * instance.steps * seconds(n, plan) + choice_cost(lean, n, tried)
                if cost < least:
                    best, least = choice_of(lean, n, plan), cost
        return best
