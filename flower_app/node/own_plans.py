"""Plans that a node makes itself: of a round that no strategy plans, and once more where a device was lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from client_pipeline.partition.plan import ClusterPlan, uniform_plan, whole_blocks
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.control_unit.round_order import RoundOrder
from client_pipeline.timetable.replanning import ProportionalReplan, Replan
from flower_app.config.run_config import RunConfig
from flower_app.node.config import NodeConfig
from strategies.clusters import ClusterState

if TYPE_CHECKING:
    from client_pipeline.system.scenario import Scenario


def own_plan(plans: str, state: ClusterState, config: RunConfig, num_blocks: int) -> ClusterPlan:
    """Plan for one cluster alone: as the server's plan file has it, given as JSON, or ``uniform``."""
    if not plans:
        return uniform_plan(
            speed=state.speeds,
            memory=state.memories,
            block_memory=state.block_memory,
            num_blocks=num_blocks,
            batch_size=config.batch_size,
        )
    raw_plans = json.loads(plans)
    if state.cluster >= len(raw_plans):
        raise ValueError(
            f"{config.plan}: has plans for {len(raw_plans)} clusters, expected one for cluster {state.cluster}"
        )
    return ClusterPlan.from_dict(raw_plans[state.cluster])


def answering_replan(state: ClusterState, num_blocks: int) -> ProportionalReplan:
    """Return the choice of segments while a cluster answers: by the speed of its devices, within their memory."""
    return ProportionalReplan(speed=tuple(state.speeds), capacity=_capacities(state, num_blocks))


def _capacities(state: ClusterState, num_blocks: int) -> tuple[int, ...]:
    """Return how many TEBs each device's memory holds (C7)."""
    return tuple(whole_blocks(memory, state.block_memory, num_blocks) for memory in state.memories)


def replan_of_node(
    run_id: int,
    config: RunConfig,
    node: NodeConfig,
    state: ClusterState,
    spec: ModelSpec,
    num_blocks: int,
    order: RoundOrder,
) -> Replan:
    """Return the control unit's way to plan for the remaining devices when one is lost."""
    any_memory = "C7" in order.waived
    if node.simulated:
        return SimulatedReplan(
            run_id=run_id,
            config=config,
            spec=spec.to_json(),
            cluster=node.cluster,
            round=order.round,
            any_memory=any_memory,
        )
    # The run's scenario is the server's: a node knows of its devices what the set-up says.
    holds = (num_blocks,) * len(state.devices) if any_memory else _capacities(state, num_blocks)
    return ProportionalReplan(speed=tuple(state.speeds), capacity=holds)


@dataclass(frozen=True, kw_only=True)
class SimulatedReplan:
    """A :class:`~client_pipeline.timetable.replanning.Replan`: the planner's, on the network of the round.

    Network and planner are loaded when the first device is lost, in the control unit's process: most rounds lose none.
    """

    run_id: int
    config: RunConfig
    spec: str
    """The model's specification as JSON."""
    cluster: int
    round: int
    any_memory: bool = False
    """C7 is waived."""

    def __call__(self, plan: ClusterPlan, usable: Sequence[int], slowdown: Mapping[int, float]) -> ClusterPlan:
        """See Replan."""
        from strategies.planning.replan import ScheduledReplan

        scenario = scenario_of_run(self.run_id, self.config, self.spec)
        schedule = ScheduledReplan(
            scenario=scenario, cluster=self.cluster, round=self.round, any_memory=self.any_memory
        )
        return schedule(plan, usable, slowdown)


@lru_cache(maxsize=8)
def scenario_of_run(run_id: int, config: RunConfig, spec: str) -> Scenario:
    """Return a run's scenario; each process reads it from its file, and counts FLOP, once."""
    from flower_app.training.network import training_scenario

    return training_scenario(config, ModelSpec.from_json(spec))
