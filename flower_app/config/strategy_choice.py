"""What a run's configuration makes of its strategy: planner, averaging, the strategy itself, and whether it resumes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from flwr.serverapp.strategy import Strategy

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.scenario import Scenario
from flower_app.config.removed import without_removed_keys
from flower_app.config.run_config import RunConfig
from strategies.aggregation.product_mean import check_lora_average
from strategies.aggregation.rules import build_aggregator, rule_class
from strategies.baselines.flower_strategies import check_enough_clusters, make_stock
from strategies.checkpoint import Checkpoint
from strategies.clusters import ClusterState
from strategies.decoder.service import DecoderService
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.planned_strategy import OnPlan, PlannedStrategy
from strategies.planning.adaptation import Adaptation
from strategies.planning.costs import Work, pipeline_work
from strategies.planning.planner import Decision, InfeasibleRound, RoundPlanner
from strategies.planning.policies import make_policy
from strategies.registry import COLLAPIPE, STRATEGIES, strategy_class, traits_of
from strategies.resumed import check_resumable, check_unchanged, is_free

FREE_TO_CHANGE = (
    "resume",
    "run-dir",
    "runs-dir",
    "tensorboard",
    "report-to",
    "decoder.",
    "runtime.actor-idle",
    "runtime.timeout",
    "runtime.devices-per-actor",
    "runtime.clusters-per-actor",
)
"""Keys, and tables, that may be otherwise when a run goes on: places and patience, not numbers."""


def make_planner(config: RunConfig, scenario: Scenario) -> RoundPlanner | None:
    """Return the planner of a run's strategy; None for a stock strategy, whose control units plan for themselves.

    Raises
    ------
    ValueError, FileNotFoundError
        For a name that is unknown, or a setting that the strategy does not take.
    """
    cls = strategy_class(config.strategy)
    _check_frozen_head(config)
    _check_cache(config, scenario.planner.num_blocks)
    _check_joining(config, scenario, takes_aggregator=traits_of(cls).takes_aggregator)
    if issubclass(cls, PlannedStrategy):
        cls.check_model(config.lora if config.model.trainable == "lora" else None, scenario.planner.num_blocks)
    own_policy = cls.own_policy(config.seed) if issubclass(cls, PlannedStrategy) else None
    chooses_policy = issubclass(cls, PlannedStrategy) and own_policy is None
    paper = chooses_policy and config.policy == "dssda-paper" and not config.plan
    if not paper and (config.planner.drift != "true" or config.planner.c11):
        raise ValueError('planner.drift and planner.c11 apply only to the paper as printed; set policy = "dssda-paper"')
    if paper and scenario.planner.bound == "participation":
        raise ValueError(
            "planner.bound: participation counts who trains alone, and dssda-paper is about segments and powers; set "
            'planner.bound = "gamma", or policy = "dssda"'
        )
    if not chooses_policy and config.policy != RunConfig().policy:
        raise ValueError(
            f"policy: {config.strategy} brings its own plan, found policy = {config.policy!r}; leave policy out, or "
            'set strategy = "collapipe"'
        )
    if not issubclass(cls, PlannedStrategy):
        if config.costs == "measured":
            raise ValueError(f"costs: {config.strategy} plans nothing, found measured; leave costs out")
        if config.device_emulation != "none":
            raise ValueError(
                f"device-emulation: {config.strategy} sends no plan, so nobody knows the pace; use one of "
                f"{', '.join(STRATEGIES)}"
            )
        strategy = make_stock(config.strategy, config.strategy_arguments(), scenario.num_clusters)
        check_enough_clusters(strategy, scenario.num_clusters)
        return None
    if own_policy is not None and config.plan:
        raise ValueError(f"plan: {config.strategy} brings its own plan; leave plan empty")
    _check_options(config, cls)
    settings, adaptation = config.planner, _adaptation(config, scenario, cls)
    policy = own_policy or make_policy(
        "fixed" if config.plan else config.policy,
        plan_file=config.plan,
        seed=config.seed,
        c11=settings.c11,
        drift=settings.drift,
    )
    return RoundPlanner(
        scenario,
        policy,
        drift=settings.drift,
        power_control=settings.power_control,
        adaptation=adaptation,
        schedule=settings.schedule,
        token_slices=settings.token_slices,
    )


def _adaptation(config: RunConfig, scenario: Scenario, cls: type[PlannedStrategy]) -> Adaptation | None:
    """What plans by measured times; None where the configuration does not ask for it."""
    if config.costs != "measured":
        return None
    if config.plan:
        raise ValueError(f"costs: measured has nothing to plan with plan = {config.plan}; leave one of them out")
    if cls.work is not pipeline_work:
        raise ValueError(
            f"costs: measured needs a strategy whose clusters are pipelines, found strategy = {config.strategy!r}; set "
            'costs = "model"'
        )
    paced = config.device_emulation == "paced"
    return Adaptation(MeasuredNetwork(scenario.num_clusters, config.time_scale if paced else None))


def _check_frozen_head(config: RunConfig) -> None:
    """Refuse adapters in a head where nobody adapts."""
    if config.lora.freezes_head and config.model.trainable != "lora":
        raise ValueError(
            f"lora.head: {config.lora.head} is of adapters, found model.trainable = {config.model.trainable}; set "
            'model.trainable = "lora", or leave lora.head out'
        )


def _check_cache(config: RunConfig, num_blocks: int) -> None:
    """Refuse to keep activations on the server that change from step to step, or that it is not sent."""
    if not config.compression.cache_gb:
        return
    key, found, remedy = "", "", ""
    if not config.traits.decoder_on_server or config.labels_stay:
        key, found = ("split.labels", config.split.labels) if config.labels_stay else ("strategy", config.strategy)
        remedy = "leave it out: only a server that has the labels can do without the gradients of activations"
    elif config.model.trainable != "lora" or config.lora.first_block < num_blocks:
        first = config.lora.first_block if config.model.trainable == "lora" else 0
        key, found = "lora.first-block", str(first)
        remedy = f'set model.trainable = "lora" and lora.first-block to the {num_blocks} TEBs of a cluster, or more'
    elif config.task.name == "masked-lm":
        key, found, remedy = "task.name", config.task.name, "leave it out: each step hides other tokens"
    elif config.costs == "measured":
        key, found, remedy = "costs", config.costs, 'set costs = "model": most steps have nothing that is measured'
    if key:
        raise ValueError(
            f"compression.cache-gb: {config.compression.cache_gb:g} keeps activations that never change, found "
            f"{key} = {found}; {remedy}"
        )


def _check_joining(config: RunConfig, scenario: Scenario, *, takes_aggregator: bool) -> None:
    """Refuse settings of the average where nothing reads them, or that exclude each other."""
    check_lora_average(
        config.lora,
        trainable=config.model.trainable,
        strategy=config.strategy,
        takes_aggregator=takes_aggregator,
        num_clusters=scenario.num_clusters,
    )
    if takes_aggregator:
        run_aggregator(config, scenario)
        return
    if config.server_optimizer.name != "none":
        raise ValueError(
            f"server-optimizer.name: {config.server_optimizer.name} needs strategy = collapipe, found "
            f'{config.strategy!r}; leave it out, or set strategy = "FedAdam" and the like for whole models'
        )
    if config.aggregator.name != "mean":
        raise ValueError(
            f"aggregator.name: {config.aggregator.name} needs strategy = collapipe, found {config.strategy!r}; "
            'leave it out, or set strategy = "Krum" and the like for whole models'
        )


def _check_options(config: RunConfig, cls: type[PlannedStrategy]) -> None:
    """Refuse options that the constructor of a strategy that plans does not take."""
    reserved = {"decoder", *inspect.signature(PlannedStrategy).parameters}
    parameters = inspect.signature(cls).parameters.values()
    argument_names = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD} - reserved
    if unknown := sorted(config.strategy_arguments().keys() - argument_names):
        hint = ", its settings have keys of their own" if config.strategy == COLLAPIPE else ""
        if argument_names:
            raise ValueError(
                f"strategy-options: {config.strategy} takes no argument {unknown[0]!r}; expected some of "
                f"{', '.join(sorted(argument_names))}"
            )
        raise ValueError(f"strategy-options: {config.strategy} takes none; leave it empty{hint}")


def make_strategy(
    config: RunConfig,
    scenario: Scenario,
    planner: RoundPlanner | None,
    clusters: Sequence[ClusterState],
    *,
    decoder: DecoderService | None,
    on_plan: OnPlan,
) -> Strategy:
    """Build a run's strategy.

    Parameters
    ----------
    config, scenario : the run's
    planner : of :func:`make_planner`
    clusters : those that take part
    decoder : the decoder's service where the server trains the decoder; else None
    on_plan : called with each round's number and plans, if the strategy plans
    """
    cls = strategy_class(config.strategy)
    options = config.strategy_arguments()
    if planner is None or not issubclass(cls, PlannedStrategy):
        return make_stock(config.strategy, options, len(clusters))
    traits = traits_of(cls)
    arguments: dict[str, Any] = {
        "planner": planner,
        "clusters": clusters,
        "on_plan": on_plan,
        "time_scale": config.time_scale if config.device_emulation == "paced" else None,
    }
    if traits.decoder_on_server:
        # None where the clusters train it after all, with their labels.
        arguments["decoder"] = decoder
    if traits.takes_aggregator:
        arguments["aggregator"] = run_aggregator(config, scenario)
    return cls(**arguments, **options)


def run_aggregator(config: RunConfig, scenario: Scenario) -> Strategy:
    """Build what joins the encoders of ``collapipe``.

    Raises
    ------
    ValueError
        For settings that exclude each other, or too few clusters.
    """
    in_a_round = min(scenario.num_clusters, scenario.num_channels)
    adapters = config.lora if config.model.trainable == "lora" else None
    return build_aggregator(
        config.aggregator, config.server_optimizer, config.privacy, num_clusters=in_a_round, adapters=adapters
    )


def work_of(config: RunConfig) -> Work:
    """What a step of a run's strategy takes on the devices."""
    cls = strategy_class(config.strategy)
    return cls.work if issubclass(cls, PlannedStrategy) else pipeline_work


def check_can_resume(config: RunConfig) -> None:
    """Refuse to go on with a strategy that keeps something from round to round that no checkpoint has.

    Raises
    ------
    ValueError
        Saying why, and what to do.
    """
    check_resumable(config.strategy, config.strategy_arguments())
    if config.traits.takes_aggregator and rule_class(config.aggregator.name).keeps == "unknown":
        raise ValueError(
            f"resume: aggregator.name: {config.aggregator.name} may keep something from round to round that no "
            'checkpoint has; start the run anew, or, if it keeps nothing, let its class say keeps = "nothing"'
        )


def check_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Refuse to go on under another configuration; more rounds are the same run, extended.

    Raises
    ------
    ValueError
        Naming the keys that differ.
    """
    old_values, new_values = without_removed_keys(checkpoint.state["config"]), config.to_flat()
    more_rounds = config.num_rounds >= int(old_values["num-rounds"])
    check_unchanged(old_values, new_values, (*FREE_TO_CHANGE, "num-rounds") if more_rounds else FREE_TO_CHANGE)


def fixed_keys(config: RunConfig) -> dict[str, object]:
    """Return the keys that decide what is computed."""
    return {key: value for key, value in config.to_flat().items() if not is_free(key, FREE_TO_CHANGE)}


def check_first_round(planner: RoundPlanner) -> Decision:
    """Plan the first round, before anything is started.

    Raises
    ------
    InfeasibleRound
        If nobody has a plan.
    ValueError
        For a plan file that does not fit.
    """
    decision = planner.plan(1, [float("inf")] * planner.scenario.num_clusters)
    if not any(decision.selected):
        raise InfeasibleRound(1, decision.left_out)
    return decision


def check_slices(config: RunConfig, spec: ModelSpec, plans: Sequence[ClusterPlan]) -> None:
    """Refuse token slices of a model that has none, or of clusters that are no pipelines.

    Parameters
    ----------
    config : the run's
    spec : its model
    plans : of the first round: a plan file may have slices, too

    Raises
    ------
    ValueError
        Naming the key.
    """
    number = config.planner.token_slices
    planned = max((plan.token_slices for plan in plans), default=1)
    if number == 1 and planned == 1:
        return
    setting = f"planner.token-slices = {number}" if number != 1 else f"plan: token_slices = {planned}"
    if work_of(config) is not pipeline_work:
        raise ValueError(
            f"{setting}: expected a strategy whose clusters are pipelines, found strategy = {config.strategy!r}; leave "
            "token slices at 1"
        )
    # It knows the families, and with them torch.
    from client_pipeline.families.sliceable import check_token_slices

    check_token_slices(spec, setting)


def check_pace(config: RunConfig, decision: Decision) -> None:
    """Refuse paced devices that would take a step for a device that is gone.

    Raises
    ------
    ValueError
        If a step of the first round's plan would outlast a time limit.
    """
    if config.device_emulation == "none":
        return
    work = work_of(config)
    selected = [n for n, chosen in enumerate(decision.selected) if chosen]
    step_s = max(work(decision.instance, n, decision.plans[n]).pipeline_s for n in selected)
    limits = {"runtime.timeout": config.runtime.timeout, "decoder.step-timeout": config.decoder.step_timeout}
    key = min(limits, key=lambda name: limits[name])
    if config.time_scale * step_s >= limits[key]:
        raise ValueError(
            f"time-scale: {config.time_scale:g} lets a step of {step_s:.0f} s take {config.time_scale * step_s:.0f} s, "
            f"but {key} is {limits[key]:g} s; lower time-scale or raise {key}"
        )
