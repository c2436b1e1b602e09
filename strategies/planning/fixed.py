"""The policy ``fixed``: the plans of a plan file, every round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from client_pipeline.partition.plan import ClusterPlan, read_plans
from strategies.dssda.answer import Answer, Match
from strategies.dssda.evaluation import exceeds, score
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
    tells_tebs_apart = True

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
        self._check_channels(round_.num_all)
        plans = [self.file_plans[i] for i in round_.indices]
        selected = [n for n, plan in enumerate(plans) if plan.selected]
        for n in selected:
            self._check(round_, n)
        if all(plans[n].channel is None and plans[n].power_w is None for n in selected):
            return _matched_by_planner(instance, plans, selected)
        matches: list[Match | None] = [None] * len(plans)
        for n, plan in enumerate(plans):
            if plan.selected and plan.channel is not None and plan.power_w is not None:
                matches[n] = Match(choice_of(instance, n, plan), plan.channel, plan.power_w)
        for group, channels in _open_groups(instance, plans, selected):
            answer = _matched_by_planner(_restricted(instance, plans, channels), plans, group)
            if answer.status == "infeasible":
                return answer
            for n in group:
                power_w = plans[n].power_w
                if (match := answer.clusters[n].match) is not None:
                    power_w = match.power_w if power_w is None else power_w
                    matches[n] = Match(match.choice, channels[match.channel], power_w)
        return score(instance, matches, "feasible")

    def plans(self, round_: Round, answer: Answer) -> list[ClusterPlan]:
        """Return the file's plans, order and schedule included, with the answer's channels and powers."""
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
        limit, sends = instance.clusters[n].up.Pmax, instance.upload_bits(n, plan.m) > 0
        if plan.power_w is not None and (exceeds(plan.power_w, limit) or (sends and plan.power_w == 0)):
            raise ValueError(
                f"{location}: power_w {plan.power_w:g}: expected null or a power above 0 and at most the uplink's "
                f"{limit:g} W (C6)"
            )

    def _check_channels(self, num_clusters: int) -> None:
        users: dict[int, int] = {}
        for index, plan in enumerate(self.file_plans[:num_clusters]):
            if not plan.selected or plan.channel is None:
                continue
            if plan.channel in users:
                raise ValueError(
                    f"{self.path}: clusters[{index}]: channel {plan.channel}: clusters[{users[plan.channel]}] has it, "
                    "too, expected another channel for each cluster (C4); change one of them, or make it null"
                )
            users[plan.channel] = index


def _open_groups(
    instance: Instance, file_plans: list[ClusterPlan], selected: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Clusters whose channel or power is open, each group with the channels it may have.

    A cluster whose file names the channel alone has it for itself; those without one share what the file leaves.
    """
    taken = {file_plans[n].channel for n in selected}
    free = [j for j in range(instance.num_channels) if j not in taken]
    groups = [
        ([n], [j]) for n in selected if (j := file_plans[n].channel) is not None and file_plans[n].power_w is None
    ]
    without = [n for n in selected if file_plans[n].channel is None]
    return [*groups, (without, free)] if without and free else groups


def _restricted(instance: Instance, file_plans: list[ClusterPlan], channels: list[int]) -> Instance:
    """The problem with some of its channels, and no more power than the file names."""

    def picked(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[j] for j in channels)

    clusters = tuple(
        replace(
            cluster,
            up=cluster.up if plan.power_w is None else replace(cluster.up, Pmax=plan.power_w),
            h=picked(cluster.h),
            I=picked(cluster.I),
            B=picked(cluster.B),
        )
        for cluster, plan in zip(instance.clusters, file_plans, strict=True)
    )
    return replace(instance, clusters=clusters, band_hz=None)


def _matched_by_planner(instance: Instance, file_plans: list[ClusterPlan], selected: list[int]) -> Answer:
    """Channels and powers as ``dssda`` for the clusters that the file selects."""
    part = replace(instance, clusters=tuple(instance.clusters[n] for n in selected))
    answer = plan_with(part, [choice_of(part, i, file_plans[n]) for i, n in enumerate(selected)])
    return answer_for_all(instance, answer, selected, "feasible")
