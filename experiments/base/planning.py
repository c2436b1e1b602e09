"""Shared code of the planning experiments: a curve's networks and their planned rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from client_pipeline.system.scenario import Scenario
from experiments.base.experiment import Curve, Row
from flower_app.compare.trained import seeded
from flower_app.config.strategy_choice import make_planner, work_of
from flower_app.training.network import training_scenario
from strategies.planning.dry_run import PlannedRound, plan_rounds


def networks(curve: Curve) -> Iterator[tuple[int, Scenario]]:
    """The curve's network with each of its seeds, and which seed it is, from 0."""
    for i in range(curve.seeds):
        yield i, training_scenario(seeded(curve.config, i))


def planned(curve: Curve, say: Callable[[str], None]) -> Iterator[tuple[int, PlannedRound]]:
    """All rounds of all the curve's networks, with the seed's number.

    Raises
    ------
    ValueError
        For a strategy that plans nothing.
    """
    for i in range(curve.seeds):
        config = seeded(curve.config, i)
        planner = make_planner(config, training_scenario(config))
        if planner is None:
            raise ValueError(f"{curve.name}: run.strategy: expected a strategy that plans, found {config.strategy}")
        say(f"{curve.name}: network {i + 1} of {curve.seeds}, {config.num_rounds} rounds")
        rounds = plan_rounds(
            planner.scenario, planner.policy, config.num_rounds, drift=planner.drift, work=work_of(config)
        )
        for done in rounds:
            yield i, done


def mean_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation over the seeds (0 of one)."""
    known = np.asarray([v for v in values if np.isfinite(v)])
    if not len(known):
        return float("nan"), 0.0
    return float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else 0.0


def quarter(number: int, last: int) -> int:
    """Return the quarter of the rounds that a round is in, from 1 to 4."""
    return -(-4 * number // last)


def settled(rows: Sequence[Row]) -> list[Row]:
    """Rows of one network without the first quarter of its rounds, while the queues fill."""
    last = max(row["round"] for row in rows)
    return [row for row in rows if quarter(row["round"], last) > 1]


def per_cent(ours: float, reference: float) -> str:
    """Return the relative difference of ours from the reference, with its sign [%]."""
    return f"{100 * (ours - reference) / reference:+.1f} %"
