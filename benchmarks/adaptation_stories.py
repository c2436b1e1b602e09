"""The network of ``adaptation.py`` that nobody but the benchmark knows, and the stories of what happens to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.scenario import Scenario, load_scenario
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, LINK, OUTLET, STREAM
from strategies.estimation.measured_network import MeasuredNetwork, declared_times

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
"""Factors of each device, over what the scenario declares."""


@dataclass
class Truth:
    """True times of devices and links in a round, as factors of what the scenario declares."""

    teb: list[float] = field(default_factory=lambda: [1 / speed for speed in TRUE_SPEED])
    link: list[float] = field(default_factory=lambda: [1.0] * len(TRUE_SPEED))
    away: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Story:
    """A story of changes of the network."""

    name: str
    truth: Callable[[int], Truth]
    """Factors of a round, from 1."""
    rounds: int
    steps: tuple[int, ...] = ()
    """The last rounds before something changes at once."""
    is_steady: bool = False
    """True if nothing ever changes, so that no other plan is needed."""
    noise: float = 0.0
    """Relative standard deviation that is added to devices and delays, where the story is played on shaped machines."""

    def earlier(self, rounds: int, by: int) -> Story:
        """Let it happen some rounds earlier, and end after as many."""
        return replace(
            self, truth=lambda round_: self.truth(round_ + by), rounds=rounds, steps=tuple(s - by for s in self.steps)
        )


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


def slower_links(round_: int, links: tuple[int, ...] = (2, 3), factor: float = 6.0) -> Truth:
    """Let the rate of two links fall to a part after round 30: to a sixth, or another."""
    truth = Truth()
    for k in links:
        truth.link[k] *= factor if round_ > 30 else 1.0
    return truth


def drift(round_: int) -> Truth:
    """Let the fastest device become slower by 1 % a round from round 30 to round 100."""
    truth = Truth()
    truth.teb[0] *= 1.01 ** min(max(round_ - 30, 0), 70)
    return truth


def comes_and_goes(round_: int) -> Truth:
    """Let device 1 be away in the rounds 31 to 45 and 61 to 75."""
    return Truth(away=frozenset({1} if 30 < round_ <= 45 or 60 < round_ <= 75 else ()))


STORIES = (
    Story(name="steady noise", truth=steady, rounds=220, is_steady=True),
    Story(name="a device three times slower", truth=slower_device, rounds=60, steps=(30,)),
    Story(name="a device three times faster", truth=faster_device, rounds=60, steps=(30,)),
    Story(name="two links at a sixth of their rate", truth=slower_links, rounds=60, steps=(30,)),
    Story(name="a drift of 1 % a round", truth=drift, rounds=120),
    Story(name="a device comes and goes", truth=comes_and_goes, rounds=90, steps=(30, 45, 60, 75)),
)


def scenario(text: str = SCENARIO) -> Scenario:
    """Read the benchmark's network."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.toml"
        path.write_text(text)
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
