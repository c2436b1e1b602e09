"""The Flower server: sets the run up with all nodes, starts the strategy, evaluates, and writes the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import INFO
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from client_pipeline.partition.families import adapter, build_parts
from client_pipeline.partition.plan import PLAN_FORMAT, ClusterPlan
from client_pipeline.runtime.head import HeadTrainer
from client_pipeline.system.scenario import load_scenario
from flower_app import run_directory
from flower_app.config import RunConfig
from flower_app.saved_model import save_model
from flower_app.tasks.base import task
from strategies.clusters import ClusterState, check_clusters, declared_clusters
from strategies.collapipe import CollaPipe
from strategies.decoder import DecoderTrainer
from strategies.decoder_service import DecoderService
from strategies.policies import Policy, RoundProblem, make_policy
from strategies.recording_grid import RecordingGrid
from strategies.records import CONFIG, SETUP, to_arrays, to_tensors
from strategies.stock import make_stock

NODES_TIMEOUT_S = 60.0
"""How long the server waits for its nodes."""
SETUP_TIMEOUT_S = 600.0
MESSAGE_TIMEOUT_S = 24 * 3600.0
"""A round may be long; its own waits are bounded one by one."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one training, from the configuration to the summary."""
    config = RunConfig.from_flat(context.run_config)
    if config.run_dir:
        # `collapipe run` has made and claimed it; under plain `flwr run` it may be new.
        run_dir = Path(config.run_dir).resolve()
        if run_directory.read_summary(run_dir) is not None:
            raise ValueError(f"run-dir: {run_dir} holds a run already; name another, or leave run-dir empty")
        run_dir.mkdir(parents=True, exist_ok=True)
    else:
        run_dir = run_directory.create_run_directory(config.runs_dir, config.name)
    print(run_dir, flush=True)
    try:
        run_directory.write_config(run_dir, config)
        TrainingRun(config, run_dir, grid).run()
    except BaseException as error:
        run_directory.write_failure(run_dir, error)
        raise


class TrainingRun:
    """One training as the server sees it."""

    def __init__(self, config: RunConfig, run_dir: Path, grid: Grid) -> None:
        torch.set_num_threads(config.runtime.server_threads)
        self.config = config
        self.run_dir = run_dir
        self.flower_grid = grid
        self.started = time.perf_counter()

    def run(self) -> None:
        """Prepare, train, score on the test set, and write the summary."""
        config = self.config
        scenario = load_scenario(config.scenario)
        policy = make_policy(config.policy, config.plan)
        if config.num_clusters > scenario.num_clusters:
            raise ValueError(
                f"num-clusters: {config.num_clusters} clusters, but scenario {config.scenario} has "
                f"{scenario.num_clusters}; lower num-clusters or choose another scenario"
            )
        nodes = wait_for_nodes(self.flower_grid, config.num_clusters or 1, NODES_TIMEOUT_S)
        num_clusters = config.num_clusters or min(len(nodes), scenario.num_clusters)
        self.task = task(config.task)
        self.prepared = self.task.prepare(config.data, config.model, config.seed, num_clusters)
        self.parts = build_parts(self.prepared.spec, config.seed)
        self.num_blocks = adapter(self.prepared.spec.family).num_blocks(self.prepared.spec)
        declared = declared_clusters(scenario, num_clusters)
        problem = RoundProblem(round=1, num_blocks=self.num_blocks, batch_size=config.batch_size, clusters=declared)
        policy.plan(problem)
        if config.strategy == "collapipe":
            # The service first: a port in use is found before any control unit starts.
            with closing_service(self._decoder_service(num_clusters)) as service:
                clusters = self._set_up(nodes, num_clusters)
                self._start(self._collapipe(policy, service, clusters), clusters, all_needed_s=None)
        else:
            strategy = make_stock(config.strategy, config.strategy_arguments(), num_clusters)
            self._start(strategy, self._set_up(nodes, num_clusters), all_needed_s=NODES_TIMEOUT_S)
        self._finish()

    def _set_up(self, nodes: Sequence[int], num_clusters: int) -> list[ClusterState]:
        """Tell every node about the run; learn the clusters. A mistake that any node finds ends the run here."""
        told = ConfigRecord(
            {
                "spec": self.prepared.spec.to_json(),
                "tokenizer": self.prepared.tokenizer_json,
                "num-clusters": num_clusters,
            }
        )
        messages = [Message(RecordDict({CONFIG: told}), dst_node_id=node, message_type=SETUP) for node in nodes]
        replies = list(self.flower_grid.send_and_receive(messages, timeout=SETUP_TIMEOUT_S))
        if silent := sorted(set(nodes) - {reply.metadata.src_node_id for reply in replies}):
            raise RuntimeError(f"set-up: no answer from nodes {silent} within {SETUP_TIMEOUT_S:g} s")
        clusters = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                raise RuntimeError(f"set-up: node {node}: {reply.error.reason}")
            answer = json.loads(cast(str, reply.content.config_records[CONFIG]["json"]))
            if "error" in answer:
                raise ValueError(answer["error"])
            if "state" in answer:
                clusters.append(ClusterState.from_dict(answer["state"]))
        check_clusters(clusters, num_clusters)
        return sorted(clusters, key=lambda state: state.cluster)

    def _decoder_service(self, num_clusters: int) -> DecoderService:
        config = self.config
        if config.strategy_options:
            raise ValueError(
                "strategy-options: collapipe takes none; leave it empty, its settings have keys of their own"
            )
        trainer = DecoderTrainer(
            HeadTrainer(self.parts.head, config.optimizer, unit=self.num_blocks),
            decoder_sync=config.decoder_sync,
            join_timeout_s=config.decoder.join_timeout,
            step_timeout_s=config.decoder.step_timeout,
        )
        return DecoderService(config.decoder, trainer, num_clusters)

    def _collapipe(self, policy: Policy, service: DecoderService, clusters: Sequence[ClusterState]) -> CollaPipe:
        return CollaPipe(
            policy=policy,
            decoder=service,
            clusters=clusters,
            num_blocks=self.num_blocks,
            batch_size=self.config.batch_size,
            local_steps=self.config.local_steps,
            on_plan=self._write_plan,
        )

    def _write_plan(self, server_round: int, plans: Sequence[ClusterPlan]) -> None:
        document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
        run_directory.write_plan(self.run_dir, server_round, document)

    def _write_own_plans(self, server_round: int, reports: Sequence[dict[str, Any]]) -> None:
        """Write the plans that control units made for themselves; a cluster that failed has none."""
        plans = {report["cluster"]: report["plan"] for report in reports}
        document = {"format": PLAN_FORMAT, "clusters": [plans.get(n) for n in range(max(plans, default=-1) + 1)]}
        run_directory.write_plan(self.run_dir, server_round, document)

    def _start(self, strategy: Strategy, clusters: Sequence[ClusterState], all_needed_s: float | None) -> None:
        self.grid = RecordingGrid(self.flower_grid, {state.node_id: state.cluster for state in clusters}, all_needed_s)
        self.round_started = time.perf_counter()
        # The decoder's service trains self.parts.head; scoring has a model of its own.
        self.evaluated = build_parts(self.prepared.spec, self.config.seed)
        strategy.start(
            self.grid,
            initial_arrays=to_arrays(self.parts.weights()),
            num_rounds=self.config.num_rounds,
            timeout=MESSAGE_TIMEOUT_S,
            evaluate_fn=self._after_round,
        )

    def _after_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate where it is due, and write the round's line."""
        if server_round == 0:
            return None
        config = self.config
        metrics: dict[str, float] = {}
        last = server_round == config.num_rounds
        if last or (config.evaluate_every and server_round % config.evaluate_every == 0):
            self.evaluated.load(to_tensors(arrays))
            metrics = self.prepared.evaluator.evaluate(self.evaluated, "validation").metrics
            self._save()
        record = self.grid.take_round()
        if config.strategy != "collapipe":
            self._write_own_plans(server_round, record["clusters"])
        now = time.perf_counter()
        run_directory.append_round(
            self.run_dir,
            {
                "round": server_round,
                **record,
                "metrics": metrics,
                "lr": config.optimizer.learning_rate(server_round * config.local_steps),
                "round_s": now - self.round_started,
                "wall_s": now - self.started,
            },
        )
        self.round_started = now
        return MetricRecord(dict(metrics)) if metrics else None

    def _save(self) -> None:
        save_model(
            self.run_dir,
            self.prepared.spec,
            self.evaluated.weights(),
            self.prepared.tokenizer_json,
            self.task.saved(self.config.data),
        )

    def _finish(self) -> None:
        # The last round has loaded, scored and saved the final weights.
        score = self.prepared.evaluator.evaluate(self.evaluated, "test")
        run_directory.write_summary(
            self.run_dir,
            run_directory.FINISHED,
            rounds=self.config.num_rounds,
            wall_s=time.perf_counter() - self.started,
            metrics=score.metrics,
            signature=score.signature,
        )
        log(INFO, "Test: %s", score.metrics)


@contextmanager
def closing_service(service: DecoderService) -> Iterator[DecoderService]:
    """Start the decoder's service and stop it in the end."""
    service.start()
    try:
        yield service
    finally:
        service.stop()


def wait_for_nodes(grid: Grid, needed: int, timeout_s: float) -> list[int]:
    """Wait, with a bound, until ``needed`` nodes are connected; returns all that are.

    Raises
    ------
    ValueError
        If they do not come in time; the message says how many came.
    """
    deadline = time.monotonic() + timeout_s
    nodes: list[int] = []
    while True:
        before, nodes = nodes, sorted(grid.get_node_ids())
        # Nodes of a simulation register one after the other: take those that are there when no more come.
        if len(nodes) >= needed and len(nodes) == len(before):
            return nodes
        if time.monotonic() > deadline:
            raise ValueError(
                f"num-clusters: {needed} nodes are needed, {len(nodes)} came within {timeout_s:g} s; start more nodes "
                "or lower num-clusters"
            )
        time.sleep(0.5)
