"""Training on the server's side: nodes, decoder, strategy, rounds, and the score on the test set."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from client_pipeline import durable
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.address import DecoderAddress
from client_pipeline.partition.parts import load_parameters, own_parameters, part_weights
from client_pipeline.partition.plan import PLAN_FORMAT, ClusterPlan, read_plans
from client_pipeline.runtime.stage.accelerator import find_accelerator, training_bytes
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.weights.base_weights import BaseWeights, FrozenBase
from flower_app.config.serve_config import AFTER_TRAINING
from flower_app.config.strategy_choice import make_strategy
from flower_app.report.sinks import open_sinks
from flower_app.runs import run_directory
from flower_app.runs.machines import note_machines
from flower_app.runs.phases import NODES, SETTING_UP, TESTING, TRAINING, begin_phase
from flower_app.runs.run_lock import nodes_held
from flower_app.training.actor_start import arranged
from flower_app.training.cluster_setup import Clusters, round_bounds, set_up_clusters, wait_for_nodes
from flower_app.training.given_model import check_answering, give_model
from flower_app.training.global_models import GlobalModels
from flower_app.training.live_news import LiveNews
from flower_app.training.prepared_run import PreparedRun
from flower_app.training.releases import accounted
from flower_app.training.round_closer import PatienceEnded, RoundClock, RoundCloser, RunStanding
from flower_app.training.run_grid import NODES_TIMEOUT_S, run_grid
from flower_app.training.server_faults import ServerFaults
from strategies.aggregation.accountant import PrivacyAccountant
from strategies.clusters import ClusterState
from strategies.collapipe import CollaPipe
from strategies.decoder.kept_activations import KeptActivations
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer
from strategies.flower_names import log
from strategies.grid.single_pulls import SinglePulls
from strategies.grid.update_spool import UpdateSpool
from strategies.records import BASE_KEY, RUN_KEY, to_arrays
from strategies.registry import STRATEGIES
from strategies.resumed import ResumedStrategy, restore_kept
from strategies.separate_models import cluster_prefix

MESSAGE_TIMEOUT_S = 24 * 3600.0
"""A round may be long; its own waits are bounded one by one."""


def train_prepared(run: PreparedRun, grid: Grid) -> None:
    """Train a run's remaining rounds, score its model on the test set, and write the summary.

    Raises
    ------
    ValueError
        If too few nodes come, another run holds one of them, or a node finds a mistake.
    RuntimeError
        If a node does not answer in time, or fails.
    """
    if run.config.serve.when == AFTER_TRAINING:
        check_answering(run.prepared_task.spec)
    # On the disk of the run: the folder for temporary files may be memory.
    spool = UpdateSpool(run.run_dir)
    flower_grid = SinglePulls(grid, spool)
    begin_phase(run.run_dir, NODES)
    nodes = wait_for_nodes(flower_grid, run.num_clusters, NODES_TIMEOUT_S)
    with nodes_held(nodes, run.run_dir):
        num_own = 0 if run.config.traits.averages else run.num_clusters
        models = GlobalModels(run.prepared_task, run.parts, run.frozen, num_own)
        standing, clock = RunStanding(run), RoundClock(run)
        if run.completed < run.config.num_rounds and not standing.selection.stops:
            # The service first: a port in use shows before any control unit starts.
            news = LiveNews(run.run_dir)
            service = decoder_service(run, news) if run.config.traits.decoder_on_server else None
            with news, service or nullcontext():
                begin_phase(run.run_dir, SETTING_UP)
                clusters = set_up(run, flower_grid, nodes, service)
                note_machines(run.run_dir, run.completed, clusters.machines)
                _train_rounds(run, flower_grid, spool, clusters, service, models, standing, clock)
        elif run.resumed is not None:
            models.take(to_arrays(run.resumed.weights))
        finish(run, models, standing, clock, lambda: _last_act(run, flower_grid, nodes))


def _last_act(run: PreparedRun, grid: Grid, nodes: Sequence[int]) -> dict[str, Any]:
    """Give the model to the boxes, if that was ordered; return what the summary says of their doors."""
    if run.config.serve.when != AFTER_TRAINING:
        return {}
    try:
        return {"doors": give_model(grid, nodes, run.config, run.run_dir)}
    except Exception as error:  # noqa: BLE001 (the training is done, whatever becomes of its answers)
        log(WARNING, "the boxes have not received the model: %s", error)
        return {"doors": [{"error": str(error)}]}


def set_up(run: PreparedRun, grid: Grid, nodes: Sequence[int], service: DecoderService | None = None) -> Clusters:
    """Send every node the set-up, and return the clusters; see :func:`set_up_clusters`.

    With a service nodes that lack the files of the frozen weights may pull them until all have answered.
    """
    base = run.frozen if isinstance(run.frozen, FrozenBase) else None
    plans, arrangement = run.config.plan, arranged(run.config, run.scenario, grid)
    # As the scenario describes them, before their nodes have answered.
    declared = [
        ClusterState(cluster=n, node_id=0, devices=devices, block_memory=run.scenario.block_memory, num_examples=0)
        for n, devices in enumerate(run.scenario.clusters)
    ]
    message: dict[str, str | int] = {
        "spec": run.prepared_task.spec.to_json(),
        "tokenizer": run.prepared_task.tokenizer_json,
        BASE_KEY: "" if base is None else base.to_json(),
        "num-clusters": run.num_clusters,
        "run-name": run_directory.plain_name(run.run_dir),
        "resume-round": run.completed,
        "forward-only": int(_forward_only(run)),
        **{f"{key}-identity": value for key, value in run.identity._asdict().items()},
        "device-actors": arrangement.device_actors,
        "cluster-actors": arrangement.cluster_actors,
        # Nodes need not have the server's files.
        "network": json.dumps([cluster.to_dict() for cluster in declared]),
        "data-shares": json.dumps(run.scenario.data_shares),
        "plans": json.dumps([plan.to_dict() for plan in read_plans(Path(plans))]) if plans else "",
    }
    max_length = run.config.data.max_length
    lines, _ = run_directory.read_rounds(run.run_dir) if run.completed else ([], 0)
    trained = {report["cluster"] for line in lines for report in line["clusters"]}
    sent = run.frozen if base is None else {}
    pulling: AbstractContextManager[list[DecoderAddress]] = nullcontext([])
    if isinstance(base, BaseWeights) and service is not None:
        pulling = service.pulls(len(nodes))
    with pulling as addresses:
        pulls = {node: json.dumps(address.to_dict()) for node, address in zip(nodes, addresses, strict=False)}
        return set_up_clusters(grid, nodes, message, sent, run.num_clusters, max_length, trained, pulls)


def decoder_service(run: PreparedRun, news: LiveNews | None = None) -> DecoderService:
    """Make the service that trains the run's decoder, where the run goes on with the checkpoint's state.

    ``news`` receives the control units' messages about the round in progress.
    """
    config = run.config
    forward_only = _forward_only(run)
    trainer = DecoderTrainer(
        HeadTrainer(
            run.parts.head_on_server,
            config.optimizer,
            unit=run.scenario.planner.num_blocks,
            precision=config.runtime.precision,
            accelerator=find_accelerator(config.runtime.accelerator, training_bytes(run.parts.head_on_server)),
            answers_gradients=not forward_only,
        ),
        decoder_sync=config.sync,
        join_timeout_s=config.decoder.join_timeout,
        step_timeout_s=config.decoder.step_timeout,
    )
    if run.resumed is not None:
        load_parameters(own_parameters(run.parts.head), part_weights(run.resumed.weights, "head"), "decoder")
        trainer.restore(run.resumed.decoder, str(run.resumed.state["decoder-sync"]))
    codec = ActivationCodec(config.compression.of_stream)
    most = config.batch_size * config.gradient_accumulation
    limits = StepLimits.of(run.parts.spec, most, config.data.max_length, config.data.packing)
    listener = {} if news is None else {"on_news": news.hear}
    base = run.frozen if isinstance(run.frozen, BaseWeights) else None
    # Without room for any it answers with losses alone, too.
    kept = KeptActivations(int(config.compression.cache_gb * 2**30)) if forward_only else None
    return DecoderService(config.decoder, trainer, run.num_clusters, codec, limits, base=base, kept=kept, **listener)


def _forward_only(run: PreparedRun) -> bool:
    return run.config.forward_only(run.scenario.planner.num_blocks)


def _train_rounds(
    run: PreparedRun,
    flower_grid: Grid,
    spool: UpdateSpool,
    clusters: Clusters,
    service: DecoderService | None,
    models: GlobalModels,
    standing: RunStanding,
    clock: RoundClock,
) -> None:
    """Train until the last round, or until patience ends."""
    config, states = run.config, clusters.states
    had_ended = run.resumed is not None and run.completed >= int(run.resumed.state["config"]["num-rounds"])
    faults = ServerFaults(config.faults, run.run_dir, run.completed, had_ended=had_ended)

    def open_round(server_round: int, plans: Sequence[ClusterPlan]) -> None:
        document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
        run_directory.write_plan(run.run_dir, server_round, document)
        faults.begin_round(server_round, usual_s=clock.round_s)

    strategy = make_strategy(config, run.scenario, run.planner, states, decoder=service, on_plan=open_round)
    num_examples = {state.cluster: state.num_examples for state in states}
    accountant = PrivacyAccountant(config.privacy, num_examples, config.returns_states)
    releases = accounted(config, run.run_dir, accountant, service, run.resumed, run.identity)
    grid = run_grid(
        flower_grid,
        config,
        run.run_dir,
        service.trainer if service is not None else None,
        {state.node_id: state.cluster for state in states},
        round_bounds(config, run.scenario.planner.num_blocks, states),
        releases.begin_round if releases else None,
        clusters.at_once,
        spool,
    )
    if run.resumed is not None:
        grid.receipts.restore(run.resumed.state["updates-counted"])
        restore_kept(strategy, run.resumed.state.get("strategy"), run.resumed.server)
    initial_arrays = _initial_arrays(run, leaves_head=service is not None and isinstance(strategy, CollaPipe))
    board = open_sinks(config.report_to, config.tensorboard, run.run_dir, run.completed + 1, config.to_flat())
    closer = RoundCloser(
        run,
        standing,
        clock,
        models,
        exchanges=grid,
        strategy=strategy,
        accountant=accountant,
        faults=faults,
        service=service,
        board=board,
        setup_bytes=clusters.bytes_down,
        initial_arrays=initial_arrays,
    )
    begin_phase(run.run_dir, TRAINING)
    clock.begin_first_round()
    # A strategy may bring a start of its own; only a run that goes on needs ours.
    started = ResumedStrategy(strategy, run.completed) if run.completed else strategy

    def close(started_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if arrays is not initial_arrays and config.strategy in STRATEGIES:
            # Flower's start has the record until the last round, one model more; none of ours asks for it again.
            initial_arrays.clear()
        return closer.close(started_round, arrays)

    try:
        started.start(
            grid,
            initial_arrays=initial_arrays,
            num_rounds=config.num_rounds - run.completed,
            timeout=MESSAGE_TIMEOUT_S,
            train_config=ConfigRecord({RUN_KEY: run_directory.plain_name(run.run_dir)}),
            evaluate_fn=close,
        )
    except PatienceEnded:
        log(
            INFO,
            "Stopped after round %d: %s %g of round %d is the best",
            standing.last_round,
            config.selection.metric,
            standing.selection.best,
            standing.selection.best_round,
        )
    finally:
        run_directory.write_waiting(run.run_dir, {})
        if board is not None:
            board.close()


def _initial_arrays(run: PreparedRun, leaves_head: bool) -> ArrayRecord:
    """Return the weights that the rounds begin with; no tensors are kept beside them.

    ``leaves_head``: without the head, which the decoder's service has and trains in place.
    """
    # In the model's order: Flower's FedAvgM goes by places, not by names.
    names = [name for name, _ in run.parts.named_parameters(not leaves_head)]
    if run.resumed is None:
        weights = run.parts.weights(not leaves_head)
    else:
        weights = run.resumed.weights
        if not run.config.traits.averages:
            names = [cluster_prefix(n) + name for n in range(run.num_clusters) for name in names]
    return to_arrays({name: weights[name] for name in names})


def finish(
    run: PreparedRun,
    models: GlobalModels,
    standing: RunStanding,
    clock: RoundClock,
    last_act: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Score the model that is kept on the test set, and write the summary.

    Parameters
    ----------
    run, models, standing, clock : of the training that has ended
    last_act : called once the model is saved and scored; returns further entries of the summary

    Raises
    ------
    RuntimeError
        If no round has changed the model.
    """
    rounds, _ = run_directory.read_rounds(run.run_dir)
    if rounds and not any(line.get("updated", True) for line in rounds):
        raise RuntimeError(
            f"none of the {len(rounds)} rounds has changed the model: strategy {run.config.strategy} made no weights "
            f"of the updates; {run.run_dir / 'logs' / 'simulation.log'} may say why"
        )
    begin_phase(run.run_dir, TESTING)
    # The last round has loaded and scored the final weights; the model that is kept may be an earlier one.
    if run.config.selection.load_best_at_end:
        models.take_saved(run.run_dir)
    metrics, signature = models.score("test")
    if models.mistakes:
        text = json.dumps(models.mistakes, ensure_ascii=False, allow_nan=False)
        durable.write_text(run.run_dir / run_directory.MISTAKES, text, lasting=False)
    run_directory.write_answers(run.run_dir, "after", models.answers())
    summary = {
        "rounds": standing.last_round,
        "best_round": standing.selection.best_round,
        "scored_round": standing.selection.best_round if run.config.selection.load_best_at_end else standing.last_round,
        "wall_s": clock.wall_s,
        "metrics": metrics,
        "signature": signature,
        **({"privacy": standing.privacy} if standing.privacy else {}),
    }
    # Behind the last act: the launcher ends all programs as soon as there is a summary.
    run_directory.write_summary(run.run_dir, run_directory.FINISHED, **summary, **last_act())
    log(INFO, "Test: %s", metrics)
