"""The rounds of ``adaptation.py --shaped``, on machines in network namespaces, and the best plans measured on them.

The planner sees the reports that a control unit gives, with all that processes, TLS and the machine add. After each
story the plans that the event simulator has for the best of all under the true numbers run on the same machines, and
those that the rounds came to: the fastest one by the clock is what every round is compared with.
"""

from __future__ import annotations

import contextlib
import os
import queue
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from adaptation_stories import (
    SCENARIO,
    TRUE_SPEED,
    Story,
    Truth,
    faster_device,
    scenario,
    slower_device,
    slower_links,
    steady,
)
from adapting_rounds import Line, plan_text, rounds_of, summary
from best_plans import best_plans
from shaped_machines import NOISE, ShapedCluster, shaped_cluster, shaped_network

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.scenario import Scenario
from strategies.dssda.instance import Instance
from strategies.estimation.measured_network import MeasuredNetwork

# Rounds of two seconds: a tenth of the computing of the synthetic part, a twentieth of the rate's time.
_SHORTER = {
    "forward-gflop = 0.5": "forward-gflop = 0.05",
    "backward-gflop = 1.0": "backward-gflop = 0.1",
    "overhead-s = 0.05": "overhead-s = 0.005",
    "bandwidth-mhz = 2.0": "bandwidth-mhz = 4.0",
    "local-steps = 4": "local-steps = 1",
    # What is to be moved must fit rounds of seconds, too.
    "memory-gb = 3.0": "memory-gb = 0.03",
    "memory-gb = 0.375": "memory-gb = 0.00375",
}
BEFORE, AFTER = 6, 8
"""Rounds before and after a step."""
CANDIDATES, CANDIDATE_ROUNDS = 3, 3
"""Plans that are measured for the oracle, beside those that the rounds came to; and rounds of each."""
CLUSTERS = 3
"""Clusters that play stories at the same time: each computes on an eighth of a core, as its machines mostly wait."""
NOISY_ROUNDS = 10
"""Rounds of the fastest one under noise, where a story has it."""
_LASTING = 3
"""Rounds that a state of the network lasts at least to be measured with all of them; else the best one is, once."""


def all_links(round_: int) -> Truth:
    """Let the rate of all machines fall to a sixth after round 30."""
    return slower_links(round_, tuple(range(len(TRUE_SPEED))))


def shaped_drift(round_: int) -> Truth:
    """Let the fastest device become slower by 2 % a round after round 30, for 15 rounds."""
    truth = Truth()
    truth.teb[0] *= 1.02 ** min(max(round_ - 30, 0), 15)
    return truth


def away_for_a_while(round_: int) -> Truth:
    """Let device 1 be away in the rounds 31 to 36."""
    return Truth(away=frozenset({1} if 30 < round_ <= 36 else ()))


def _step(name: str, truth: Callable[[int], Truth], after: int = AFTER, steps: tuple[int, ...] = (30,)) -> Story:
    return Story(name=name, truth=truth, rounds=30 + after, steps=steps).earlier(BEFORE + after, 30 - BEFORE)


STORIES = (
    Story(name="steady", truth=steady, rounds=16, is_steady=True),
    _step("two links at a twelfth of their rate", partial(slower_links, factor=12.0)),
    _step("two links at a sixth of their rate", slower_links),
    _step("a device three times slower", slower_device),
    _step("a device three times faster", faster_device),
    _step("all rates at a sixth", all_links),
    _step("a device comes and goes", away_for_a_while, 6 + AFTER, (30, 36)),
    Story(name=f"steady, with noise of {NOISE:.0%}", truth=steady, rounds=200, is_steady=True, noise=NOISE),
    _step("a drift of 2 % a round", shaped_drift, 15, ()),
)


class MeasuredOracle:
    """Seconds of the best plan in each state of the network, as measured.

    Parameters
    ----------
    cluster : the machines
    say : takes what is going on
    """

    def __init__(self, cluster: ShapedCluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._fastest: dict[str, tuple[float, ClusterPlan]] = {}
        self.measured: list[dict[str, Any]] = []
        """All that was measured, as JSON values."""

    def fill(self, story: Story, lines: Sequence[Line], noise: np.random.Generator | None) -> None:
        """Give the rounds of a story their regrets."""
        states: dict[str, list[Line]] = {}
        for line in lines:
            states.setdefault(line.state, []).append(line)
        for state, those in states.items():
            last = those[-1]
            if state not in self._fastest:
                lasts = len(those) >= _LASTING
                plans = self._best(last.declared, last.truth, CANDIDATES if lasts else 1)
                if lasts and not last.truth.away & set(last.plan.devices):
                    plans.append(ClusterPlan(delta=last.plan.delta, order=tuple(last.plan.devices), m=last.plan.m))
                rounds = CANDIDATE_ROUNDS if lasts else 1
                self._fastest[state] = self._measure(last.declared, last.truth, plans, rounds)
            seconds, plan = self._fastest[state]
            if noise is not None:
                train = partial(self._cluster.train, last.declared, plan, last.truth, noise)
                times = [train()["train_s"] for _ in range(NOISY_ROUNDS)]
                self._note(last.truth, {plan: times}, story.noise)
                seconds = statistics.mean(times)
            for line in those:
                line.regret = line.seconds / seconds - 1

    @staticmethod
    def _best(declared: Instance, truth: Truth, count: int) -> list[ClusterPlan]:
        """Return the fastest plans by the event simulator: of those that give each device as many TEBs, one."""
        network = shaped_network(declared, truth)
        by_parts: dict[tuple[tuple[int, ...], int], ClusterPlan] = {}
        for plan in best_plans(network.instance(declared), network, 200):
            by_parts.setdefault((plan.delta, plan.m), plan)
        return list(by_parts.values())[:count]

    def _measure(
        self, declared: Instance, truth: Truth, plans: list[ClusterPlan], rounds: int
    ) -> tuple[float, ClusterPlan]:
        """Run the plans in turns; returns the least median, and whose it is."""
        times: dict[ClusterPlan, list[float]] = {plan: [] for plan in plans}
        for _ in range(rounds):
            for plan, seconds in times.items():
                seconds.append(self._cluster.train(declared, plan, truth)["train_s"])
        self._note(truth, times, 0.0)
        fastest = min(times, key=lambda plan: statistics.median(times[plan]))
        return statistics.median(times[fastest]), fastest

    def _note(self, truth: Truth, times: dict[ClusterPlan, list[float]], noise: float) -> None:
        for plan, seconds in times.items():
            self._say(f"  oracle: {plan_text(plan)} takes {', '.join(f'{s:.3f}' for s in seconds)} s")
        self.measured.append(
            {
                "teb": truth.teb,
                "link": truth.link,
                "away": sorted(truth.away),
                "noise": noise,
                "plans": [
                    {"plan": plan_text(plan), "measured_s": [round(s, 4) for s in seconds]}
                    for plan, seconds in times.items()
                ],
            }
        )


def shaped_scenario() -> Scenario:
    """Read the benchmark's network, made shorter."""
    text = SCENARIO
    for long, short in _SHORTER.items():
        assert long in text, long
        text = text.replace(long, short)
    return scenario(text)


def shaped_rows(words: Sequence[str], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run the stories whose names hold one of the words: rows as those of the synthetic part, with every round."""
    stories = [story for story in STORIES if any(word in story.name for word in words)]
    free: queue.SimpleQueue[ShapedCluster] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(shaped_cluster()) for _ in range(min(CLUSTERS, len(stories)))]
        for cluster in clusters:
            cluster.meet()
            free.put(cluster)
        pool = stack.enter_context(ThreadPoolExecutor(len(clusters)))
        # The longest first; the rows are in the order of the stories all the same.
        longest = sorted(stories, key=lambda story: -story.rounds)
        rows = {story.name: pool.submit(_row, story, free, say) for story in longest}
        for story in stories:
            yield rows[story.name].result()


def _row(story: Story, free: queue.SimpleQueue[ShapedCluster], say: Callable[[str], None]) -> dict[str, Any]:
    """Play a story on a cluster that is free, and measure the best plans on it."""
    cluster = free.get()
    noise = np.random.default_rng(1) if story.noise else None
    lines: list[Line] = []
    loads = [os.getloadavg()[0]]
    for line in rounds_of(shaped_scenario(), MeasuredNetwork(1), story, partial(cluster.train, noise=noise)):
        lines.append(line)
        loads.append(os.getloadavg()[0])
        say(
            f"{story.name}, round {line.round}: predicted {line.predicted_s:.3f} s, measured "
            f"{line.measured_s:.3f} s, {line.wall_s:.2f} s in all; "
            f"{plan_text(line.plan)} {'; '.join(line.reasons)}"
        )
    oracle = MeasuredOracle(cluster, say)
    oracle.fill(story, lines, noise)
    free.put(cluster)
    row = summary(story, lines) | {
        "load": {"least": min(loads), "median": statistics.median(loads), "most": max(loads)},
        "oracle": oracle.measured,
        "lines": [line.to_dict() for line in lines],
    }
    say(str({key: value for key, value in row.items() if key not in ("lines", "oracle")}))
    return row
