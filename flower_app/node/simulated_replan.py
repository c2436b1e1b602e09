"""Planning once more in the middle of a round, where devices are simulated: with the run's own network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from client_pipeline.partition.plan import ClusterPlan
from flower_app.config.run_config import RunConfig

if TYPE_CHECKING:
    from client_pipeline.system.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class SimulatedReplan:
    """A :class:`~client_pipeline.runtime.replanning.Replan`: the planner's, on the network of the round.

    Network and planner are loaded when the first device is lost, in the control unit's process: most rounds lose none.
    """

    run_id: int
    config: RunConfig
    spec: str
    """The model's specification as JSON."""
    cluster: int
    round: int
    any_memory: bool = False
    """Whether C7 is waived."""

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
    from client_pipeline.partition.spec import ModelSpec
    from flower_app.training.network import training_scenario

    return training_scenario(config, ModelSpec.from_json(spec))
