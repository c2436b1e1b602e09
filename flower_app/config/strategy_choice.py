"""Strategies by name: CollaPipe, its baselines, Flower's own, and anybody's."""

from __future__ import annotations

from collections.abc import Callable

from flwr.serverapp.strategy import Strategy

from client_pipeline.system.scenario import Scenario
from flower_app.config.run_config import RunConfig
from strategies.aggregation.rules import build_aggregator
from strategies.aggregation.secagg import FEWEST_CLUSTERS
from strategies.baselines.pipeline import EvenPipelines, PipeLine
from strategies.baselines.stock import make_stock
from strategies.baselines.titanic import Titanic, titanic_policy
from strategies.baselines.vanilla_fl import VanillaFL, vanilla_fl_policy
from strategies.checkpoint import Checkpoint
from strategies.continued import check_resumable, check_unchanged, is_free
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.costs import Work, pipeline_work
from strategies.planning.planner import Decision, InfeasibleRound, RoundPlanner
from strategies.planning.policies import make_policy
from strategies.planning.policy import RoundPolicy

COLLAPIPE = "collapipe"
FREE_TO_CHANGE = ("resume", "run-dir", "runs-dir", "tensorboard", "decoder.", "runtime.actor-idle", "runtime.timeout")
"""Keys, and tables, that may be otherwise when a run goes on: places and patience, not numbers."""
BASELINES: dict[str, tuple[type[PlannedStrategy], Callable[[int], RoundPolicy]]] = {
    "vanilla-fl": (VanillaFL, vanilla_fl_policy),
    "pipeline": (PipeLine, lambda _: EvenPipelines()),
    "titanic": (Titanic, titanic_policy),
}
"""By name: the strategy, and its own policy from a seed."""


def make_planner(config: RunConfig, scenario: Scenario) -> RoundPlanner | None:
    """Return the planner of a run's strategy; None for a stock strategy, whose control units plan for themselves.

    Raises
    ------
    ValueError, FileNotFoundError
        For a name that is unknown, or a setting that the strategy does not take.
    """
    default = RunConfig()
    if config.strategy != COLLAPIPE and config.server_optimizer.name != "none":
        raise ValueError(
            f"server-optimizer.name: {config.server_optimizer.name} goes with strategy = collapipe, found "
            f'{config.strategy!r}; leave it out, or set strategy = "FedAdam" and the like for whole models'
        )
    if config.strategy == COLLAPIPE:
        make_aggregator(config, scenario)
    elif config.aggregator.name != "mean":
        raise ValueError(
            f"aggregator.name: {config.aggregator.name} goes with strategy = collapipe, found {config.strategy!r}; "
            'leave it out, or set strategy = "Krum" and the like for whole models'
        )
    paper = config.strategy == COLLAPIPE and config.policy == "dssda-paper" and not config.plan
    if not paper and (config.planner.drift != "true" or config.planner.c11):
        raise ValueError('planner.drift and planner.c11: they are of the paper as printed; set policy = "dssda-paper"')
    if config.strategy == COLLAPIPE:
        if config.strategy_arguments():
            raise ValueError(
                "strategy-options: collapipe takes none; leave it empty, its settings have keys of their own"
            )
        name = "fixed" if config.plan else config.policy
        policy = make_policy(name, plan_file=config.plan, seed=config.seed, c11=config.planner.c11)
        return RoundPlanner(scenario, policy, drift=config.planner.drift)
    if config.policy != default.policy:
        raise ValueError(
            f"policy: {config.strategy} brings its own plan, found policy = {config.policy!r}; leave policy out, or "
            'set strategy = "collapipe"'
        )
    if config.strategy not in BASELINES:
        if config.device_emulation != "none":
            raise ValueError(
                f"device-emulation: {config.strategy} sends no plan, so nobody knows the pace; use collapipe or "
                f"{', '.join(BASELINES)}"
            )
        make_stock(config.strategy, config.strategy_arguments(), scenario.num_clusters)
        return None
    if config.plan:
        raise ValueError(f"plan: {config.strategy} brings its own plan; leave plan empty")
    if config.strategy_arguments():
        raise ValueError(f"strategy-options: {config.strategy} takes none; leave it empty")
    return RoundPlanner(scenario, BASELINES[config.strategy][1](config.seed))


def make_aggregator(config: RunConfig, scenario: Scenario) -> Strategy:
    """Build what joins the encoders of ``collapipe``.

    Raises
    ------
    ValueError
        For settings that exclude each other, or too few clusters.
    """
    in_a_round = min(scenario.num_clusters, scenario.num_channels)
    if config.privacy.secure_aggregation and in_a_round < FEWEST_CLUSTERS:
        raise ValueError(
            f"privacy.secure-aggregation: expected at least {FEWEST_CLUSTERS} clusters in a round, found {in_a_round}: "
            "of fewer each could take its own update off the mean; use more clusters and channels"
        )
    return build_aggregator(config.aggregator, config.server_optimizer, config.privacy, num_clusters=in_a_round)


def work_of(config: RunConfig) -> Work:
    """What a step of a run's strategy takes on the devices."""
    return BASELINES[config.strategy][0].work if config.strategy in BASELINES else pipeline_work


def check_can_resume(config: RunConfig) -> None:
    """Refuse to go on with a strategy that keeps something from round to round that no checkpoint has.

    Raises
    ------
    ValueError
        Saying why, and what to do.
    """
    if config.strategy != COLLAPIPE and config.strategy not in BASELINES:
        check_resumable(config.strategy, config.strategy_arguments())


def check_same_run(config: RunConfig, found: Checkpoint) -> None:
    """Refuse to go on under another configuration.

    Raises
    ------
    ValueError
        Naming the keys that differ.
    """
    check_unchanged(found.state["config"], config.to_flat(), FREE_TO_CHANGE)


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
