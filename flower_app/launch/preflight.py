"""What can be checked of a run before anything is started. The server checks again: it also runs without us."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from client_pipeline.runtime.accelerator import find_accelerator
from client_pipeline.runtime.decoder_update import HeadTrainer
from flower_app.config.cautions import check_honest_scores
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_first_round, check_pace, make_planner
from flower_app.tasks.base import TASKS, task
from flower_app.tasks.partition import weighted_partition
from flower_app.training.memory_limit import check_memory_limit
from flower_app.training.network import training_scenario
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer


def check_run(config: RunConfig) -> int:
    """Check scenario, strategy, data, model, plan and the decoder's address and certificates.

    Returns
    -------
    Number of clusters of the run.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the key or file, what was found, what was expected.
    InfeasibleRound
        If no cluster has a plan.
    """
    check_honest_scores(config)
    scenario = training_scenario(config)
    num_clusters = config.num_clusters or scenario.num_clusters
    scenario = scenario.first(num_clusters)
    check_memory_limit(config.runtime.memory_limit, config.costs, scenario, config.planner.schedule)
    # Whether there is a plan does not hang on how its powers are found, and CVXPY's import takes a third of a second.
    exact = replace(config, planner=replace(config.planner, power_control="exact"))
    planner = make_planner(exact, scenario)
    data = weighted_partition(config.data, scenario.data_shares)
    if data.source == "generated" and config.task.name in TASKS:
        # Text without end can only be too little for its clusters; so a little of it tells. What a task of the user's
        # own generates is not known: it may have its labels from all of its examples.
        few = min(data.num_examples, num_clusters)
        data = replace(data, num_examples=few, evaluation_examples=1, partition="iid")
    chosen = task(config.task)
    config.selection.check_metric(chosen.scores)
    chosen.check(data, config.model, config.seed, num_clusters)
    if planner is not None and config.costs == "scenario" and not (config.model.pretrained or config.model.from_):
        # Otherwise the model decides, and the server tells.
        check_pace(config, check_first_round(planner))
    if config.tensorboard or config.report_to:
        from flower_app.report.sinks import sink_names

        sink_names(config.report_to, config.tensorboard)
    if config.traits.decoder_on_server:
        _try_decoder(config)
    return num_clusters


def _try_decoder(config: RunConfig) -> None:
    """Read the certificates and listen for a moment, with next to nothing for a decoder, where it will compute."""
    accelerator = find_accelerator(config.runtime.accelerator)
    head = HeadTrainer(nn.Linear(1, 1), config.optimizer, unit=0, accelerator=accelerator)
    trainer = DecoderTrainer(head, config.decoder_sync)
    service = DecoderService(config.decoder, trainer, num_clusters=1)
    try:
        service.start()
    finally:
        service.stop()
