"""``collapipe plan``, ``schedule``, ``compare`` and ``reproduce``."""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flower_app.cli.options import Config, ExitCode, Json, Sets
from flower_app.console import print_json, say

if TYPE_CHECKING:
    from client_pipeline.system.scenario import Scenario
    from strategies.planning.policy import RoundPolicy


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (plan, schedule, compare):
        app.command()(command)
    app.command("reproduce")(reproduce_command)


def schedule(
    segments: Annotated[int, typer.Option(help="S, the segments of the pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="m, the micro-batches of a batch.")] = 6,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b or zb-h1.")] = "gpipe",
    token_slices: Annotated[int, typer.Option(help="Slices of each micro-batch, numbered on.")] = 1,
) -> None:
    """Print a pipeline's timetable: one row a stage, one column a time unit."""
    from client_pipeline.runtime.schedules import timetable

    if min(segments, micro_batches, token_slices) < 1:
        raise ValueError(
            f"--segments, --micro-batches and --token-slices: expected at least 1, found {segments}, {micro_batches} "
            f"and {token_slices}"
        )
    typer.echo(timetable(schedule, segments, micro_batches, token_slices))


def plan(
    instance: Annotated[str, typer.Option(help="One round's problem (collapipe-instance/1); - reads it.")] = "",
    scenario: Annotated[str, typer.Option(help="A packaged scenario's name, or a TOML file.")] = "",
    planner: Annotated[str, typer.Option(help="dssda, dssda-paper, another policy, or module:Class.")] = "dssda",
    problem: Annotated[str, typer.Option(help="round, or segments: each cluster by itself, no radio.")] = "round",
    rounds: Annotated[int, typer.Option(help="T, with a scenario: the queues evolve.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's own.")] = None,
    segments: Annotated[str, typer.Option(help="uniform or optimal, for random, loss-only, delay-only.")] = "uniform",
    plan_file: Annotated[str, typer.Option("--plan", help="A plan file, for the planner fixed.")] = "",
    drift: Annotated[str, typer.Option(help="true; for dssda-paper printed (32) or mixed.")] = "true",
    c11: Annotated[bool, typer.Option("--c11", help="dssda-paper: hold the bound in every round.")] = False,
    power_control: Annotated[str, typer.Option(help="exact; or sca: dssda's powers by convex programs.")] = "exact",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, zb-h1; or auto, the event simulator's choice.")] = "",
    token_slices: Annotated[int, typer.Option(help="Of causal models; 0: the event simulator's choice.")] = 1,
    lookahead: Annotated[int, typer.Option(help="Rounds that each of several rounds looks at, itself too.")] = 1,
    model: Annotated[str, typer.Option(help="Count the scenario's costs from this model: a folder or hub id.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a sample, with --model.")] = 128,
    write_plan: Annotated[Path | None, typer.Option(help="Write the (last round's) plan for collapipe run.")] = None,
    as_json: Json = False,
) -> None:
    """Plan rounds without training: segments, micro-batches, channels and powers; exit 3 if that is infeasible."""
    from flower_app.planning.plan import PlanRequest, make_plan

    request = PlanRequest(
        instance=instance,
        scenario=scenario,
        planner=planner,
        problem=problem,
        rounds=rounds,
        seed=seed,
        segments=segments,
        plan_file=plan_file,
        drift=drift,
        c11=c11,
        power_control=power_control,
        model=model,
        length=length,
        write_plan=write_plan,
        schedule=schedule,
        token_slices=token_slices,
        lookahead=lookahead,
    )
    planned = make_plan(request, None if as_json else typer.echo)
    if as_json:
        print_json(planned.document)
    raise typer.Exit(0 if planned.feasible else ExitCode.INFEASIBLE)


def reproduce_command(
    name: Annotated[
        str,
        typer.Argument(
            help="fig4 to fig11, fig6-tuned, table3, theorem1, gamma, robustness, drift, queues or tuned; "
            "all: those that only plan."
        ),
    ],
    smoke: Annotated[bool, typer.Option("--smoke", help="Small enough for a quick check.")] = False,
    out: Annotated[Path, typer.Option(help="Gets a folder of rows, picture and findings for each.")] = Path("results"),
    plot: Annotated[bool, typer.Option("--plot", help="Draw what is in --out; run nothing.")] = False,
    curves: Annotated[Path | None, typer.Option(help="Folder of curves instead of the packaged configs/paper.")] = None,
    only: Annotated[str, typer.Option(help="Curves whose name contains this; results of the others stay.")] = "",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Repeat a figure of the paper, with the published numbers beside ours."""
    from flower_app.experiments.reproduce import ReproduceOptions, reproduce
    from flower_app.experiments.results import markdown

    options = ReproduceOptions(out=out, smoke=smoke, plot_only=plot, curves=curves, sets=sets or (), only=only)
    findings_by_name = reproduce(name, options, say)
    if as_json:
        print_json({key: [vars(finding) for finding in findings] for key, findings in findings_by_name.items()})
    else:
        for key, findings in findings_by_name.items():
            typer.echo(f"\n{key}\n\n{markdown(findings)}")


def compare(
    scenario: Annotated[str, typer.Option(help="A packaged scenario's name, or a TOML file.")] = "",
    policies: Annotated[str, typer.Option(help="Policies, with commas; random+optimal has optimal segments.")] = "",
    strategies: Annotated[str, typer.Option(help="With --train: strategies beside collapipe, with commas.")] = "",
    rounds: Annotated[
        int | None, typer.Option(help="T of each seed; 80, or with --train the configuration's.", show_default=False)
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Networks: 4, or with --train 1 with its own model and data order.", show_default=False),
    ] = None,
    plan_file: Annotated[str, typer.Option("--plan", help="A plan file, for the policy fixed.")] = "",
    front: Annotated[
        Path | None, typer.Option(help="A picture (.png, .svg): time against energy as joules become dearer.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Train for real; otherwise planning alone.")] = False,
    config: Config = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="With --train: folder of runs, table and curves.")] = Path("compare"),
    as_json: Json = False,
) -> None:
    """Compare policies on planning alone, or policies and strategies by training the same experiment with each."""
    if train and front:
        raise ValueError("compare: --front is for planning alone; drop --train")
    if train:
        counts = (rounds, 1 if seeds is None else seeds)
        _compare_training(config, sets, scenario, policies, strategies, counts, plan_file, out, as_json)
    elif config or sets or strategies:
        raise ValueError("compare: --config, --set and --strategies need --train")
    else:
        counts = (80 if rounds is None else rounds, 4 if seeds is None else seeds)
        _compare_planning(scenario, policies, counts, plan_file, front, as_json)


def _compare_training(
    config: str | None,
    sets: list[str] | None,
    scenario: str,
    policies: str,
    strategies: str,
    counts: tuple[int | None, int],
    plan_file: str,
    out: Path,
    as_json: bool,
) -> None:
    from flower_app.compare.trained import compare_training, contenders, training_table
    from flower_app.config.sources import load_config
    from flower_app.plain_console import PlainConsole

    rounds, seeds = counts
    pairs = [f"scenario={scenario}"] * bool(scenario) + [f"num-rounds={rounds}"] * (rounds is not None)
    base = load_config(config, [*(sets or ()), *pairs])
    comparison = compare_training(contenders(base, policies, strategies, plan_file), seeds, out, say)
    if as_json:
        print_json(comparison)
    else:
        PlainConsole(width=180).print(training_table(comparison))


def _compare_planning(
    scenario: str, policies: str, counts: tuple[int, int], plan_file: str, front: Path | None, as_json: bool
) -> None:
    from client_pipeline.system.scenario import load_scenario
    from flower_app.compare.planned import compare_policies, figures_table, named_policies
    from flower_app.plain_console import PlainConsole

    if not scenario or not policies:
        raise ValueError(
            "compare: expected --scenario and --policies; with --train a configuration decides the scenario"
        )
    rounds, seeds = counts
    if rounds < 1 or seeds < 1:
        raise ValueError(f"--rounds and --seeds: expected at least 1, found {rounds} and {seeds}")
    makers = named_policies(policies, plan_file)
    first = load_scenario(scenario)
    networks = [first, *(load_scenario(scenario, first.seed + i) for i in range(1, seeds))]
    if front is not None:
        _compare_front(networks, makers, rounds, front, as_json)
        return
    figures = compare_policies(networks, makers, rounds, say)
    if as_json:
        print_json({"policies": [f.to_dict() for f in figures]})
    else:
        PlainConsole(width=160).print(figures_table(figures))


def _compare_front(
    networks: Sequence[Scenario],
    makers: Sequence[Callable[[int], RoundPolicy]],
    rounds: int,
    picture: Path,
    as_json: bool,
) -> None:
    from flower_app.compare.front import check_picture, draw_front, energy_front, front_document, front_table
    from flower_app.plain_console import PlainConsole

    check_picture(picture)
    points = energy_front(networks, makers, rounds, say)
    draw_front(points, picture)
    if as_json:
        print_json({"front": front_document(points), "picture": str(picture)})
    else:
        PlainConsole(width=160).print(front_table(points))
