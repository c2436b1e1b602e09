"""The real rounds of ``adaptation.py --paced``: Ray actors and gloo, a control unit with embedding and decoder.

Each device and link takes the time that the story says, times the scale; the planner sees the reports that the control
unit gives, with all that the runtime adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from adaptation_stories import STORIES, Truth, scenario, true_network
from adapting_rounds import SimulatedRegret, rounds_of, summary
from paced_devices import RandomPairs, spec

from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray

# Ray reads its settings when it is imported.
prepare_private_ray()

from client_pipeline.families.families import build_parts
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.actors import start_control_unit, train_round
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.timetable.pacing import Pace
from strategies.dssda.instance import Instance
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.planning.plan_demands import plan_times

PACED_STORIES = ("a device three times slower", "two links at a sixth of their rate")
BEFORE, AFTER = 8, 6
"""Rounds before and after the step."""
_TIMEOUT_S = 900.0


class PacedCluster:
    """A control unit and its devices."""

    def __init__(self, number: int, scale: float, decision_steps: int, batch_size: int, num_blocks: int) -> None:
        self.scale = scale
        self.setup = ClusterSetup(
            run=f"adapts-{os.getpid()}-{number}",
            cluster=0,
            spec=spec(num_blocks),
            optimizer=OptimizerConfig(),
            runtime=RuntimeConfig(),
            seed=0,
            batch_size=batch_size,
            local_steps=decision_steps,
            load_data=partial(RandomPairs, 4 * batch_size, 64, 6),
        )
        self._round = 0
        start_control_unit(self.setup)
        self.weights = build_parts(self.setup.spec, seed=0).weights()

    def train(self, declared: Instance, plan: ClusterPlan, truth: Truth) -> dict[str, Any]:
        """Train one round at the pace of the truth; returns the control unit's report."""
        self._round += 1
        instance = true_network(declared, truth, self.scale).instance(declared)
        pace = Pace.of(plan_times(instance, 0, plan), 0.0, self.scale)
        order = RoundOrder(round=self._round, weights=self.weights, plan=plan, pace=pace)
        return train_round(self.setup.run, 0, order, _TIMEOUT_S).report


def paced_rows(scale: float, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run the stories with a step, shortened: rows as those of the synthetic part, with every round."""
    regret = SimulatedRegret(lambda declared, truth: true_network(declared, truth, scale))
    network, planned = scenario(), [story for story in STORIES if story.name in PACED_STORIES]
    with private_ray(num_cpus=2, namespace="collapipe"):
        for number, long_story in enumerate(planned):
            story = long_story.earlier(BEFORE + AFTER, long_story.steps[0] - BEFORE)
            size = network.planner
            cluster = PacedCluster(number, scale, size.local_steps, size.batch_size, size.num_blocks)
            lines = []
            for line in rounds_of(network, MeasuredNetwork(1, scale), story, cluster.train):
                lines.append(regret.fill(line))
                say(
                    f"{story.name}, round {line.round}: predicted {line.predicted_s:.1f} s, measured "
                    f"{line.measured_s:.1f} s, regret {line.regret:.1%} {'; '.join(line.reasons)}"
                )
            yield summary(story, lines) | {"lines": [line.to_dict() for line in lines]}
