"""What happens after each round: evaluation and selection, the round's line and timeline, the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from client_pipeline.partition.plan import PLAN_FORMAT, ClusterPlan
from flower_app.report.timeline import timeline_of
from flower_app.runs import run_checkpoints, run_directory
from flower_app.training.global_models import GlobalModels
from flower_app.training.model_selection import ModelSelection
from flower_app.training.prepared_run import PreparedRun
from flower_app.training.server_faults import ServerFaults
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.baselines.stock_accounting import stock_record
from strategies.checkpoint import Checkpoint
from strategies.decoder.service import DecoderService
from strategies.grid.update_receipts import UpdateReceipts
from strategies.planned_strategy import PlannedStrategy
from strategies.resumed import kept_memory, kept_state

_BULK = ("timeline", "state", "faults")
"""Of a control unit's report: what has a file of its own, or is known."""


class PatienceEnded(Exception):  # noqa: N818
    """The run's patience has ended: Flower's ``start`` has no other way out before the last round."""


class RoundExchanges(Protocol):
    """What the grid has recorded of the round; :class:`~strategies.grid.recording.RecordingGrid` in a run."""

    receipts: UpdateReceipts
    last_reports: list[dict[str, Any]]

    def take_round(self) -> dict[str, Any]:
        """Return what was exchanged since the last call."""


class RoundBoard(Protocol):
    """Takes each round's line, to show it while the run goes on."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one line."""


class RunStanding:
    """How far a run has come, over all the times that it was continued.

    Parameters
    ----------
    run : with what it goes on from
    """

    def __init__(self, run: PreparedRun) -> None:
        self.selection = ModelSelection(run.config.selection)
        if run.resumed is not None:
            self.selection.restore(run.resumed.state["selection"])
        self.last_round = run.completed
        """Newest round that is done."""
        self.privacy: dict[str, Any] | None = run.resumed.state["privacy"]["record"] if run.resumed else None
        """What the newest round's line says of it."""

    def account(self, privacy: dict[str, Any]) -> dict[str, Any]:
        """Note what a round's line says of privacy."""
        self.privacy = privacy
        return privacy

    def complete(self, server_round: int) -> None:
        """Note that a round is done."""
        self.last_round = server_round


class RoundClock:
    """How long rounds take, and the run in all.

    Parameters
    ----------
    run : with the time before this process
    """

    def __init__(self, run: PreparedRun) -> None:
        self._started, self._before_s = run.started, run.wall_before_s
        self._round_started = time.perf_counter()
        self.round_s = 0.0
        """Of the last round."""

    @property
    def wall_s(self) -> float:
        """Of the run so far."""
        return time.perf_counter() - self._started + self._before_s

    def begin_first_round(self) -> None:
        """Let the first round begin now."""
        self._round_started = time.perf_counter()

    def next_round(self) -> dict[str, float]:
        """End a round and begin the next one; returns how long the round took, and the run so far [s]."""
        now = time.perf_counter()
        self.round_s, self._round_started = now - self._round_started, now
        return {"round_s": self.round_s, "wall_s": now - self._started + self._before_s}


class RoundOpener:
    """Writes a round's plans before it begins, and injects the server's fault if the round has one.

    Parameters
    ----------
    run : the run
    faults : of the server's process
    clock : tells about how long a round takes
    """

    def __init__(self, run: PreparedRun, faults: ServerFaults, clock: RoundClock) -> None:
        self._run, self._faults, self._clock = run, faults, clock

    def open(self, server_round: int, plans: Sequence[ClusterPlan]) -> None:
        """Begin a round with the plans of its clusters."""
        document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
        run_directory.write_plan(self._run.run_dir, server_round, document)
        self._faults.begin_round(server_round, usual_s=self._clock.round_s)


class RoundCloser:
    """Evaluates, records and commits each round of a run when its clusters have answered.

    Parameters
    ----------
    run : the run
    standing, clock : updated with each round
    models : the run's weights, scored and saved
    exchanges : what the grid has recorded
    strategy : whose account and memory are kept
    accountant : of the run's noise
    faults : of the server's process
    service : the decoder's, where the server trains it
    board : takes each line, too
    setup_bytes : tensors that went down before round 1; the first line has them [byte]
    """

    def __init__(
        self,
        run: PreparedRun,
        standing: RunStanding,
        clock: RoundClock,
        models: GlobalModels,
        *,
        exchanges: RoundExchanges,
        strategy: Strategy,
        accountant: PrivacyAccountant,
        faults: ServerFaults,
        service: DecoderService | None = None,
        board: RoundBoard | None = None,
        setup_bytes: int = 0,
    ) -> None:
        self._run, self._standing, self._clock, self._models = run, standing, clock, models
        self._exchanges, self._strategy = exchanges, strategy
        self._accountant, self._faults = accountant, faults
        self._service, self._board = service, board
        self._setup_bytes = setup_bytes

    def close(self, started_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate where it is due, write the round's line, and commit the round.

        Parameters
        ----------
        started_round : of this process, from 1; 0: before the first, where nothing is done
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
            return None
        config, server_round = self._run.config, started_round + self._run.completed
        metrics = self._evaluate(server_round, arrays)
        record = self._line(server_round, metrics)
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
        """How the round was planned, and what it cost under the system model."""
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
