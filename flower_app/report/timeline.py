"""The last step of a round in every cluster: as the model says beside as it was."""

# Alone: what closes a round has the reports, and asks no simulator.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.planning.plan_demands import pipeline_of


def timeline_of(
    scenario: Scenario, number: int, reports: Sequence[Mapping[str, Any]], waived: Sequence[str] = ()
) -> dict[str, Any]:
    """``timeline.json`` of a round.

    Parameters
    ----------
    scenario : the run's network
    number : of the round
    reports : of the control units, each with its ``plan`` and ``timeline``
    waived : constraints that the plans need not meet; what runs is no pipeline of the model's where C7 is among them
    """
    instance = round_instance(scenario, NetworkTrace(scenario).round(number), Queues.empty(scenario.num_clusters))
    clusters = []
    for report in reports:
        plan, n = ClusterPlan.from_dict(report["plan"]), int(report["cluster"])
        modelled: list[list[Any]] = []
        if "C7" not in waived:
            modelled = [list(event) for event in pipeline_of(instance, n, plan).events]
        order = [segment.device for segment in plan.segments()]
        name = {"name": scenario.names[n]} if scenario.names[n] else {}
        clusters.append({"cluster": n, **name, "order": order, "modelled": modelled, "measured": report["timeline"]})
    return {"round": number, "clusters": clusters}
