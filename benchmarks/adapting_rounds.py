"""The loop of ``adaptation.py``: plan, train, compare and learn; then what the rounds lost against the best plan."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from adaptation_stories import Story, Truth, without
from best_plans import best_plans

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.scenario import Scenario
from strategies.dssda.instance import Instance
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import DSSDA

FOUND = 0.05
"""Regret below which a change counts as found."""
SETTLING = 2
"""Rounds after a step whose regret and prediction count for the time until it is found alone."""
MET = 4
"""Rounds in which the network is met: their prediction does not count."""
FALSE_GAIN = 0.01
"""A new plan in a network that has not changed is false if its rounds are not at least this much shorter."""
_SCATTER_ROUNDS = 5
"""Least rounds with one plan whose scatter says something."""

Train = Callable[[Instance, ClusterPlan, Truth], dict[str, Any]]


@dataclass(kw_only=True)
class Line:
    """One round."""

    round: int
    plan: ClusterPlan
    declared: Instance
    truth: Truth
    changed: bool
    """True if another plan began, for more than one round."""
    trial: bool
    reasons: list[str]
    predicted_s: float
    measured_s: float
    seconds: float
    """Time that counts for the regret: measured, or of the event simulator under the true numbers [s]."""
    wall_s: float
    """Planning, training and learning [s]."""
    plan_s: float
    """Planning alone [s]."""
    regret: float | None = None

    @property
    def state(self) -> str:
        """The truth, to compare and to look up."""
        return json.dumps([self.truth.teb, self.truth.link, sorted(self.truth.away)])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        regret = None if self.regret is None else round(self.regret, 4)
        return {
            "round": self.round,
            "plan": plan_text(self.plan),
            "predicted_s": round(self.predicted_s, 4),
            "measured_s": round(self.measured_s, 4),
            "wall_s": round(self.wall_s, 3),
            "regret": regret,
            "reasons": self.reasons,
        }


def plan_text(plan: ClusterPlan) -> str:
    """A plan in words: devices and their TEBs."""
    return f"{', '.join(f'{k}:{plan.delta[k]}' for k in plan.devices)} with m = {plan.m}"


def rounds_of(scenario: Scenario, network: MeasuredNetwork, story: Story, train: Train) -> Iterator[Line]:
    """Plan, train, compare and learn, round after round.

    Parameters
    ----------
    scenario : as it is declared
    network : that learns, without any knowledge
    story : what really happens
    train : gives the report of a round
    """
    adaptation = Adaptation(network)
    planner = RoundPlanner(scenario, DSSDA(), adaptation=adaptation)
    for number in range(1, story.rounds + 1):
        truth, began = story.truth(number), time.perf_counter()
        decision = planner.plan(number, [1.0])
        plan_s = time.perf_counter() - began
        plan, declared = decision.plans[0], decision.declared
        report = train(declared, plan, truth)
        compared = adaptation.comparison(0, report, None)
        taken = [change for change in adaptation.changes if change.taken]
        adaptation.observe(number, 0, report, declared, None)
        yield Line(
            round=number,
            plan=plan,
            declared=declared,
            truth=truth,
            changed=any(not change.trial for change in taken),
            trial=any(change.trial for change in taken),
            reasons=[change.reason for change in taken],
            predicted_s=compared["predicted_train_s"],
            measured_s=compared["measured_train_s"],
            seconds=compared["measured_train_s"],
            wall_s=time.perf_counter() - began,
            plan_s=plan_s,
        )


class SimulatedRegret:
    """Regret by the event simulator under the true numbers, against the best of all plans.

    Parameters
    ----------
    true_network : gives the network that knows the true numbers
    """

    def __init__(self, true_network: Callable[[Instance, Truth], MeasuredNetwork]) -> None:
        self._true_network = true_network
        self._best: dict[str, float] = {}
        self._seconds: dict[tuple[str, ClusterPlan], float] = {}

    def fill(self, line: Line, *, is_judged: bool = True) -> Line:
        """Give a round its seconds, and its regret if it is to be judged."""
        declared, truth = line.declared, line.truth
        lost = [k for k in line.plan.devices if k in truth.away]
        plan = without(line.plan, lost) if lost else line.plan
        # Most rounds have the network and the plan of the one before.
        if (line.state, plan) not in self._seconds:
            self._seconds[line.state, plan] = self.seconds(declared, plan, truth)
        line.seconds = line.wall_s = self._seconds[line.state, plan]
        if not is_judged:
            return line
        if line.state not in self._best:
            network = self._true_network(declared, truth)
            [best] = best_plans(network.instance(declared), network, 1)
            self._best[line.state] = self.seconds(declared, best, truth)
        line.regret = line.seconds / self._best[line.state] - 1
        return line

    def seconds(self, declared: Instance, plan: ClusterPlan, truth: Truth) -> float:
        """Seconds of a round's local steps under the true numbers."""
        network = self._true_network(declared, truth)
        return network.predict(network.instance(declared), 0, plan).train_s


def summary(story: Story, lines: list[Line]) -> dict[str, Any]:
    """Sum up a story: regret, time until the changes are found, needless plans, error of the prediction.

    The first rounds, in which the network is met, and the two rounds after each step count for the time until it is
    found alone, and for ``prediction_error_all``.
    """
    lines = [line for line in lines if line.regret is not None]
    met = [line for line in lines if line.round > MET]
    settled = [line for line in met if not any(s < line.round <= s + SETTLING for s in story.steps)]
    late = settled if not story.steps else [line for line in settled if line.round > story.steps[0]]
    delays = [_until_found(lines, step) for step in story.steps]
    regrets = [line.regret for line in late if line.regret is not None]
    quiet = lines if not story.steps else [line for line in lines if line.round <= story.steps[0]]
    return {
        "story": story.name,
        "rounds": len(lines),
        "regret_mean": statistics.mean(regrets),
        "regret_worst": max(regrets),
        "rounds_until_found": max((rounds for rounds, _ in delays), default=None),
        "seconds_until_found": max((seconds for _, seconds in delays), default=None),
        "replans": sum(line.changed for line in lines),
        "trials": sum(line.trial for line in lines),
        "false_replans": false_replans(quiet) if story.steps or story.is_steady else None,
        "prediction_error": statistics.mean(_errors(settled)),
        "prediction_error_all": statistics.mean(_errors(lines)),
        "scatter": scatter(settled),
        "plan_s": statistics.mean(line.plan_s for line in lines),
    }


def _errors(lines: list[Line]) -> list[float]:
    return [abs(line.predicted_s / line.measured_s - 1) for line in lines]


def _until_found(lines: list[Line], step: int) -> tuple[int, float]:
    """Rounds and seconds after a step until the first round without much regret; all that are left if there is none."""
    lost: list[Line] = []
    for line in lines:
        if line.round > step:
            if line.regret is not None and line.regret < FOUND:
                break
            lost.append(line)
    return len(lost), sum(line.wall_s for line in lost)


def false_replans(lines: list[Line]) -> int:
    """Count new plans whose rounds are not shorter than those of the plan before, median against median."""
    stretches: list[list[Line]] = []
    for line in lines:
        if line.changed or not stretches:
            stretches.append([])
        stretches[-1].append(line)
    medians = [statistics.median(line.seconds for line in stretch) for stretch in stretches]
    return sum(after > (1 - FALSE_GAIN) * before for before, after in zip(medians, medians[1:], strict=False))


def scatter(lines: list[Line]) -> float | None:
    """Mean distance of rounds with one plan from their median, relative: what no prediction can know."""
    alike: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        alike[plan_text(line.plan), line.state].append(line.measured_s)
    distances = [
        abs(s / statistics.median(times) - 1)
        for times in alike.values()
        if len(times) >= _SCATTER_ROUNDS
        for s in times
    ]
    return statistics.mean(distances) if distances else None


def table(rows: list[dict[str, Any]]) -> str:
    """Draw the rows as a table of Markdown."""
    lines = [
        "| what happens | rounds | regret, mean | worst | until < 5 % | false replans | prediction error | of all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        delay = "" if row["rounds_until_found"] is None else f"{row['rounds_until_found']}, "
        delay += "" if row["seconds_until_found"] is None else f"{row['seconds_until_found']:.1f} s"
        false = "" if row["false_replans"] is None else str(row["false_replans"])
        lines.append(
            f"| {row['story']} | {row['rounds']} | {row['regret_mean']:.2%} | {row['regret_worst']:.2%} | {delay} | "
            f"{false} | {row['prediction_error']:.2%} | {row['prediction_error_all']:.2%} |"
        )
    return "\n".join(lines)
