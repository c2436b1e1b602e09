"""Checks of a run before anything is started. The server app checks again: plain ``flwr run`` starts it, too."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from client_pipeline.runtime.stage.accelerator import find_accelerator
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from flower_app.config.cautions import check_honest_scores
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_first_round, check_pace, make_planner
from flower_app.tasks.base import TASKS, task
from flower_app.tasks.data.data_split import weighted_split
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
    # The powers do not affect feasibility, and importing CVXPY takes a third of a second.
    exact = replace(config, planner=replace(config.planner, power_control="exact"))
    planner = make_planner(exact, scenario)
    data = weighted_split(config.data, scenario.data_shares)
    if data.source == "generated" and config.task.name in TASKS:
        # Generated text is endless, so a small part of it is enough for the check. A task of the user's own may need
        # all of its examples, for example to collect its labels.
        few = min(data.num_examples, num_clusters)
        data = replace(data, num_examples=few, evaluation_examples=1, partition="iid")
    chosen = task(config.task)
    config.selection.check_metric(chosen.scores)
    chosen.check(data, config.model, config.seed, num_clusters)
    if planner is not None and config.costs == "scenario" and not (config.model.pretrained or config.model.from_):
        # Otherwise the result depends on the model, and the server reports it.
        check_pace(config, check_first_round(planner))
    if config.tensorboard or config.report_to:
        from flower_app.report.sinks import sink_names

        sink_names(config.report_to, config.tensorboard)
    if config.traits.decoder_on_server:
        # Read the certificates and listen for a moment, with next to nothing for a decoder, where it will compute.
        accelerator = find_accelerator(config.runtime.accelerator)
        head = HeadTrainer(nn.Linear(1, 1), config.optimizer, unit=0, accelerator=accelerator)
        service = DecoderService(config.decoder, DecoderTrainer(head, config.sync), num_clusters=1)
        try:
            service.start()
        finally:
            service.stop()
    return num_clusters
