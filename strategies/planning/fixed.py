"""The policy ``fixed``: the plans of a plan file, every round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from client_pipeline.partition.plan import ClusterPlan, read_plans
from strategies.dssda.answer import Answer
from strategies.dssda.evaluation import Match, score
from strategies.dssda.instance import Instance
from strategies.planning.plan_demands import memory_violations
from strategies.planning.policy import Round, RoundPolicy, answer_for_all, plan_with
from strategies.planning.segment_rules import choice_of


class FixedPlans(RoundPolicy):
    """The plans of a plan file; where it names no channel or power, these as ``dssda``.

    Parameters
    ----------
    path : a plan file

    Raises
    ------
    ValueError, FileNotFoundError
        If it cannot be read.
    """

    name = "fixed"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file_plans = read_plans(path)

    def plan(self, round_: Round) -> Answer:
        """Check the file's plans against the instance and score them.

        Raises
        ------
        ValueError
            If the file has no plan for a cluster, or one that does not fit it.
        """
        instance = round_.instance
        if len(self.file_plans) < round_.num_all:
            raise ValueError(
                f"{self.path}: has plans for {len(self.file_plans)} clusters, the problem has {round_.num_all}; "
                "expected one for each"
            )
        plans = [self.file_plans[i] for i in round_.indices]
        for n, plan in enumerate(plans):
            if plan.selected:
                self._check(round_, n)
        selected = [n for n, plan in enumerate(plans) if plan.selected]
        if any(plans[n].channel is None or plans[n].power_w is None for n in selected):
            return _matched_by_planner(instance, plans, selected)
        matches: list[Match | None] = [None] * len(plans)
        for n in selected:
            matches[n] = Match(choice_of(instance, n, plans[n]), plans[n].channel or 0, plans[n].power_w or 0.0)
        return score(instance, matches, "feasible")

    def plans(self, round_: Round, answer: Answer) -> list[ClusterPlan]:
        """The file's own, order and schedule included, with the answer's channels and powers."""
        return [
            replace(self.file_plans[i], selected=part.selected, channel=part.channel, power_w=part.power_w)
            for i, part in zip(round_.indices, answer.clusters, strict=True)
        ]

    def _check(self, round_: Round, n: int) -> None:
        instance, index = round_.instance, round_.indices[n]
        plan, devices = self.file_plans[index], instance.device_arrays(n)
        location = f"{self.path}: clusters[{index}]"
        plan.check(
            num_blocks=instance.L,
            batch_size=instance.b,
            num_devices=len(devices.phi),
            location=location,
        )
        # How much a TEB takes depends on how the pipeline runs.
        ways = round_.choices.plans(plan)
        lacking = [memory_violations(instance, n, way) for way in ways]
        if all(lacking):
            raise ValueError(
                f"{location}: delta {list(plan.delta)} does not fit under {ways[0].schedule}: {'; '.join(lacking[0])}; "
                "give these devices fewer TEBs, or use more devices or another schedule"
            )
        if plan.channel is not None and not 0 <= plan.channel < instance.num_channels:
            raise ValueError(
                f"{location}: channel {plan.channel}: expected null or a channel from 0 to {instance.num_channels - 1}"
            )


def _matched_by_planner(instance: Instance, file_plans: list[ClusterPlan], selected: list[int]) -> Answer:
    """Channels and powers as ``dssda`` for the clusters that the file selects."""
    part = replace(instance, clusters=tuple(instance.clusters[n] for n in selected))
    answer = plan_with(part, [choice_of(part, i, file_plans[n]) for i, n in enumerate(selected)])
    return answer_for_all(instance, answer, selected, "feasible")
