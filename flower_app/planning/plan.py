"""``collapipe plan``: rounds planned without training, from an instance or a scenario."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from client_pipeline.durable import check_not_input
from client_pipeline.partition.plan import write_plans
from client_pipeline.system.channels import NetworkTrace
from client_pipeline.system.scenario import Scenario, load_scenario
from flower_app.plain_console import PlainConsole
from flower_app.planning.plan_report import MOST_CLUSTERS, print_answer, schedules_text, sizes_text
from strategies.dssda.answer import Answer
from strategies.dssda.instance import Instance
from strategies.dssda.instance_file import read_instance
from strategies.dssda.paper.power_control import (
    PowerControl,
    check_power_control,
    control_power,
    control_summary,
    control_text,
)
from strategies.dssda.queues import DRIFTS, Queues
from strategies.dssda.round_problem import per_round_bound, round_instance
from strategies.dssda.segments import solve_segments
from strategies.dssda.split_band import divided
from strategies.dssda.unequal_tebs import counted_tebs
from strategies.planning.dry_run import LossTrace, PlannedRound, plan_rounds
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.planning.policies import OPTIMAL, make_policy
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.ranked import RANKS, SEGMENTS
from strategies.planning.schedule_choice import ScheduledPolicy, schedule_rows, scheduled_plans, simulated_seconds

PLAN_PROBLEMS = ("round", "segments")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The command's options."""

    instance: str
    """A file, or ``-`` for standard input."""
    scenario: str
    planner: str
    problem: str
    rounds: int
    seed: int | None
    segments: str
    plan_file: str
    drift: str
    """``true`` or ``printed``."""
    c11: bool
    power_control: str
    """``exact`` or ``sca``."""
    model: str
    """Folder or hub id of the model that the scenario's costs are counted from; empty: the scenario's own costs."""
    length: int
    """Tokens of a sample of that model."""
    write_plan: Path | None
    schedule: str = ""
    """Schedule of the pipelines, or ``auto``; empty: as the policy's plans say."""
    token_slices: int = 1
    """Slices of each micro-batch; 0: the event simulator's choice; 1: as the policy's plans say."""

    def __post_init__(self) -> None:
        if bool(self.instance) == bool(self.scenario):
            raise ValueError("plan: expected either --instance or --scenario")
        if self.write_plan:
            inputs = [Path(name) for name in (self.instance, self.scenario, self.plan_file) if name]
            check_not_input("--write-plan", self.write_plan, *inputs)
        if self.problem not in PLAN_PROBLEMS:
            raise ValueError(f"--problem: expected one of {', '.join(PLAN_PROBLEMS)}, found {self.problem!r}")
        if self.segments not in SEGMENTS:
            raise ValueError(f"--segments: expected one of {', '.join(SEGMENTS)}, found {self.segments!r}")
        if self.rounds < 1 or (self.seed is not None and self.seed < 0):
            raise ValueError(
                f"--rounds and --seed: expected at least 1 and at least 0, found {self.rounds} and {self.seed}"
            )
        if self.rounds > 1 and (self.instance or self.problem == "segments"):
            raise ValueError("--rounds: an instance and --problem segments have one round; expected 1 with them")
        if self.model and not self.scenario:
            raise ValueError("--model replaces a scenario's costs; an instance has its own: use --scenario")
        if self.length < 1:
            raise ValueError(f"--length: expected at least 1 token, found {self.length}")
        if self.drift not in DRIFTS:
            raise ValueError(f"--drift: expected one of {', '.join(DRIFTS)}, found {self.drift!r}")
        if self.planner != "dssda-paper" and (self.drift != "true" or self.c11):
            raise ValueError("--drift printed and --c11 apply only to the paper as printed; add --planner dssda-paper")
        if self.instance and (self.drift != "true" or self.c11):
            raise ValueError("--drift and --c11 need a scenario: an instance has its weights, and no Gamma_max")
        check_power_control(self.power_control, "--power-control")
        if self.choices.any and self.problem == "segments":
            raise ValueError(
                "--schedule and --token-slices are for whole rounds: drop them, or drop --problem segments"
            )
        if self.power_control == "sca" and (self.problem == "segments" or self.planner not in ("dssda", "uniform")):
            raise ValueError(
                "--power-control sca is for the rounds of dssda and uniform: drop it, or choose one of them"
            )
        if self.problem == "segments" and (self.planner != "dssda" or self.write_plan):
            raise ValueError(
                "--problem segments is solved by dssda and has no channels: drop --planner and --write-plan"
            )

    @property
    def choices(self) -> PipelineChoices:
        """Return the schedules and slices that the pipelines may use."""
        return PipelineChoices.of(self.schedule, self.token_slices, "--")


@dataclass(frozen=True)
class Planned:
    """Result of a planning."""

    feasible: bool
    """All rounds were feasible."""
    document: dict[str, Any]
    """For ``--json``: an answer, or the rounds and their summary."""


def make_plan(request: PlanRequest, echo: Callable[[str], None] | None) -> Planned:
    """Carry out the command; ``echo`` prints text for people, None prints nothing.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming the file and the key at fault.
    """
    scenario = _scenario(request) if request.scenario else None
    if scenario is not None and request.rounds > 1:
        return _many_rounds(request, scenario, echo)
    round_ = _round(request, scenario)
    policy = _policy(request)
    obstacle = "" if policy.tells_tebs_apart else f"policy {policy.name} needs equal TEBs"
    instance, teb_costs = counted_tebs(round_.instance, obstacle)
    round_ = replace(round_, instance=instance)
    choices = request.choices
    planning_policy = ScheduledPolicy(policy, choices) if choices.any else policy
    answer = solve_segments(instance) if request.problem == "segments" else planning_policy.plan(round_)
    control: PowerControl | None = None
    if request.problem == "round":
        instance = divided(instance, answer)
    if request.power_control == "sca":
        answer, control = control_power(instance, answer)
    if echo:
        echo(_text(instance, answer, scenario.names if scenario is not None else ()))
        if teb_costs:
            echo(teb_costs)
        if control is not None:
            echo(control.text())
    feasible = answer.status != "infeasible"
    decided: dict[str, Any] = {"teb_costs": teb_costs} if teb_costs else {}
    if request.problem == "round" and feasible:
        # A policy may know more of a plan than its answer says: a plan file has orders and schedules.
        plans = policy.plans(round_, answer)
        if choices.any:
            plans = scheduled_plans(instance, answer, plans, choices, simulated_seconds(instance))
            decided |= {"schedules": schedule_rows(instance, answer, plans, slices=bool(choices.token_slices))}
            if echo:
                echo(schedules_text(decided["schedules"]))
        if request.write_plan:
            write_plans(request.write_plan, plans)
    if control is not None:
        decided["power_control"] = control.to_dict()
    return Planned(feasible, answer.to_dict() | decided)


def first_instance(request: PlanRequest) -> tuple[Scenario, Instance, Any]:
    """Return a scenario with the costs of a model, its first round's problem, and the model's specification."""
    from flower_app.verify import model_builder

    scenario = _scenario(request)
    return scenario, _round(request, scenario).instance, model_builder(request.model, seed=0)().spec


def _scenario(request: PlanRequest) -> Scenario:
    scenario = load_scenario(request.scenario, request.seed)
    if not request.model:
        return scenario
    # torch and transformers are needed for this alone.
    from client_pipeline.families.registry import family_named
    from client_pipeline.system.costs import model_costs
    from flower_app.verify import model_builder

    spec, planner = model_builder(request.model, seed=0)().spec, scenario.planner
    costs = model_costs(
        spec,
        sequence_length=request.length,
        batch_size=planner.batch_size,
        local_steps=planner.local_steps,
    )
    num_blocks = family_named(spec.family).num_blocks(spec)
    return replace(scenario, costs=costs, planner=replace(planner, num_blocks=num_blocks))


def _round(request: PlanRequest, scenario: Scenario | None) -> Round:
    if scenario is not None:
        queues = Queues.empty(scenario.num_clusters)
        return Round(
            number=1,
            instance=round_instance(scenario, NetworkTrace(scenario).round(1), queues, drift=request.drift),
            losses=LossTrace(scenario.num_clusters, scenario.seed).round(1),
            per_round=per_round_bound(scenario),
        )
    if request.instance == "-":
        instance = read_instance(sys.stdin.read(), "standard input")
    else:
        path = Path(request.instance)
        if not path.is_file():
            raise FileNotFoundError(f"--instance: no file {path}")
        instance = read_instance(path.read_text(encoding="utf-8"), str(path))
    losses = LossTrace(instance.num_clusters, request.seed or 0).round(1)
    return Round(number=1, instance=instance, losses=losses)


def _policy(request: PlanRequest) -> RoundPolicy:
    optimal = request.segments == "optimal" and request.planner in RANKS
    name = request.planner + (OPTIMAL if optimal else "")
    return make_policy(name, plan_file=request.plan_file, seed=request.seed or 0, c11=request.c11, drift=request.drift)


def _many_rounds(request: PlanRequest, scenario: Scenario, echo: Callable[[str], None] | None) -> Planned:
    planned_rounds = []
    for round_ in plan_rounds(
        scenario,
        _policy(request),
        request.rounds,
        drift=request.drift,
        power_control=request.power_control,
        schedule=request.schedule,
        token_slices=request.token_slices,
    ):
        planned_rounds.append(round_)
        if echo:
            echo(_line(round_))
    last = planned_rounds[-1]
    summary = _summary(planned_rounds, scenario.planner.threshold)
    if echo:
        echo("\n" + _text(last.instance, last.answer, scenario.names))
        echo(_summary_text(summary))
        if last.teb_costs:
            echo(last.teb_costs)
    feasible = all(r.answer.status != "infeasible" for r in planned_rounds)
    if request.write_plan and last.answer.status != "infeasible":
        write_plans(request.write_plan, last.plans)
    return Planned(feasible, {"rounds": [_round_document(r) for r in planned_rounds], "summary": summary})


def _round_document(r: PlannedRound) -> dict[str, Any]:
    control = r.power_control
    return {
        "round": r.number,
        **r.answer.to_dict(),
        "latency_event_s": None if np.isnan(r.latency_event_s) else r.latency_event_s,
        "energy_j": r.energy_j,
        "gamma": [float(g) for g in r.gamma],
        "queues": r.queues.to_dict(),
        "violations": r.violations,
        **({"power_control": control.to_dict()} if control is not None else {}),
        **({"teb_costs": r.teb_costs} if r.teb_costs else {}),
    }


def _summary(planned_rounds: list[PlannedRound], gamma_max: float) -> dict[str, Any]:
    """Means over all rounds, and how often each S was planned with which mean m (the paper's Fig. 5)."""
    choices = [c.choice for r in planned_rounds for c in r.answer.clusters if c.selected and c.choice]
    counts = Counter(c.num_segments for c in choices)
    sizes = {
        str(s): {
            "share": counts[s] / len(choices),
            "mean_m": float(np.mean([c.m for c in choices if c.num_segments == s])),
        }
        for s in sorted(counts)
    }
    planned = [r for r in planned_rounds if any(r.selected)]
    return {
        "latency_s": float(np.mean([r.latency_s for r in planned])) if planned else None,
        "latency_event_s": float(np.mean([r.latency_event_s for r in planned])) if planned else None,
        "gamma": float(np.mean([r.gamma for r in planned_rounds])),
        "gamma_max": gamma_max,
        "largest_gap": max((r.answer.gap for r in planned_rounds if r.answer.gap is not None), default=None),
        "segments": sizes,
        **control_summary([r.power_control.to_dict() for r in planned_rounds if r.power_control]),
    }


def _line(r: PlannedRound) -> str:
    clusters = r.answer.clusters
    sizes = " ".join(f"{c.choice.num_segments}x{c.choice.m}" if c.selected and c.choice else "-" for c in clusters)
    if len(clusters) > MOST_CLUSTERS:
        sizes = sizes_text(clusters)
    control = f"  {r.power_control.text()}" if r.power_control else ""
    return (
        f"round {r.number:>3}  latency {r.latency_s:7.1f} s  Γ {np.mean(r.gamma):.3f}  "
        f"Y {np.mean(r.queues.virtual):.3f}  S x m: {sizes}{control}"
    )


def _summary_text(summary: dict[str, Any]) -> str:
    lines = [f"Γ {summary['gamma']:.3f} on average, Γmax {summary['gamma_max']:g}"]
    if summary["latency_s"] is not None:
        latency, event = summary["latency_s"], summary["latency_event_s"]
        lines.append(f"round latency {latency:.1f} s by Eq. (15), {event:.1f} s event-simulated, on average")
    if "power_control" in summary:
        lines.append(control_text(summary["power_control"]))
    for size, figures in summary["segments"].items():
        lines.append(f"S = {size}: {figures['share']:.0%} of the plans, m {figures['mean_m']:.1f} on average")
    return "\n".join(lines)


def _text(instance: Instance, answer: Answer, names: Sequence[str]) -> str:
    buffer = io.StringIO()
    console = PlainConsole(file=buffer, width=120, force_terminal=sys.stdout.isatty())
    print_answer(console, instance, answer, names)
    return buffer.getvalue().rstrip()
