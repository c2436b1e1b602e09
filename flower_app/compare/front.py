"""Time against energy: what DSSDA plans as joules become dearer, beside policies and baselines without a price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from client_pipeline.system.scenario import Scenario
from flower_app.compare.columns import four_digits
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.costs import Work, pipeline_work
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import DSSDA
from strategies.planning.policy import RoundPolicy
from strategies.registry import strategy_class

PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Joules' prices as shares of V: a joule weighs as much as so many seconds."""
_BASELINES = ("vanilla-fl", "titanic")
PICTURES = (".png", ".svg", ".pdf")
FRONT_LEGEND = {
    "policy": "who plans; means over networks and rounds without the first quarter",
    "joule in s": "price of a joule in seconds; - where there is none",
    "event s": "latency of a round, pipelines simulated event by event [s]",
    "energy J": "devices and uploads of a round [J]",
    "gap": "largest gap to the certified bound; - where nothing is certified",
}
"""Column of the table of points -> its meaning."""


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """Means over networks and rounds, without the first quarter of the rounds."""

    name: str
    price: float | None
    """Seconds that a joule is worth; None for a policy or baseline without a price."""
    latency_s: float
    """Round latency, pipelines event-simulated with fused chunks [s]."""
    energy_j: float
    """Devices and uploads of a round [J]."""
    gap: float | None
    """The largest gap to the certified bound; None where nothing is certified."""


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is planned.

    Raises
    ------
    ValueError
        For a file of another kind, or in a folder that is not there.
    """
    if path.suffix not in PICTURES:
        raise ValueError(f"--front: expected a file that ends in {', '.join(PICTURES)}, found {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--front: no folder {path.parent}; make it, or name another file")


def energy_front(
    scenarios: Sequence[Scenario],
    policies: Sequence[Callable[[int], RoundPolicy]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[FrontPoint]:
    """Plan the same rounds at every price, and with every policy and baseline."""
    points = []
    for price in PRICES:
        priced = [
            replace(scenario, planner=replace(scenario.planner, energy_price=price * scenario.planner.v))
            for scenario in scenarios
        ]
        progress(f"dssda, a joule for {price:g} s")
        points.append(_point("dssda", price, priced, lambda seed: DSSDA(), pipeline_work, num_rounds))
    for make in policies:
        if (name := make(0).name) != DSSDA.name:
            progress(name)
            points.append(_point(name, None, scenarios, make, pipeline_work, num_rounds))
    # The baselines' control units train the decoder themselves: no activations go up.
    silent = [replace(s, costs=replace(s.costs, upload_activation_bits=0.0)) for s in scenarios]
    for name in _BASELINES:
        cls = strategy_class(name)
        assert issubclass(cls, PlannedStrategy)
        progress(name)
        points.append(_point(name, None, silent, _policy_of(cls), cls.work, num_rounds))
    return points


def _policy_of(cls: type[PlannedStrategy]) -> Callable[[int], RoundPolicy]:
    def make(seed: int) -> RoundPolicy:
        policy = cls.own_policy(seed)
        assert policy is not None
        return policy

    return make


def _point(
    name: str,
    price: float | None,
    scenarios: Sequence[Scenario],
    make: Callable[[int], RoundPolicy],
    work: Work,
    num_rounds: int,
) -> FrontPoint:
    rounds = [
        planned
        for scenario in scenarios
        for planned in list(plan_rounds(scenario, make(scenario.seed), num_rounds, work=work))[num_rounds // 4 :]
        if any(planned.selected)
    ]
    gaps = [planned.answer.gap for planned in rounds if planned.answer.gap is not None]
    return FrontPoint(
        name=name,
        price=price,
        latency_s=float(np.mean([planned.latency_event_s for planned in rounds])) if rounds else float("nan"),
        energy_j=float(np.mean([planned.energy_j for planned in rounds])) if rounds else float("nan"),
        gap=max(gaps, default=None) if price is not None else None,
    )


def draw_front(points: Sequence[FrontPoint], path: Path) -> None:
    """Draw joules over seconds: DSSDA's prices as a line, all else as marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axis = figure.subplots()
    priced = [point for point in points if point.price is not None]
    axis.plot([p.latency_s for p in priced], [p.energy_j for p in priced], marker="o", color="C0", label="dssda")
    for point in priced:
        axis.annotate(
            f"{point.price:g}", (point.latency_s, point.energy_j), (4, 4), textcoords="offset points", fontsize=8
        )
    for i, point in enumerate(p for p in points if p.price is None):
        axis.plot([point.latency_s], [point.energy_j], "sv^Dx*P<>"[i % 9], color=f"C{i % 9 + 1}", label=point.name)
    axis.set_xlabel("round latency, event-simulated [s]")
    axis.set_ylabel("devices and uploads of a round [J]")
    axis.set_title("Numbers: price of a joule in seconds", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def front_table(points: Sequence[FrontPoint]) -> Table:
    """One row a point."""
    table = Table(box=None)
    for name in FRONT_LEGEND:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for p in points:
        price, gap = ("-" if v is None else f"{v:{form}}" for v, form in ((p.price, "g"), (p.gap, ".1e")))
        table.add_row(p.name, price, four_digits(p.latency_s), four_digits(p.energy_j), gap)
    return table


def front_document(points: Sequence[FrontPoint]) -> list[dict[str, Any]]:
    """The points as JSON values."""
    return [{k: None if isinstance(v, float) and np.isnan(v) else v for k, v in vars(p).items()} for p in points]
