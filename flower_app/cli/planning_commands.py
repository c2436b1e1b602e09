"""``collapipe plan``, ``quote``, ``schedule``, ``compare``, ``sweep``, ``board`` and ``reproduce``."""

# Heavy imports stay inside the commands: --help answers at once.

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flower_app.cli.options import AllowedModules, Config, ExitCode, Json, Sets
from flower_app.console import print_json, say

_MOST_CELLS = 10_000
"""Micro-batches of all stages in a timetable that is drawn."""
_MOST_SEEDS = 1_000
"""Networks of a comparison."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (plan, quote, schedule, compare, sweep, board):
        app.command()(command)
    passed_on = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("reproduce", context_settings=passed_on)(reproduce_command)


def schedule(
    segments: Annotated[int, typer.Option(help="S, the segments of the pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="m, the micro-batches of a batch.")] = 6,
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b or zb-h1.")] = "gpipe",
    token_slices: Annotated[int, typer.Option(help="Slices of each micro-batch, numbered on.")] = 1,
) -> None:
    """Print a pipeline's timetable: one row a stage, one column a time unit."""
    from client_pipeline.timetable.schedules import timetable

    if min(segments, micro_batches, token_slices) < 1:
        raise ValueError(
            f"--segments, --micro-batches and --token-slices: expected at least 1, found {segments}, {micro_batches} "
            f"and {token_slices}"
        )
    if (cells := segments * micro_batches * token_slices) > _MOST_CELLS:
        raise ValueError(
            f"--segments, --micro-batches and --token-slices: expected a product of at most {_MOST_CELLS:,}, "
            f"found {cells:,}; draw a smaller timetable"
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
    model: Annotated[str, typer.Option(help="Count the scenario's costs from this model: a folder or hub id.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a sample, with --model.")] = 128,
    write_plan: Annotated[Path | None, typer.Option(help="Write the (last round's) plan for collapipe run.")] = None,
    purpose: Annotated[str, typer.Option("--for", help="training, or serving: tokens a second.")] = "training",
    requests: Annotated[int, typer.Option(help="Requests at once, with --for serving.")] = 4,
    tokens: Annotated[int, typer.Option(help="Prompt and answer of a request, with --for serving.")] = 512,
    as_json: Json = False,
) -> None:
    """Plan rounds without training: segments, micro-batches, channels and powers; exit 3 if that is infeasible."""
    of_serving = ("purpose", "requests", "tokens")
    options = {name: value for name, value in locals().items() if name not in ("as_json", "of_serving", *of_serving)}
    from flower_app.planning.plan import PlanRequest, make_plan

    request, echo = PlanRequest(**options), None if as_json else typer.echo
    if purpose not in ("training", "serving"):
        raise ValueError(f"--for: expected training or serving, found {purpose!r}")
    if purpose == "serving":
        from flower_app.planning.serving import plan_serving

        planned = plan_serving(request, requests, tokens, echo)
    else:
        planned = make_plan(request, echo)
    if as_json:
        print_json(planned.document)
    raise typer.Exit(0 if planned.feasible else ExitCode.INFEASIBLE)


def quote(
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="device=0.4,memory-gb=2 or cluster=1,bandwidth-mhz=x2: a change of the network; repeatable."),
    ] = None,
    prices: Annotated[bool, typer.Option("--prices", help="Add what more memory, band or devices are worth.")] = False,
    after: Annotated[
        str,
        typer.Option(metavar="RUN", help="The rest of a run, by what it has measured; --set num-rounds=N adds rounds."),
    ] = "",
    config: Config = None,
    sets: Sets = None,
    allow_module: AllowedModules = None,
    as_json: Json = False,
) -> None:
    """Say what a run will take (seconds, joules, bytes, memory), what holds it up, and what a change would do."""
    from flower_app.compare.quote import boxes_table, quote as make_quote, quote_text, read_changes
    from flower_app.config.sources import load_config
    from flower_app.plain_console import PlainConsole

    if after:
        if config or what_if or prices:
            raise ValueError("--after: a run goes on as it began; leave out --config, --what-if and --prices")
        from flower_app.compare.measured_quote import measured_quote
        from flower_app.launch.single_run import continued_run

        run = continued_run(after, sets or (), allow_module or ())
        document = measured_quote(run.config, run.run_dir)
    else:
        base = load_config(config, sets or [])
        document = make_quote(base, read_changes(base, what_if or ()), prices)
    if as_json:
        print_json(document)
    else:
        PlainConsole(width=120).print(boxes_table(document))
        typer.echo(quote_text(document))


def reproduce_command(ctx: typer.Context) -> None:
    """Repeat a figure of the paper, with the published numbers beside ours; in a checkout of the source alone."""
    root = Path(__file__).parents[2]
    if not (root / "experiments" / "reproduce.py").is_file():
        raise ValueError(
            "reproduce: expected a checkout of the source, found an installed package; clone CollaPipe's repository or "
            "unpack its source archive (collapipe-VERSION.tar.gz), and give the command in an environment made there"
        )
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    # Replace this process: signals and exit code are then the experiment's.
    arguments = [sys.executable, "-m", "experiments.reproduce", *ctx.args]
    os.execve(sys.executable, arguments, os.environ | {"PYTHONPATH": path})


def compare(
    scenario: Annotated[
        str, typer.Option(help="A packaged scenario's name, or a TOML file; that of a run unless you say.")
    ] = "",
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
    if seeds is not None and seeds > _MOST_SEEDS:
        raise ValueError(f"--seeds: expected at most {_MOST_SEEDS:,}, found {seeds}; compare fewer networks")
    if train:
        from flower_app.compare.columns import legend
        from flower_app.compare.trained import compare_training, contenders, training_columns, training_table
        from flower_app.config.sources import load_config
        from flower_app.plain_console import PlainConsole

        pairs = [f"scenario={scenario}"] * bool(scenario) + [f"num-rounds={rounds}"] * (rounds is not None)
        base = load_config(config, [*(sets or ()), *pairs])
        comparison = compare_training(
            contenders(base, policies, strategies, plan_file), 1 if seeds is None else seeds, out, say
        )
        if as_json:
            print_json(comparison)
        else:
            PlainConsole(width=200).print(training_table(comparison))
            typer.echo(f"\n{legend(training_columns(comparison['metric']))}")
        return
    if config or sets or strategies:
        raise ValueError("compare: --config, --set and --strategies need --train")
    from client_pipeline.system.scenario import load_scenario
    from flower_app.compare.columns import legend
    from flower_app.compare.front import (
        FRONT_LEGEND,
        check_picture,
        draw_front,
        energy_front,
        front_document,
        front_table,
    )
    from flower_app.compare.planned import FIGURES_LEGEND, compare_policies, figures_table, named_policies
    from flower_app.config.run_config import RunConfig
    from flower_app.plain_console import PlainConsole

    if not policies:
        raise ValueError("compare: expected --policies, found none; name some, such as --policies dssda,uniform,random")
    scenario = scenario or RunConfig().scenario
    say(f"scenario: {scenario}")
    rounds, seeds = 80 if rounds is None else rounds, 4 if seeds is None else seeds
    if rounds < 1 or seeds < 1:
        raise ValueError(f"--rounds and --seeds: expected at least 1, found {rounds} and {seeds}")
    makers = named_policies(policies, plan_file)
    first = load_scenario(scenario)
    networks = [first, *(load_scenario(scenario, first.seed + i) for i in range(1, seeds))]
    if front is not None:
        check_picture(front)
        points = energy_front(networks, makers, rounds, say)
        draw_front(points, front)
        if as_json:
            print_json({"front": front_document(points), "picture": str(front)})
        else:
            PlainConsole(width=160).print(front_table(points))
            typer.echo(f"\n{legend(FRONT_LEGEND)}")
        return
    figures = compare_policies(networks, makers, rounds, say)
    if as_json:
        print_json({"policies": [f.to_dict() for f in figures]})
    else:
        PlainConsole(width=180).print(figures_table(figures))
        typer.echo(f"\n{legend(FIGURES_LEGEND)}")


def sweep(
    over: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE,VALUE,...; once for each key. | stands between values with commas."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each combination.")] = 1,
    config: Config = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs, sweep.csv and best.toml.")] = Path("sweep"),
    as_json: Json = False,
) -> None:
    """Train every combination of some keys' values, compare them on validation, and write the best configuration."""
    from flower_app.compare.sweep import combinations, sweep as run_sweep, sweep_table
    from flower_app.plain_console import PlainConsole

    found = run_sweep(combinations(config, sets or (), over or (), seeds), seeds, out, say)
    if as_json:
        print_json(found)
    else:
        PlainConsole(width=160).print(sweep_table(found))


def board(
    file: Annotated[Path, typer.Argument(help="A board in TOML: tasks, methods, seeds, conditions.", metavar="BOARD")],
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs, board.html, board.json and rows.")] = Path("board"),
    as_json: Json = False,
) -> None:
    """Train methods on tasks with several seeds: scores, their costs, what a budget buys and what conditions do."""
    from flower_app.compare.board import board_cells, read_board, run_board
    from flower_app.compare.board_page import write_page
    from flower_app.plain_console import PlainConsole

    if not file.is_file():
        raise FileNotFoundError(f"board: expected a TOML file with tasks and methods, found no {file}")
    document = run_board(read_board(file), file.resolve().parent, out.resolve(), say, sets or ())
    page = write_page(document, out)
    if as_json:
        print_json(document)
        return
    from rich.table import Table

    titles, rows = board_cells(document)
    table = Table(*titles, box=None)
    for row in rows:
        table.add_row(*row)
    PlainConsole(width=240).print(table)
    typer.echo("\n".join(["", *document["said"], f"page: {page}"]))
