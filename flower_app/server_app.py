"""The Flower server: sets the run up with all nodes, starts the strategy, evaluates, and writes the run directory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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
from strategies.clusters import ClusterState, check_clusters
from strategies.collapipe import CollaPipe
from strategies.decoder import DecoderTrainer
from strategies.decoder_service import DecoderService
from strategies.policies import make_policy
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
    run_dir = (
        Path(config.run_dir) if config.run_dir else run_directory.create_run_directory(config.runs_dir, config.name)
    )
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
        self.metrics: dict[str, float] = {}
        self.arrays: ArrayRecord | None = None

    def run(self) -> None:
        """Prepare, train, score on the test set, and write the summary."""
        config = self.config
        scenario = load_scenario(config.scenario)
        policy = make_policy(config.policy, config.plan)
        wanted = min(config.num_clusters or scenario.num_clusters, scenario.num_clusters)
        if config.num_clusters > scenario.num_clusters:
            raise ValueError(
                f"num-clusters: {config.num_clusters} clusters, but scenario {config.scenario} has "
                f"{scenario.num_clusters}; lower num-clusters or choose another scenario"
            )
        nodes = wait_for_nodes(self.flower_grid, wanted if config.num_clusters else 1, NODES_TIMEOUT_S)
        num_clusters = min(wanted, len(nodes))
        self.task = task(config.task)
        self.prepared = self.task.prepare(config.data, config.model, config.seed, num_clusters)
        self.parts = build_parts(self.prepared.spec, config.seed)
        self.clusters = self._set_up(nodes, num_clusters)
        self.grid = RecordingGrid(self.flower_grid, {state.node_id: state.cluster for state in self.clusters})
        if config.strategy == "collapipe":
            self._train_collapipe(policy)
        else:
            self._start(make_stock(config.strategy, config.strategy_arguments(), num_clusters))
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
        check_clusters(clusters)
        if not clusters:
            raise RuntimeError(f"set-up: none of the {len(nodes)} nodes is one of the {num_clusters} clusters")
        return sorted(clusters, key=lambda state: state.cluster)

    def _train_collapipe(self, policy: Any) -> None:
        config = self.config
        if config.strategy_options:
            raise ValueError(
                "strategy-options: collapipe takes none; leave it empty, its settings have keys of their own"
            )
        num_blocks = adapter(self.prepared.spec.family).num_blocks(self.prepared.spec)
        trainer = DecoderTrainer(
            HeadTrainer(self.parts.head, config.optimizer, unit=num_blocks),
            decoder_sync=config.decoder_sync,
            join_timeout_s=config.decoder.join_timeout,
            step_timeout_s=config.decoder.step_timeout,
        )
        service = DecoderService(config.decoder, trainer, num_clusters=len(self.clusters))
        service.start()
        try:
            strategy = CollaPipe(
                policy=policy,
                decoder=service,
                clusters=self.clusters,
                num_blocks=num_blocks,
                batch_size=config.batch_size,
                local_steps=config.local_steps,
                on_plan=self._write_plan,
            )
            strategy.plan(1)
            self._start(strategy)
        finally:
            service.stop()

    def _write_plan(self, server_round: int, plans: Sequence[ClusterPlan]) -> None:
        document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
        run_directory.write_plan(self.run_dir, server_round, document)

    def _start(self, strategy: Strategy) -> None:
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
        self.arrays = arrays
        if server_round == 0:
            return None
        config = self.config
        metrics: dict[str, float] = {}
        last = server_round == config.num_rounds
        if last or (config.evaluate_every and server_round % config.evaluate_every == 0):
            self.evaluated.load(to_tensors(arrays))
            metrics = self.prepared.evaluator.evaluate(self.evaluated, "validation").metrics
            self._save()
        if config.strategy != "collapipe":
            plans = [report["plan"] for report in self.grid.last_round["clusters"]]
            run_directory.write_plan(self.run_dir, server_round, {"format": PLAN_FORMAT, "clusters": plans})
        now = time.perf_counter()
        run_directory.append_round(
            self.run_dir,
            {
                "round": server_round,
                **self.grid.last_round,
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
