"""One training as the server sees it: nodes, strategy, evaluation, records, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.supercore import log

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.partition.plan import PLAN_FORMAT, ClusterPlan, read_plans
from client_pipeline.runtime.head import HeadTrainer
from client_pipeline.system.scenario import Scenario
from flower_app.config.privacy_checks import check_shared_matrices
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_first_round, make_planner, make_strategy
from flower_app.report.timeline import timeline_of
from flower_app.runs import run_checkpoints, run_directory
from flower_app.runs.run_inputs import input_digests
from flower_app.runs.run_lock import nodes_held
from flower_app.tasks.base import task
from flower_app.training.cluster_setup import round_bounds, set_up_clusters, settle_decoder_sync, wait_for_nodes
from flower_app.training.frozen_weights import frozen_digest
from flower_app.training.global_models import GlobalModels
from flower_app.training.model_selection import ModelSelection
from flower_app.training.network import of_clusters, training_scenario
from flower_app.training.releases import accounted
from flower_app.training.run_grid import NODES_TIMEOUT_S, run_grid
from flower_app.training.server_faults import ServerFaults
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.baselines.stock_accounting import stock_record
from strategies.checkpoint import Checkpoint
from strategies.clusters import ClusterState
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer
from strategies.grid.single_pulls import SinglePulls
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.planner import RoundPlanner
from strategies.records import RUN_KEY, to_arrays, to_tensors
from strategies.resumed import ResumedStrategy, kept_memory, kept_state, restore_kept

MESSAGE_TIMEOUT_S = 24 * 3600.0
"""A round may be long; its own waits are bounded one by one."""


class _Stopped(Exception):  # noqa: N818
    """The run's patience has ended: Flower's ``start`` has no other way out before the last round."""


class TrainingRun:
    """One training, from the configuration to the summary.

    Parameters
    ----------
    config : the run's
    run_dir : its directory
    grid : Flower's
    """

    def __init__(self, config: RunConfig, run_dir: Path, grid: Grid) -> None:
        torch.set_num_threads(config.runtime.server_threads)
        self.config = config
        self.run_dir = run_dir
        self.flower_grid = SinglePulls(grid)
        self.started = time.perf_counter()
        self.resumed = run_checkpoints.reopened(run_dir, config) if config.resume else None
        self.identity = self.resumed.identity if self.resumed else run_checkpoints.new_identity(run_dir, config)
        self.inputs = input_digests(config)
        self.selection = ModelSelection(config.selection)
        if self.resumed is not None:
            self.selection.restore(self.resumed.state["selection"])
        self.faults = ServerFaults(config.faults, run_dir, self.completed)
        self.last_round = self.completed
        """Newest round that is done."""
        self.setup_bytes = 0
        self._wall_before = float(self.resumed.state["wall-s"]) if self.resumed else 0.0
        self.privacy: dict[str, Any] | None = self.resumed.state["privacy"]["record"] if self.resumed else None
        """What the newest round's line says of it."""

    @property
    def completed(self) -> int:
        """Rounds that were done before this process began."""
        return self.resumed.round if self.resumed else 0

    def run(self) -> None:
        """Prepare, train, score on the test set, and write the summary."""
        config = self.config
        scenario = training_scenario(config)
        self.num_clusters = config.num_clusters or scenario.num_clusters
        nodes = wait_for_nodes(self.flower_grid, self.num_clusters, NODES_TIMEOUT_S)
        with nodes_held(nodes, self.run_dir):
            self._run(scenario, nodes)

    def _run(self, scenario: Scenario, nodes: Sequence[int]) -> None:
        config = self.config
        self.task = task(config.task)
        config.selection.check_metric(self.task.scores)
        prepared = self.task.prepare(config.data, config.model, config.seed, self.num_clusters)
        self.prepared = replace(prepared, spec=config.adapted(prepared.spec))
        self.parts = self.prepared.build(config.seed)
        self.scenario = of_clusters(training_scenario(config, self.prepared.spec), self.num_clusters)
        check_shared_matrices(
            config.privacy,
            traits=config.traits,
            local_steps=config.local_steps,
            family=config.model.family,
            shared=self.parts.tied.values(),
        )
        PrivacyAccountant(config.privacy, {})  # says at once if there is no library to account with
        planner = make_planner(config, self.scenario)
        if planner is not None:
            check_first_round(planner)
        self.frozen = self.parts.frozen_weights()
        source = config.model.pretrained or config.model.from_
        self.frozen_digest = frozen_digest(self.frozen, self.resumed.state if self.resumed else None, source)
        num_own = 0 if config.traits.averages else self.num_clusters
        self.models = GlobalModels(self.prepared, config.seed, self.frozen, num_own)
        if self.resumed is not None:
            self.models.take(to_arrays(self.resumed.weights))
        if self.completed < config.num_rounds and not self.selection.stops:
            # The service first: a port in use is found before any control unit starts.
            self.service = self._decoder_service() if config.traits.decoder_on_server else None
            with self.service or nullcontext():
                self._train(planner, self._set_up(nodes))
        self._finish()

    def _declared(self, cluster: int) -> dict[str, Any]:
        """What the scenario says of a cluster, before its own node has told more."""
        devices, block_memory = self.scenario.clusters[cluster], self.scenario.block_memory
        state = ClusterState(cluster=cluster, node_id=0, devices=devices, block_memory=block_memory, num_examples=0)
        return state.to_dict()

    def _set_up(self, nodes: Sequence[int]) -> list[ClusterState]:
        plans = self.config.plan
        told: dict[str, str | int] = {
            "spec": self.prepared.spec.to_json(),
            "tokenizer": self.prepared.tokenizer_json,
            "num-clusters": self.num_clusters,
            "run-name": self.run_dir.name,
            "resume-round": self.completed,
            **{f"{key}-identity": value for key, value in self.identity._asdict().items()},
            # Nodes need not have the server's files.
            "network": json.dumps([self._declared(n) for n in range(self.num_clusters)]),
            "plans": json.dumps([plan.to_dict() for plan in read_plans(Path(plans))]) if plans else "",
        }
        max_length = self.config.data.max_length
        lines, _ = run_directory.read_rounds(self.run_dir) if self.completed else ([], 0)
        trained = {report["cluster"] for line in lines for report in line["clusters"]}
        clusters = set_up_clusters(self.flower_grid, nodes, told, self.frozen, self.num_clusters, max_length, trained)
        self.setup_bytes = clusters.bytes_down
        if self.service is not None:
            settle_decoder_sync(self.service.trainer, clusters)
        return clusters.states

    def _decoder_service(self) -> DecoderService:
        config = self.config
        trainer = DecoderTrainer(
            HeadTrainer(
                self.parts.head,
                config.optimizer,
                unit=self.scenario.planner.num_blocks,
                precision=config.runtime.precision,
            ),
            decoder_sync=config.decoder_sync,
            join_timeout_s=config.decoder.join_timeout,
            step_timeout_s=config.decoder.step_timeout,
        )
        if self.resumed is not None:
            trainer.restore(self.resumed.decoder, str(self.resumed.state["decoder-sync"]))
        codec = ActivationCodec(config.compression.activations)
        most = config.batch_size * config.gradient_accumulation
        limits = StepLimits.of(self.parts.spec, most, config.data.max_length)
        return DecoderService(config.decoder, trainer, self.num_clusters, codec, limits)

    def _train(self, planner: RoundPlanner | None, clusters: Sequence[ClusterState]) -> None:
        self.strategy = make_strategy(
            self.config, self.scenario, planner, clusters, decoder=self.service, on_plan=self._begin_round
        )
        self.accountant = PrivacyAccountant(self.config.privacy, {s.cluster: s.num_examples for s in clusters})
        releases = accounted(self.config, self.run_dir, self.accountant, self.service, self.resumed, self.identity)
        bounds = round_bounds(self.config, self.scenario.planner.num_blocks, clusters)
        on_train = releases.begin_round if releases else None
        numbers = {state.node_id: state.cluster for state in clusters}
        decoder = self.service.trainer if self.service is not None else None
        self.grid = run_grid(self.flower_grid, self.config, self.run_dir, decoder, numbers, bounds, on_train)
        weights = self.parts.weights()
        if self.resumed is not None:
            self.grid.receipts.restore(self.resumed.state["updates-counted"])
            # In the model's order: Flower's FedAvgM goes by places, not by names.
            weights = {name: self.resumed.weights[name] for name in weights}
            restore_kept(self.strategy, self.resumed.state.get("strategy"), self.resumed.server)
        self.board = self._board()
        self.round_started = time.perf_counter()
        self.round_s = 0.0
        """Of the last round."""
        # A strategy may bring a start of its own; only a run that goes on needs ours.
        started = ResumedStrategy(self.strategy, self.completed) if self.completed else self.strategy
        try:
            started.start(
                self.grid,
                initial_arrays=to_arrays(weights),
                num_rounds=self.config.num_rounds - self.completed,
                timeout=MESSAGE_TIMEOUT_S,
                train_config=ConfigRecord({RUN_KEY: self.run_dir.name}),
                evaluate_fn=self._after_round,
            )
        except _Stopped:
            best, metric = self.selection.best, self.config.selection.metric
            log(
                INFO,
                "Stopped after round %d: %s %g of round %d is the best",
                self.last_round,
                metric,
                best,
                self.selection.best_round,
            )
        finally:
            run_directory.write_waiting(self.run_dir, {})
            if self.board is not None:
                self.board.close()

    def _board(self) -> Any:
        """The TensorBoard files, where they are wanted."""
        if not self.config.tensorboard:
            return None
        from flower_app.report.tensorboard_log import TensorBoardLog

        return TensorBoardLog(self.run_dir, self.completed + 1)

    # After each round.

    def _after_round(self, started_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate where it is due, write the round's line, and commit the round."""
        if started_round == 0:
            return None
        config, server_round = self.config, started_round + self.completed
        metrics: dict[str, float] = {}
        last = server_round == config.num_rounds
        if last or (config.evaluate_every and server_round % config.evaluate_every == 0):
            self.models.take(arrays)
            metrics, _ = self.models.score("validation")
            if self.selection.update(server_round, metrics) or not config.selection.load_best_at_end:
                self.models.save(self.run_dir, self.task.saved(config.data), server_round)
                run_checkpoints.keep_models(self.run_dir)
        record = self.grid.take_round() | self._account(server_round)
        if isinstance(self.strategy, PlannedStrategy):
            self.grid.receipts.withdraw(self.strategy.uncounted)
        reports = [self._without_bulk(report) for report in record["clusters"]]
        if self.accountant.on:
            trained, failed = ([int(entry["cluster"]) for entry in record[key]] for key in ("clusters", "failed"))
            self.accountant.count_round(trained, failed, self.service.sent if self.service else {})
            self.privacy = record["privacy"] = self.accountant.record()
        self._write_timeline(server_round, record)
        now = time.perf_counter()
        self.round_s = now - self.round_started
        record |= {
            "round": server_round,
            "faults": [*(fault.to_dict() for fault in self.faults.records(server_round)), *record["faults"]],
            "clusters": reports,
            "metrics": metrics,
            "lr": config.optimizer.learning_rate(server_round * config.local_steps),
            "setup_bytes": self.setup_bytes,
            "round_s": self.round_s,
            "wall_s": now - self.started + self._wall_before,
        }
        run_directory.append_round(self.run_dir, record)
        if self.board is not None:
            self.board.write(record)
        self.round_started = now
        self.setup_bytes = 0
        if config.checkpoint_every and server_round % config.checkpoint_every == 0:
            self._commit(server_round, arrays, float(record["wall_s"]))
        self.last_round = server_round
        if self.selection.stops:
            raise _Stopped
        return MetricRecord(dict(metrics)) if metrics else None

    def _account(self, server_round: int) -> dict[str, Any]:
        """How the round was planned, and what it cost under the system model."""
        if isinstance(self.strategy, PlannedStrategy):
            return self.strategy.record
        reports = self.grid.last_reports
        plans = {int(report["cluster"]): ClusterPlan.from_dict(report["plan"]) for report in reports}
        document = [plans[n].to_dict() if n in plans else None for n in range(self.num_clusters)]
        run_directory.write_plan(self.run_dir, server_round, {"format": PLAN_FORMAT, "clusters": document})
        return stock_record(self.scenario, server_round, plans, "fixed" if self.config.plan else "uniform")

    def _begin_round(self, server_round: int, plans: Sequence[ClusterPlan]) -> None:
        document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
        run_directory.write_plan(self.run_dir, server_round, document)
        self.faults.begin_round(server_round, usual_s=self.round_s)

    def _write_timeline(self, server_round: int, record: Mapping[str, Any]) -> None:
        timeline = timeline_of(
            self.scenario, server_round, record["clusters"], record.get("plan", {}).get("waived", ())
        )
        run_directory.write_timeline(self.run_dir, timeline)

    @staticmethod
    def _without_bulk(report: Mapping[str, Any]) -> dict[str, Any]:
        """A control unit's report without what has a file of its own or is known."""
        return {key: value for key, value in report.items() if key not in ("timeline", "state", "faults")}

    def _commit(self, server_round: int, arrays: ArrayRecord, wall_s: float) -> None:
        state: dict[str, Any] = {
            "wall-s": wall_s,
            "frozen": self.frozen_digest,
            "selection": self.selection.state(),
            "updates-counted": self.grid.receipts.state(),
            "privacy": self.accountant.state() | {"record": self.privacy},
        }
        if (kept := kept_state(self.strategy)) is not None:
            state["strategy"] = kept
        decoder = {}
        if self.service is not None:
            state["decoder-sync"] = self.service.trainer.decoder_sync
            decoder = self.service.trainer.state()
        memory = kept_memory(self.strategy)
        after = Checkpoint(server_round, to_tensors(arrays), decoder, memory, state, self.identity)
        run_checkpoints.commit_round(self.run_dir, after, self.config, self.inputs)

    def _finish(self) -> None:
        # The last round has loaded and scored the final weights; the model that is kept may be an earlier one.
        if self.config.selection.load_best_at_end:
            self.models.take_saved(self.run_dir)
        metrics, signature = self.models.score("test")
        run_directory.write_summary(
            self.run_dir,
            run_directory.FINISHED,
            rounds=self.last_round,
            best_round=self.selection.best_round,
            wall_s=time.perf_counter() - self.started + self._wall_before,
            metrics=metrics,
            signature=signature,
            **({"privacy": self.privacy} if self.privacy else {}),
        )
        log(INFO, "Test: %s", metrics)
