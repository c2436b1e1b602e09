"""Segment scheduler on the control unit, for the devices that remain in the middle of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from client_pipeline.partition.plan import ClusterPlan, whole_blocks
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from client_pipeline.timetable.replanning import ProportionalReplan
from strategies.dssda.instance import Instance
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.dssda.segments import segment_table
from strategies.dssda.unequal_tebs import counted_tebs
from strategies.planning.plan_demands import lean_instance, memory_violations


@dataclass(frozen=True, kw_only=True)
class ScheduledReplan:
    """A :class:`~client_pipeline.timetable.replanning.Replan`: the segments of least pipeline time, with the plan's m.

    A slow device counts with a frequency divided by its slowdown. Where the energy budgets (C9) allow no plan for the
    remaining devices, TEBs go in proportion to the speeds. Only memory (C7) can never be exceeded.
    """

    scenario: Scenario
    cluster: int
    round: int
    """Round of the network, from 1."""
    any_memory: bool = False
    """True if C7 is waived."""

    def __call__(self, plan: ClusterPlan, usable: Sequence[int], slowdown: Mapping[int, float]) -> ClusterPlan:
        """Return a plan for the usable devices; see ``Replan``."""
        instance = self._instance(plan, usable, slowdown)
        devices = instance.clusters[self.cluster].devices
        speed = [device.phi * device.f for device in devices]
        if not self.any_memory:
            # Under other schedules, and with recomputation, TEBs may need less; the plan must fit so.
            keeps_all = plan.schedule == "gpipe" and not instance.recomputes
            lean = instance if keeps_all else lean_instance(instance)
            choices = segment_table(lean, self.cluster).choices.values()
            plans = {choice: replace(plan, delta=choice.delta, order=choice.order(speed)) for choice in choices}
            fitting = [c for c, tried in plans.items() if not memory_violations(instance, self.cluster, tried)]
            if not fitting and lean is not instance:
                fitting = list(segment_table(instance, self.cluster).choices.values())
            if fitting:
                best = min(fitting, key=lambda choice: (choice.pipeline_s, choice.num_segments))
                return replace(plan, delta=best.delta, order=best.order(speed))
        rest = ProportionalReplan(speed=tuple(speed), capacity=tuple(self._capacity(instance, d.mem) for d in devices))
        # The speeds include the slowdown already.
        return rest(plan, usable, {})

    def _instance(self, plan: ClusterPlan, usable: Sequence[int], slowdown: Mapping[int, float]) -> Instance:
        network = NetworkTrace(self.scenario).round(self.round)
        instance_of_all = round_instance(self.scenario, network, Queues.empty(self.scenario.num_clusters))
        cluster = instance_of_all.clusters[self.cluster]
        devices = tuple(
            replace(device, f=device.f / max(slowdown.get(k, 1.0), 1.0), mem=device.mem if k in usable else 0.0)
            for k, device in enumerate(cluster.devices)
        )
        clusters = list(instance_of_all.clusters)
        clusters[self.cluster] = replace(cluster, devices=devices)
        return counted_tebs(replace(instance_of_all, clusters=tuple(clusters), m_set=(plan.m,)))[0]

    def _capacity(self, instance: Instance, memory: float) -> int:
        if self.any_memory or instance.gamma0 <= 0:
            return instance.L if memory > 0 else 0
        return whole_blocks(memory, instance.gamma0, instance.L)
