"""Fig. 6 again, each method at its own learning rate: loss over rounds, virtual time, energy and uplink bytes.

Gradients do not depend on plans, so a way of learning is trained once, in one process, for all methods that learn that
way; what a round costs each of them is planned, and needs no training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from client_pipeline.partition.spec import ModelSpec
from experiments.base.experiment import Curve, Experiment, Row
from experiments.base.finished_runs import finished_rows
from experiments.base.training import score_of
from experiments.tuned_learning.fig6_tuned_findings import (
    FRESH,
    VALIDATION,
    draw,
    findings,
    last_test_scores,
)
from experiments.tuned_learning.one_process_rounds import OneProcessRounds, TrainingDiverged, joining_of
from experiments.tuned_learning.rate_search import best_rate
from flower_app.compare.paired_interval import paired_interval
from flower_app.compare.trained import seeded
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner, work_of
from flower_app.training.network import training_scenario
from strategies.aggregation.config import ServerOptimizerConfig
from strategies.planning.dry_run import plan_rounds

_ETA = "eta"
"""Argument of Flower's FedAdam: the server's learning rate."""


@dataclass(frozen=True, kw_only=True)
class _Rates:
    """Learning rates of a run."""

    lr: float
    server_lr: float | None
    """Learning rate of FedAdam's step; None where the server takes the mean."""

    @classmethod
    def of(cls, config: RunConfig) -> _Rates:
        eta = config.strategy_arguments().get(_ETA)
        return cls(lr=config.optimizer.lr, server_lr=None if eta is None else float(eta))

    def given_to(self, config: RunConfig) -> RunConfig:
        options = config.strategy_arguments()
        if self.server_lr is not None:
            options[_ETA] = self.server_lr
        text = json.dumps(options) if options else ""
        return replace(config, optimizer=replace(config.optimizer, lr=self.lr), strategy_options=text)

    def text(self) -> str:
        """In a file's name."""
        return f"lr{self.lr:.3g}" + ("" if self.server_lr is None else f"-server{self.server_lr:.3g}")


class _Totals(NamedTuple):
    """Costs of the rounds so far."""

    hours: float
    """Virtual time [h]."""
    kilojoules: float
    """Energy of devices and uploads [kJ]."""
    megabytes: float
    """Uploads of the clusters: updates, and activations where the server trains the decoder [MB]."""


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each scored round, method and run; of runs that choose a rate, the last round alone.

    A curve is a way to learn. ``[figure]``: ``panel``; ``score``, a metric of the task; ``methods``, by label the
    strategies that learn that way; ``validation-seed``, ``seeds``, and ``more-seeds`` for the first curve of a panel
    and those whose difference from it is still within its interval; ``farthest``, how many times 3 a learning rate may
    go from the base. Every run is kept when it has finished, so the experiment may be interrupted.
    """
    for panel in dict.fromkeys(curve.figure["panel"] for curve in curves):
        yield from _panel_rows([curve for curve in curves if curve.figure["panel"] == panel], folder, say)


def _panel_rows(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """Rows of the curves that are held against each other."""
    rates_by_curve: dict[str, _Rates] = {}
    for curve in curves:
        rates_by_curve[curve.name], rows = _tuned(curve, folder, say)
        yield from rows
    rows_by_curve: dict[str, list[Row]] = {curve.name: [] for curve in curves}
    for seed in curves[0].figure["seeds"]:
        for curve in curves:
            rows_by_curve[curve.name] += _kept(curve, rates_by_curve[curve.name], FRESH, seed, folder, say)
    first = curves[0]
    undecided = [c for c in curves[1:] if not _is_decided(rows_by_curve[first.name], rows_by_curve[c.name])]
    for seed in first.figure["more-seeds"] if undecided else ():
        for curve in (first, *undecided):
            rows_by_curve[curve.name] += _kept(curve, rates_by_curve[curve.name], FRESH, seed, folder, say)
    for rows in rows_by_curve.values():
        yield from rows


def _is_decided(first_rows: Sequence[Row], other_rows: Sequence[Row]) -> bool:
    """Return True if the interval of the difference of two curves' last scores leaves out zero."""
    return paired_interval(last_test_scores(first_rows), last_test_scores(other_rows)).leaves_out_zero


def _tuned(curve: Curve, folder: Path, say: Callable[[str], None]) -> tuple[_Rates, list[Row]]:
    """Choose a curve's rates, the server's after the clusters', and return the last rows of the runs that decided."""
    rows_by_rates: dict[_Rates, Row] = {}
    seed, farthest = curve.figure["validation-seed"], int(curve.figure["farthest"])

    def score_with(rates: _Rates) -> float:
        rows_by_rates[rates] = _kept(curve, rates, VALIDATION, seed, folder, say)[-1]
        score = rows_by_rates[rates]["score"]
        return -np.inf if score is None else float(score)

    chosen = _Rates.of(curve.config)
    chosen = replace(chosen, lr=best_rate(chosen.lr, farthest, lambda lr: score_with(replace(chosen, lr=lr))))
    if (base := chosen.server_lr) is not None:
        server_lr = best_rate(base, farthest, lambda rate: score_with(replace(chosen, server_lr=rate)))
        chosen = replace(chosen, server_lr=server_lr)
    return chosen, [row | {"chosen": int(rates == chosen)} for rates, row in rows_by_rates.items()]


def _kept(curve: Curve, rates: _Rates, part: str, seed: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Rows of one run: as they are kept, or trained now."""
    config = rates.given_to(seeded(curve.config, seed))
    file = folder / "runs" / f"{curve.name}-{part}{seed}-{rates.text()}.json"
    # Rows must not change with what else is trained.
    deciding = ("seeds", "more-seeds", "validation-seed", "farthest")
    alone = replace(curve, figure={key: value for key, value in curve.figure.items() if key not in deciding})
    return finished_rows(file, alone, config, lambda: _trained(curve, config, rates, part, seed), say)


def _trained(curve: Curve, config: RunConfig, rates: _Rates, part: str, seed: int) -> Iterator[Row]:
    """Train one run, and say what it costs each method."""
    torch.set_num_threads(config.runtime.threads)
    rounds = OneProcessRounds(config, training_scenario(config).data_shares)
    metric, methods = str(curve.figure["score"]), curve.figure["methods"]
    # Where clusters never join, the first one's model stands for all: their shares are alike.
    members = range(1 if rounds.joining == "never" else rounds.num_clusters)
    costs = {}
    if part == FRESH:
        costs = {label: _planned_costs(config, strategy, rounds.prepared.spec) for label, strategy in methods.items()}
    shared = {
        "panel": curve.figure["panel"], "curve": curve.name, "label": curve.label, "what": config.strategy,
        "metric": metric, "part": part, "seed": seed, "lr": rates.lr, "server_lr": rates.server_lr,
        "chosen": 1,
    }  # fmt: skip
    losses: list[float] = []
    for number in range(1, config.num_rounds + 1):
        last = number == config.num_rounds
        try:
            losses.append(rounds.train_round(number, members))
        except TrainingDiverged:
            yield from _scored_rows(shared, number, config, None, {}, None, costs)
            return
        if not (last or (part == FRESH and number % config.evaluate_every == 0)):
            continue
        metrics = rounds.score("validation", list(members))
        test = score_of(rounds.score("test", list(members)), metric) if last and part == FRESH else None
        yield from _scored_rows(shared, number, config, float(np.mean(losses)), metrics, test, costs)
        losses = []


def _scored_rows(
    shared: Row,
    number: int,
    config: RunConfig,
    train_loss: float | None,
    metrics: dict[str, float],
    test_score: float | None,
    costs: Mapping[str, Sequence[_Totals]],
) -> Iterator[Row]:
    """One row of a scored round for each method, or one without a method where nothing is planned."""
    learned = {
        "round": number,
        "examples": number * config.local_steps * config.batch_size * config.gradient_accumulation,
        "train_loss": train_loss,
        "loss": metrics.get("loss"),
        "score": score_of(metrics, shared["metric"]),
        "test_score": test_score,
    }
    for method in costs or ("",):
        totals = costs[method][number - 1]._asdict() if method else dict.fromkeys(_Totals._fields)
        row = shared | {"method": method} | learned | totals
        # As the table keeps them, so that it tells the same findings.
        yield {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}


def _planned_costs(config: RunConfig, strategy: str, spec: ModelSpec) -> list[_Totals]:
    """Return the costs, up to each round, of a strategy that trains the run's model.

    Raises
    ------
    ValueError
        If a plan leaves a cluster out, which then would not learn as the others do.
    """
    config = replace(config, strategy=strategy, strategy_options="", server_optimizer=ServerOptimizerConfig())
    planner = make_planner(config, training_scenario(config, spec))
    if planner is None:
        raise ValueError(f"figure.methods: expected strategies that plan, found {strategy!r}")
    totals, hours, joules, uplink_bytes = [], 0.0, 0.0, 0.0
    for planned in plan_rounds(
        planner.scenario, planner.policy, config.num_rounds, drift=planner.drift, work=work_of(config)
    ):
        if not all(planned.selected):
            raise ValueError(
                f"scenario: expected a network in which all clusters train in every round, but {strategy} leaves some "
                f"out of round {planned.number}; use more channels or more transmit power"
            )
        hours += planned.costs.latency_s / 3600
        joules += planned.costs.energy_j
        if joining_of(config) != "never":
            uplink_bytes += sum(planned.instance.upload_bits(n, p.m) / 8 for n, p in enumerate(planned.plans))
        totals.append(_Totals(hours, joules / 1e3, uplink_bytes / 1e6))
    return totals


EXPERIMENT = Experiment(
    name="fig6-tuned", shows="Fig. 6 with each method's own learning rate", run=run, draw=draw, findings=findings,
    trains=True,
)  # fmt: skip
