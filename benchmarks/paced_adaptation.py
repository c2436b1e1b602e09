"""The real rounds of ``adaptation.py --paced``: Ray actors and gloo, a control unit with embedding and decoder.

Each device and link takes the time that the story says, times the scale; the planner sees the reports that the control
unit gives, with all that the runtime adds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from adaptation import STORIES, Truth, rounds_of, summary, true_network
from paced_devices import RandomPairs, spec

from client_pipeline.partition.families import build_parts
from client_pipeline.runtime.actors import start_control_unit, train_round
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit import ClusterSetup, RoundOrder
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.pacing import Pace
from client_pipeline.runtime.private_ray import private_ray
from strategies.planning.plan_demands import plan_times
from strategies.planning.planner import Decision

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
        start_control_unit(self.setup)
        self.weights = build_parts(self.setup.spec, seed=0).weights()

    def train(self, decision: Decision, truth: Truth) -> dict[str, Any]:
        """Train one round at the pace of the truth; returns the control unit's report."""
        plan = decision.plans[0]
        instance = true_network(decision.declared, truth, self.scale).instance(decision.declared)
        pace = Pace.of(plan_times(instance, 0, plan), 0.0, self.scale)
        order = RoundOrder(round=decision.number, weights=self.weights, plan=plan, pace=pace)
        return train_round(self.setup.run, 0, order, _TIMEOUT_S).report


def paced_rows(scale: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the stories with a step, shortened: rows as those of the synthetic part."""
    rows = []
    with private_ray(num_cpus=2, namespace="collapipe"):
        for number, name in enumerate(PACED_STORIES):
            story, _, (step,) = STORIES[name]
            cluster: list[PacedCluster] = []

            def train(decision: Decision, truth: Truth, number: int = number, made: Any = cluster) -> dict[str, Any]:
                if not made:
                    d = decision.declared
                    made.append(PacedCluster(number, scale, d.steps, d.b, d.L))
                return made[0].train(decision, truth)  # type: ignore[no-any-return]

            lines = []
            shift = step - BEFORE
            for line in rounds_of(lambda r, s=story, by=shift: s(r + by), BEFORE + AFTER, train, scale):  # type: ignore[misc]
                lines.append(line | {"round": line["round"] + shift})
                say(
                    f"{name}, round {line['round']}: predicted {line['predicted_s']:.1f} s, measured "
                    f"{line['measured_s']:.1f} s, regret {line['regret']:.1%} {'; '.join(line['reasons'])}"
                )
            rows.append(summary(name, (step,), lines, met=4) | {"rounds": len(lines)})
    return rows
