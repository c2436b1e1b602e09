"""How fast does a run notice that its network has changed, and what does it lose until then? Regret and prediction.

A cluster of devices whose speeds and rates are known to nobody but the benchmark trains round after round. The planner
sees the reports of the rounds alone, as a control unit gives them, with noise; ``oracle`` plans every round by the true
numbers. Both plans are timed by the event simulator under the true numbers: their ratio is the regret.

``--synthetic`` takes a minute: estimators, planner and event simulator, no process. ``--paced`` trains for real, on Ray
actors that take the time that the truth says (``paced_adaptation.py``; a quarter of an hour). ``--shaped`` runs a
process for each machine, in a network namespace whose rate the kernel limits (``shaped_adaptation.py``; half an hour).

    python benchmarks/adaptation.py --synthetic [--seeds 5] [--noise 0.02] [--json]
    python benchmarks/adaptation.py --paced [--time-scale 0.1] [--json]
    python benchmarks/adaptation.py --shaped [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.system.scenario import Scenario, load_scenario
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, LINK, OUTLET, STREAM
from strategies.estimation.measured_network import MeasuredNetwork, declared_times
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import Decision, RoundPlanner
from strategies.planning.policies import DSSDA

SCENARIO = """
format = "collapipe-scenario/1"
clusters = 1
devices = 5
channels = 1

[device]
flop-per-cycle = 16.0
frequency-ghz = 0.4
memory-gb = 3.0
speed-factor = { min = 1.0, max = 1.0 }

[link]
bandwidth-mhz = 2.0

[block]
memory-gb = 0.375
forward-gflop = 0.5
backward-gflop = 1.0
backward-per = "sample"
overhead-s = 0.05
activations-mbit = 0.4
gradient-mbit = 0.4
activations-per = "sample"
link-latency-s = 0.02

[planner]
blocks = 12
batch-size = 16
max-micro-batches = 16
local-steps = 4
latency = "flowshop"
energy = "none"
gamma-max = 1e6
"""
TRUE_SPEED = (1.4, 1.0, 0.9, 0.6, 0.5)
"""Of each device, over what the scenario declares."""


@dataclass
class Truth:
    """What devices and links really take in a round, as factors of what the scenario declares."""

    teb: list[float] = field(default_factory=lambda: [1 / speed for speed in TRUE_SPEED])
    link: list[float] = field(default_factory=lambda: [1.0] * len(TRUE_SPEED))
    away: frozenset[int] = frozenset()


Story = Callable[[int], Truth]


def steady(round_: int) -> Truth:
    """Return a network that stays as it is."""
    del round_
    return Truth()


def slower_device(round_: int) -> Truth:
    """Let the fastest device throttle to a third after round 30."""
    truth = Truth()
    truth.teb[0] *= 3.0 if round_ > 30 else 1.0
    return truth


def faster_device(round_: int) -> Truth:
    """Let the slowest device become three times as fast after round 30."""
    truth = Truth()
    truth.teb[4] /= 3.0 if round_ > 30 else 1.0
    return truth


def slower_link(round_: int) -> Truth:
    """Let the rate of two links fall to a sixth after round 30."""
    truth = Truth()
    for k in (0, 1):
        truth.link[k] *= 6.0 if round_ > 30 else 1.0
    return truth


def drift(round_: int) -> Truth:
    """Let the fastest device become slower by 1 % a round from round 30 to round 100."""
    truth = Truth()
    truth.teb[0] *= 1.01 ** min(max(round_ - 30, 0), 70)
    return truth


def comes_and_goes(round_: int) -> Truth:
    """Let device 1 be away in the rounds 31 to 45 and 61 to 75."""
    return Truth(away=frozenset({1} if 30 < round_ <= 45 or 60 < round_ <= 75 else ()))


STORIES: dict[str, tuple[Story, int, tuple[int, ...]]] = {
    "steady noise": (steady, 220, ()),
    "a device three times slower": (slower_device, 60, (30,)),
    "a device three times faster": (faster_device, 60, (30,)),
    "two links at a sixth of their rate": (slower_link, 60, (30,)),
    "a drift of 1 % a round": (drift, 120, ()),
    "a device comes and goes": (comes_and_goes, 90, (30, 45, 60, 75)),
}
"""Story, rounds, and the last rounds before the steps."""


def scenario() -> Scenario:
    """Read the benchmark's network."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.toml"
        path.write_text(SCENARIO)
        return load_scenario(str(path))


def true_network(declared: Instance, truth: Truth, time_scale: float | None = None) -> MeasuredNetwork:
    """Return a network that knows the true numbers, as if it had measured them without noise.

    Paced devices wait for their links, and have no stream to speak of.
    """
    network = MeasuredNetwork(declared.num_clusters, time_scale)
    for key, (fixed_s, sample_s) in true_times(declared, truth).items():
        if time_scale is not None and key[0] in (OUTLET, STREAM):
            continue
        network.clusters[0].believe(key, fixed_s, sample_s)
    network.clusters[0].away = set(truth.away)
    return network


def true_times(declared: Instance, truth: Truth) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds of TEBs and links: fixed, and of a sample; of outlet and stream, too."""
    factors = {DEVICE: truth.teb, LINK: truth.link}
    times = {
        (kind, k): (factors[kind][k] * believed.fixed_s, factors[kind][k] * believed.sample_s)
        for (kind, k), believed in declared_times(declared, 0).items()
    }
    return times | {(OUTLET, 0): (0.02, 0.01), (STREAM, 0): (0.05, 0.02)}


class SyntheticCluster:
    """Reports of rounds that nobody trained.

    Parameters
    ----------
    noise, seed : of every number, relative; and of that noise
    spare : whether devices without TEBs try one, as machines of their own do
    """

    def __init__(self, noise: float, seed: int, spare: bool = True) -> None:
        self.noise, self.draw, self.spare = noise, np.random.default_rng(seed), spare
        self._plan: ClusterPlan | None = None
        self._away: frozenset[int] = frozenset()
        self._moved = 0

    def train(self, declared: Instance, plan: ClusterPlan, truth: Truth) -> dict[str, Any]:
        """Return the report of a round under a plan."""
        faults = [{"kind": "joined", "device": k} for k in sorted(self._away - truth.away)]
        lost = [k for k in plan.devices if k in truth.away]
        if lost:
            plan = without(plan, lost)
            faults += [{"kind": "device", "device": k} for k in lost]
        self._away = truth.away
        network, times = true_network(declared, truth), true_times(declared, truth)
        prediction = network.predict(network.instance(declared), 0, plan)
        sizes = sorted(set(micro_batch_sizes(declared.b, plan.m)))
        spread = 1 + self.noise * self.draw.standard_normal()
        self._moved += sum(a != b for a, b in zip(owners(plan), owners(self._plan or plan), strict=True))
        self._plan = plan

        def seen(key: tuple[str, int]) -> list[list[float]]:
            fixed_s, sample_s = times[key]
            factor = float(np.exp(self.noise * self.draw.standard_normal()))
            return [[n, 8, factor * (fixed_s + n * sample_s)] for n in sizes]

        last = plan.order[-1]
        return {
            "plan": plan.to_dict(),
            "faults": faults,
            "measured": {
                "tebs": {str(k): seen((DEVICE, k)) for k in plan.devices},
                "links": {str(k): seen((OUTLET, 0) if k == last else (LINK, k)) for k in plan.order},
                "spare": {str(k): seen((DEVICE, k)) for k in idle(plan, truth) if self.spare},
                "stream": seen((STREAM, 0)),
                "pipeline_s": prediction.pipeline_s * spread,
            },
            "train_s": declared.steps * prediction.pipeline_s * spread,
            "paced_s": None,
            "exchange_s": None,
            "prepare_s": 0.5 + 0.2 * self._moved,
            "collect_s": 0.1,
            "moved_blocks": self._moved,
            "moved_bytes": 4_000_000 * self._moved,
        }


def idle(plan: ClusterPlan, truth: Truth) -> list[int]:
    """Return the devices that are there and have no TEB."""
    return [k for k, blocks in enumerate(plan.delta) if not blocks and k not in truth.away]


def owners(plan: ClusterPlan) -> list[int]:
    """Return the device of each TEB."""
    return [segment.device for segment in plan.segments() for _ in segment.blocks]


def without(plan: ClusterPlan, lost: list[int]) -> ClusterPlan:
    """Give the TEBs of lost devices to the last one that is left, as a control unit in need might."""
    delta, order = list(plan.delta), [k for k in plan.order if k not in lost]
    order = order or [k for k in range(len(delta)) if k not in lost][:1]
    delta[order[-1]] += sum(delta[k] for k in lost)
    for k in lost:
        delta[k] = 0
    return replace(plan, delta=tuple(delta), order=tuple(order))


def true_round_s(declared: Instance, plan: ClusterPlan, truth: Truth, time_scale: float | None = None) -> float:
    """Seconds of a round's local steps under the true numbers."""
    network, lost = true_network(declared, truth, time_scale), [k for k in plan.devices if k in truth.away]
    plan = without(plan, lost) if lost else plan
    return network.predict(network.instance(declared), 0, plan).train_s


def oracle_plan(declared: Instance, number: int, truth: Truth, time_scale: float | None = None) -> ClusterPlan:
    """Plan by the true numbers."""
    planner = RoundPlanner(scenario(), DSSDA(), adaptation=Adaptation(true_network(declared, truth, time_scale)))
    return planner.plan(number, [1.0]).plans[0]


Train = Callable[[Decision, Truth], dict[str, Any]]


def rounds_of(story: Story, num_rounds: int, train: Train, time_scale: float | None = None) -> Iterator[dict[str, Any]]:
    """Plan, train, compare and learn, round after round."""
    network = MeasuredNetwork(1, time_scale)
    planner = RoundPlanner(scenario(), DSSDA(), adaptation=Adaptation(network))
    adaptation, best = planner.adaptation, {}
    assert adaptation is not None
    for number in range(1, num_rounds + 1):
        truth = story(number)
        begun = time.perf_counter()
        decision = planner.plan(number, [1.0])
        plan_s = time.perf_counter() - begun
        plan, declared = decision.plans[0], decision.declared
        key = json.dumps([truth.teb, truth.link, sorted(truth.away)])
        if key not in best:
            best[key] = true_round_s(declared, oracle_plan(declared, number, truth, time_scale), truth, time_scale)
        report = train(decision, truth)
        compared = adaptation.comparison(0, report, None)
        taken = [change for change in adaptation.changes if change.taken]
        yield {
            "round": number,
            "plan": plan.to_dict(),
            "changed": any(not change.trial for change in taken),
            "trial": any(change.trial for change in taken),
            "reasons": [change.reason for change in taken],
            "regret": true_round_s(declared, plan, truth, time_scale) / best[key] - 1,
            "predicted_s": compared["predicted_train_s"],
            "measured_s": compared["measured_train_s"],
            "plan_s": plan_s,
        }
        adaptation.observe(number, 0, report, declared, None)


def summary(name: str, steps: tuple[int, ...], lines: list[dict[str, Any]], met: int = 10) -> dict[str, Any]:
    """Sum up a story: regret after the steps, rounds until it is below 5 %, needless plans, error of the prediction.

    The first rounds, in which the network is met, and the two rounds after each step count for the time until it is
    found alone.
    """
    settled = [
        line
        for line in lines
        if line["round"] >= lines[0]["round"] + met and not any(s < line["round"] <= s + 2 for s in steps)
    ]
    found = [
        next((line["round"] - step - 1 for line in lines if line["round"] > step and line["regret"] < 0.05), len(lines))
        for step in steps
    ]
    late = settled if not steps else [line for line in settled if line["round"] > steps[0]]
    errors = [abs(line["predicted_s"] / line["measured_s"] - 1) for line in settled]
    quiet = lines[:] if not steps else [line for line in lines if line["round"] <= steps[0]]
    # In a network that stays as it is: a plan that is no better than the one before.
    false = [
        new for old, new in zip(quiet, quiet[1:], strict=False) if new["changed"] and new["regret"] >= old["regret"]
    ]
    return {
        "story": name,
        "rounds": len(lines),
        "regret_mean": statistics.mean(line["regret"] for line in late),
        "regret_worst": max(line["regret"] for line in late),
        "rounds_until_found": max(found, default=None),
        "replans": sum(line["changed"] for line in lines),
        "trials": sum(line["trial"] for line in lines),
        "false_replans": len(false) if steps or name.startswith("steady") else None,
        "prediction_error": statistics.mean(errors),
        "plan_s": statistics.mean(line["plan_s"] for line in lines),
    }


def synthetic(seeds: int, noise: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every story with several seeds; numbers are means over the seeds, ``worst`` and replans the largest."""
    rows = []
    for name, (story, num_rounds, steps) in STORIES.items():
        parts = []
        for seed in range(seeds):
            cluster = SyntheticCluster(noise, seed)
            lines = list(rounds_of(story, num_rounds, lambda d, t, c=cluster: c.train(d.declared, d.plans[0], t)))  # type: ignore[misc]
            if seed == 0:
                for line in lines:
                    for reason in line["reasons"]:
                        say(f"{name}, round {line['round']}: {reason}")
            parts.append(summary(name, steps, lines))
        largest = ("regret_worst", "rounds_until_found", "replans", "trials", "false_replans")
        row: dict[str, Any] = {"story": name, "rounds": num_rounds, "seeds": seeds}
        for key in parts[0].keys() - row.keys():
            values = [part[key] for part in parts if part[key] is not None]
            row[key] = (max if key in largest else statistics.mean)(values) if values else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Draw the rows as a table of Markdown."""
    lines = [
        "| what happens | rounds | regret, mean | worst | rounds until < 5 % | false replans | prediction error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        found, false = ("" if row[key] is None else str(row[key]) for key in ("rounds_until_found", "false_replans"))
        lines.append(
            f"| {row['story']} | {row['rounds']} | {row['regret_mean']:.2%} | {row['regret_worst']:.2%} | {found} | "
            f"{false} | {row['prediction_error']:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--synthetic", action="store_true", help="estimators, planner and event simulator alone")
    what.add_argument("--paced", action="store_true", help="real rounds of devices that take the time that is true")
    what.add_argument("--shaped", action="store_true", help="machines in namespaces with limited rates; needs root")
    parser.add_argument("--time-scale", type=float, default=0.1, help="wall seconds of a virtual second, for --paced")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.02, help="relative, of each median of a round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    say = partial(print, file=sys.stderr, flush=True)
    if arguments.paced:
        from paced_adaptation import paced_rows

        rows = paced_rows(arguments.time_scale, say)
    elif arguments.shaped:
        from shaped_adaptation import shaped_rows

        rows = shaped_rows(say)
    else:
        rows = synthetic(arguments.seeds, arguments.noise, say)
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
