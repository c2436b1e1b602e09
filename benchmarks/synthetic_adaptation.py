"""The rounds of ``adaptation.py --synthetic``, which nobody trained: a control unit's reports, with noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from adaptation_stories import STORIES, Truth, idle, owners, scenario, true_network, true_times, without
from adapting_rounds import SimulatedRegret, rounds_of, summary

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, LINK, OUTLET, STREAM
from strategies.estimation.measured_network import MeasuredNetwork

LARGEST = ("regret_worst", "rounds_until_found", "seconds_until_found", "replans", "trials", "false_replans")
"""Columns whose largest value over the seeds counts; of all else, the mean."""


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
                "inlets": {},
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


def synthetic(seeds: int, noise: float, say: Callable[[str], None], judged_every: int = 1) -> Iterator[dict[str, Any]]:
    """Run every story with several seeds.

    Parameters
    ----------
    seeds, noise : see :class:`SyntheticCluster`
    say : told why another plan was made
    judged_every : of a network that changes all the time only every so many rounds are held against the best plan,
        which is sought anew for each; of one that changes in steps each round is
    """
    regret = SimulatedRegret(true_network)
    for story in STORIES:
        parts = []
        for seed in range(seeds):
            cluster = SyntheticCluster(noise, seed)
            every = 1 if story.steps or story.is_steady else judged_every
            lines = [
                regret.fill(line, is_judged=line.round % every == 0)
                for line in rounds_of(scenario(), MeasuredNetwork(1), story, cluster.train)
            ]
            if seed == 0:
                for line in lines:
                    for reason in line.reasons:
                        say(f"{story.name}, round {line.round}: {reason}")
            parts.append(summary(story, lines))
        row: dict[str, Any] = {"story": story.name, "rounds": story.rounds, "seeds": seeds}
        for key in parts[0].keys() - row.keys():
            values = [part[key] for part in parts if part[key] is not None]
            row[key] = (max if key in LARGEST else statistics.mean)(values) if values else None
        yield row
