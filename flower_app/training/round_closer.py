"""End of each round: evaluation and selection, the round's line and timeline, the checkpoint."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from client_pipeline.partition.plan import PLAN_FORMAT, ClusterPlan
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario
from flower_app.report.sinks import RoundSinks
from flower_app.runs import run_checkpoints, run_directory
from flower_app.training.early_stopping import ModelSelection
from flower_app.training.global_models import GlobalModels
from flower_app.training.prepared_run import PreparedRun
from flower_app.training.server_faults import ServerFaults
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.baselines.stock_accounting import stock_record
from strategies.checkpoint import Checkpoint
from strategies.decoder.service import DecoderService
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_instance
from strategies.grid.recording import RecordingGrid
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.plan_demands import pipeline_of
from strategies.registry import STRATEGIES
from strategies.resumed import kept_memory, kept_state

_BULK = ("timeline", "state", "faults")
"""Entries of a control unit's report that have a file of their own, or are known."""


class PatienceEnded(Exception):  # noqa: N818
    """The run's patience has ended: Flower's ``start`` has no other way out before the last round."""


class RunStanding:
    """Progress of a run, over all the times that it was continued."""

    def __init__(self, run: PreparedRun) -> None:
        self.selection = ModelSelection(run.config.selection)
        if run.resumed is not None:
            self.selection.restore(run.resumed.state["selection"])
        self.last_round = run.completed
        """Newest round that is done."""
        self.privacy: dict[str, Any] | None = run.resumed.state["privacy"]["record"] if run.resumed else None
        """Privacy spent, as in the newest round's line."""

    def account(self, privacy: dict[str, Any]) -> dict[str, Any]:
        """Note what a round's line says of privacy."""
        self.privacy = privacy
        return privacy

    def complete(self, server_round: int) -> None:
        """Note that a round is done."""
        self.last_round = server_round


class RoundClock:
    """Clock of the rounds, and of the run in all."""

    def __init__(self, run: PreparedRun) -> None:
        self._started, self._before_s = run.started, run.wall_before_s
        self._round_started = time.perf_counter()
        self.round_s = 0.0
        """Duration of the last round [s]."""

    @property
    def wall_s(self) -> float:
        """Duration of the run so far [s]."""
        return time.perf_counter() - self._started + self._before_s

    def begin_first_round(self) -> None:
        """Let the first round begin now."""
        self._round_started = time.perf_counter()

    def next_round(self) -> dict[str, float]:
        """End a round and begin the next one; returns how long the round took, and the run so far [s]."""
        now = time.perf_counter()
        self.round_s, self._round_started = now - self._round_started, now
        return {"round_s": self.round_s, "wall_s": now - self._started + self._before_s}


class RoundCloser:
    """Evaluates, records and commits each round of a run when its clusters have answered."""

    def __init__(
        self,
        run: PreparedRun,
        standing: RunStanding,
        clock: RoundClock,
        models: GlobalModels,
        *,
        exchanges: RecordingGrid,
        strategy: Strategy,
        accountant: PrivacyAccountant,
        faults: ServerFaults,
        service: DecoderService | None = None,
        board: RoundSinks | None = None,
        setup_bytes: int = 0,
        initial_arrays: ArrayRecord | None = None,
    ) -> None:
        self._run, self._standing, self._clock, self._models = run, standing, clock, models
        self._exchanges, self._strategy = exchanges, strategy
        self._accountant, self._faults = accountant, faults
        self._service, self._board = service, board
        self._setup_bytes = setup_bytes
        self._former = _arrays_of(initial_arrays, run.config.strategy)

    def close(self, started_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate where it is due, write the round's line, and commit the round.

        Parameters
        ----------
        started_round : of this process, from 1; 0: before the first, where a task may show what its model answers
        arrays : the round's global weights

        Returns
        -------
        The metrics; None where nothing was evaluated.

        Raises
        ------
        PatienceEnded
            If the run's patience has ended with this round, which is committed.
        """
        if started_round == 0:
            config = self._run.config
            if config.task.evaluate_generate and config.traits.averages and not self._run.completed:
                self._models.take(arrays)
                run_directory.write_answers(self._run.run_dir, "before", self._models.answers())
                self._models.forget()
            return None
        config, server_round = self._run.config, started_round + self._run.completed
        updated = self._is_updated(arrays)
        metrics = self._evaluate(server_round, arrays)
        record = self._line(server_round, metrics) | {"updated": updated}
        run_directory.append_round(self._run.run_dir, record)
        if self._board is not None:
            self._board.write(record)
        self._setup_bytes = 0
        if config.checkpoint_every and server_round % config.checkpoint_every == 0:
            self._commit(server_round, arrays, float(record["wall_s"]))
        self._standing.complete(server_round)
        if self._standing.selection.stops:
            raise PatienceEnded
        return MetricRecord(dict(metrics)) if metrics else None

    def _is_updated(self, arrays: ArrayRecord) -> bool:
        """Return whether the strategy made weights of the round's updates; Flower goes on with the last ones if not."""
        former, self._former = self._former, _arrays_of(arrays, self._run.config.strategy)
        if isinstance(self._strategy, PlannedStrategy) and len(self._strategy.uncounted) == len(
            self._strategy.clusters
        ):
            return False
        return not former or len(former) != len(self._former) or any(map(operator.is_not, former, self._former))

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Score the round's model where that is due, and keep it if it is to be kept."""
        config, run_dir = self._run.config, self._run.run_dir
        last = server_round == config.num_rounds
        if not last and not (config.evaluate_every and server_round % config.evaluate_every == 0):
            self._models.forget()
            return {}
        self._models.take(arrays)
        metrics, _ = self._models.score("validation")
        better = self._standing.selection.update(server_round, metrics)
        if better or not config.selection.load_best_at_end:
            self._models.save(run_dir, self._run.task.saved(config.data), server_round)
            run_checkpoints.keep_models(run_dir)
        return metrics

    def _line(self, server_round: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the round's line of ``rounds.jsonl``; its timeline is written beside it."""
        config = self._run.config
        record = self._exchanges.take_round() | self._planned_and_spent(server_round)
        if isinstance(self._strategy, PlannedStrategy):
            self._exchanges.receipts.withdraw(self._strategy.uncounted)
        if self._accountant.on:
            trained, failed = ([int(entry["cluster"]) for entry in record[key]] for key in ("clusters", "failed"))
            self._accountant.count_round(trained, failed, self._service.sent if self._service else {})
            record["privacy"] = self._standing.account(self._accountant.record())
        waived = record.get("plan", {}).get("waived", ())
        timeline = timeline_of(self._run.scenario, server_round, record["clusters"], waived)
        run_directory.write_timeline(self._run.run_dir, timeline)
        times = self._clock.next_round()
        return record | {
            "round": server_round,
            "faults": [*(fault.to_dict() for fault in self._faults.records(server_round)), *record["faults"]],
            "clusters": [
                {key: value for key, value in with_planned_memory(report, record).items() if key not in _BULK}
                for report in record["clusters"]
            ],
            "metrics": metrics,
            "lr": config.optimizer.learning_rate(server_round * config.local_steps),
            "setup_bytes": self._setup_bytes,
            **times,
        }

    def _planned_and_spent(self, server_round: int) -> dict[str, Any]:
        """Return the round's plan, and its cost under the system model."""
        if isinstance(self._strategy, PlannedStrategy):
            return self._strategy.record
        reports = self._exchanges.last_reports
        plans = {int(report["cluster"]): ClusterPlan.from_dict(report["plan"]) for report in reports}
        document = [plans[n].to_dict() if n in plans else None for n in range(self._run.num_clusters)]
        run_directory.write_plan(self._run.run_dir, server_round, {"format": PLAN_FORMAT, "clusters": document})
        return stock_record(self._run.scenario, server_round, plans, "fixed" if self._run.config.plan else "uniform")

    def _commit(self, server_round: int, arrays: ArrayRecord, wall_s: float) -> None:
        state: dict[str, Any] = {
            "wall-s": wall_s,
            "frozen": self._run.frozen_digest,
            "selection": self._standing.selection.state(),
            "updates-counted": self._exchanges.receipts.state(),
            "privacy": self._accountant.state() | {"record": self._standing.privacy},
        }
        if (strategy_state := kept_state(self._strategy)) is not None:
            state["strategy"] = strategy_state
        decoder = {}
        if self._service is not None:
            state["decoder-sync"] = self._service.trainer.decoder_sync
            decoder = self._service.trainer.state()
        memory = kept_memory(self._strategy)
        weights = self._models.whole(arrays)
        after = Checkpoint(server_round, weights, decoder, memory, state, self._run.identity)
        run_checkpoints.commit_round(self._run.run_dir, after, self._run.config, self._run.inputs)


def _arrays_of(arrays: ArrayRecord | None, strategy: str) -> list[Array]:
    """Return a record's arrays, to compare them with the next round's; none of our own strategies, which tell."""
    return [] if arrays is None or strategy in STRATEGIES else list(arrays.values())


def with_planned_memory(report: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cluster's report with what each planned device was planned to hold beside what it held [byte].

    ``planned_bytes`` is of the round's plan; a device that took TEBs over in the middle of the round holds more.

    Parameters
    ----------
    report : of one cluster; ``held_bytes`` of its ``devices`` is what each held at its peak
    record : of the round, with its ``virtual`` costs
    """
    costs = {int(c["cluster"]): c for c in record.get("virtual", {}).get("clusters", ())}
    planned = costs.get(int(report["cluster"]), {}).get("device_memory_bytes", ())
    devices = {
        k: {**spent, "planned_bytes": round(planned[int(k)])} if int(k) < len(planned) and planned[int(k)] else spent
        for k, spent in (report.get("devices") or {}).items()
    }
    return {**report, "devices": devices}


def timeline_of(
    scenario: Scenario, number: int, reports: Sequence[Mapping[str, Any]], waived: Sequence[str] = ()
) -> dict[str, Any]:
    """``timeline.json`` of a round.

    Parameters
    ----------
    scenario : the run's network
    number : of the round
    reports : of the control units, each with its ``plan`` and ``timeline``
    waived : constraints that the plans need not meet; what runs is no pipeline of the model's where C7 is among them
    """
    instance = round_instance(scenario, NetworkTrace(scenario).round(number), Queues.empty(scenario.num_clusters))
    clusters = []
    for report in reports:
        plan, n = ClusterPlan.from_dict(report["plan"]), int(report["cluster"])
        modelled: list[list[Any]] = []
        if "C7" not in waived:
            modelled = [list(event) for event in pipeline_of(instance, n, plan).events]
        order = [segment.device for segment in plan.segments()]
        name = {"name": scenario.names[n]} if scenario.names[n] else {}
        clusters.append({"cluster": n, **name, "order": order, "modelled": modelled, "measured": report["timeline"]})
    return {"round": number, "clusters": clusters}
