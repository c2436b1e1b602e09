"""``collapipe board``: methods on tasks, several seeds, and three questions about each: a table, a page, and rows.

What is scored best within a budget of bytes, virtual seconds or joules; what a score costs; and what is left of it
under conditions such as lost devices. Runs are those of ``compare --train``: those that have finished are taken as they
are, so that a board may be made in parts.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from client_pipeline import durable
from client_pipeline.documents import toml_table
from client_pipeline.near_names import did_you_mean
from flower_app.compare.columns import four_digits
from flower_app.compare.paired_interval import PairedInterval, paired_interval
from flower_app.compare.sweep import sweep
from flower_app.compare.trained import compare_training
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import absolute, find_config, merged_config, read_config, read_sets
from flower_app.launch.launcher import Launcher
from flower_app.runs.run_directory import read_rounds, read_summary
from flower_app.training.early_stopping import LOWER_IS_BETTER
from strategies.registry import traits_by_name

DOCUMENT, ROWS, TABLE = "board.json", "rows.jsonl", "rows.csv"
COSTS = ("bytes", "seconds", "joules")
"""What a run spends: bytes of messages and of the server's streams, virtual seconds, modelled joules."""
_TUNING_SEED = 1_000
"""Seeds of the runs that choose a method's settings are so much higher: no run is scored by what chose it."""


@dataclass(frozen=True)
class BoardTask:
    """A task of a board."""

    config: str | None
    metric: str
    set: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes for a method on this task alone."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """By the names of :data:`COSTS`."""
    target: float | None = None
    """Score whose cost is asked for."""


@dataclass(frozen=True)
class Board:
    """A board as its file describes it. Changes of configurations are nested or flat keys."""

    tasks: Mapping[str, BoardTask]
    methods: Mapping[str, Mapping[str, Any]]
    reference: str
    """Method that the others are compared with."""
    seeds: int = 3
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of keys that each method's are chosen from on each task, by validation."""


def read_board(path: Path) -> Board:
    """Read a board from its TOML file.

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    FileNotFoundError
        If there is no such file.
    """
    try:
        raw = toml_table(path.read_text(encoding="utf-8"))
        return _board(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_board(board: Board, folder: Path, sets: Sequence[str] = ()) -> None:
    """Refuse a board with a configuration that cannot run.

    Parameters
    ----------
    board : as it was read
    folder : that its paths are seen from
    sets : pairs ``key=value`` that win over all of it
    """
    chosen_by = {f"conditions.{name}": read_sets(changes) for name, changes in board.conditions.items()}
    for table, keys in {"tune": board.tune, **chosen_by}.items():
        if both := read_sets(sets).keys() & keys.keys():
            raise ValueError(f"--set: {min(both)} is chosen by [{table}]; leave it out of one of them")
    for task, method, changes in product(board.tasks, board.methods, ({}, *board.conditions.values())):
        _check_evaluated(board.tasks[task], task, config_of(board, task, method, changes, folder, sets))
    for task, method, values in product(board.tasks, board.methods, _combinations(board)):
        config_of(board, task, method, values, folder, sets)


def run_board(
    board: Board,
    folder: Path,
    out: Path,
    say: Callable[[str], None],
    sets: Sequence[str] = (),
    launcher: Launcher | None = None,
) -> dict[str, Any]:
    """Choose each method's settings, train all runs, and write ``board.json``, ``rows.jsonl`` and ``rows.csv``.

    Returns
    -------
    ``reference``, ``seeds``, ``rows`` (one a run), ``scores`` (one for each task and method, with its difference from
    the reference) and ``said``: in words, where the reference is behind first.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained.
    RunFailed
        If a run fails; the message names it and its logs.
    """
    # A mistake in the last task is found before the first one trains.
    check_board(board, folder, sets)
    rows: list[dict[str, Any]] = []
    edges: list[str] = []
    for task in board.tasks:
        chosen = {}
        for method in board.methods:
            chosen[method], at_edges = _tuned(board, task, method, folder, out, say, sets, launcher)
            edges += [f"{task}, {method}: {edge}." for edge in at_edges]
        configs, places = {}, {}
        for method in board.methods:
            for condition, changes in {"": {}, **board.conditions}.items():
                name = f"{method}.{condition}".strip(".")
                configs[name] = config_of(board, task, method, {**changes, **chosen[method]}, folder, sets)
                places[name] = method, condition
        compared = compare_training(configs, board.seeds, out / task, say, launcher)
        for figures in compared["runs"]:
            method, condition = places[figures["name"]]
            for seed, run in enumerate(map(Path, figures["folders"])):
                place = {"task": task, "method": method, "condition": condition, "seed": seed}
                rows.append(place | {"chosen": chosen[method]} | run_figures(run, board.tasks[task]))
    scores = board_scores(board, rows)
    said = [*_said(scores), *edges]
    document = {"reference": board.reference, "seeds": board.seeds, "said": said, "scores": scores, "rows": rows}
    durable.write_text(out / DOCUMENT, json.dumps(document, indent=1))
    durable.write_text(out / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    with (out / TABLE).open("w", newline="", encoding="utf-8") as file:
        flat_rows = [dict(_flat(row)) for row in rows]
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat_rows for key in row)))
        writer.writeheader()
        writer.writerows(flat_rows)
    return document


class _Point(NamedTuple):
    """A run after an evaluation."""

    round: int
    score: float
    spent: Mapping[str, float]
    """Sums up to it, by the names of :data:`COSTS`."""


def run_figures(run_dir: Path, task: BoardTask) -> dict[str, Any]:
    """Return the figures of one run: its test score, what it spent, and what the task asks of its evaluations.

    Returns
    -------
    ``test``; ``bytes``, ``seconds`` and ``joules`` of all rounds; ``memory_bytes``, the most that a device needs;
    ``within``: for each budget the best validation score until it was spent, None if there was none; ``until``: what
    was spent, and the round, when the target was first reached, None if it never was; ``curve``: each evaluation's
    round, validation score and spending.
    """
    metric, records = task.metric, read_rounds(run_dir)[0]
    spent = {name: list(accumulate(_spent(record)[name] for record in records)) for name in COSTS}
    points = [
        _Point(record["round"], record["metrics"][metric], {name: spent[name][i] for name in COSTS})
        for i, record in enumerate(records)
        # Of a model that has diverged the score is null.
        if (record["metrics"] or {}).get(metric) is not None
    ]
    best = min if metric in LOWER_IS_BETTER else max
    within = {
        name: best((p.score for p in points if p.spent[name] <= most), default=None)
        for name, most in task.budget.items()
    }
    reached = [p for p in points if task.target is not None and _reaches(p.score, task.target, metric)]
    needs = [c["device_memory_bytes"] for record in records for c in record["virtual"]["clusters"] if c.get("selected")]
    summary = read_summary(run_dir) or {}
    return {
        "test": (summary.get("metrics") or {}).get(metric),
        **{name: values[-1] for name, values in spent.items()},
        "memory_bytes": max(max(each) for each in needs),
        "wall_s": summary.get("wall_s"),
        "within": within,
        "until": {**reached[0].spent, "round": reached[0].round} if reached else None,
        "curve": [[p.round, p.score, *p.spent.values()] for p in points],
    }


def _spent(record: Mapping[str, Any]) -> dict[str, float]:
    streams = [report.get("stream_bytes") or {} for report in record["clusters"]]
    messages = record["bytes_up"] + record["bytes_down"] + record.get("setup_bytes", 0)
    return {
        "bytes": messages + sum(sum(stream.values()) for stream in streams),
        "seconds": record["virtual"]["latency_s"] or 0.0,
        "joules": record["virtual"]["energy_j"] or 0.0,
    }


def _reaches(score: float, target: float, metric: str) -> bool:
    return score <= target if metric in LOWER_IS_BETTER else score >= target


def config_of(
    board: Board, task: str, method: str, changes: Mapping[str, Any], folder: Path, sets: Sequence[str]
) -> RunConfig:
    """Return a run's configuration: the task's, then the method's, then that of both, then ``changes`` and ``sets``."""
    keys, name = absolute(_keys(board, task, method) | read_sets(changes), folder), board.tasks[task].config
    if name is not None:
        path = find_config(str(folder / name) if (folder / name).is_file() else name)
        keys = absolute(read_config(path), path.parent) | keys
    try:
        return merged_config(keys, folder, sets)
    except ValueError as error:
        raise ValueError(f"{task}, {method}: {error}") from error


def _keys(board: Board, task: str, method: str) -> dict[str, Any]:
    of_task = board.tasks[task]
    layers = (of_task.set, board.methods[method], of_task.methods.get(method, {}))
    return {key: value for layer in layers for key, value in read_sets(layer).items()}


def _combinations(board: Board) -> list[dict[str, Any]]:
    """Return all combinations of the values to tune; none where nothing is tuned."""
    chosen = product(*board.tune.values()) if board.tune else ()
    return [dict(zip(board.tune, values, strict=True)) for values in chosen]


def _check_evaluated(task: BoardTask, name: str, config: RunConfig) -> None:
    if (task.budget or task.target is not None) and not config.evaluate_every:
        raise ValueError(
            f"{name}: budget and target are looked up in the evaluations, found evaluate-every = 0; set it above 0"
        )
    from flower_app.tasks.base import task as task_of

    scores = task_of(config.task).scores
    if task.metric not in scores:
        raise ValueError(f"tasks.{name}.metric: expected one of {', '.join(scores)}, found {task.metric!r}")


def _tuned(
    board: Board,
    task: str,
    method: str,
    folder: Path,
    out: Path,
    say: Callable[[str], None],
    sets: Sequence[str],
    launcher: Launcher | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the values that are the method's best on the task by validation, and which of them lie at an edge."""
    if not board.tune:
        return {}, []
    names = {" ".join(f"{key}={value}" for key, value in values.items()): values for values in _combinations(board)}

    def tried(values: Mapping[str, Any]) -> RunConfig:
        config = config_of(board, task, method, values, folder, sets)
        return replace(
            config,
            seed=config.seed + _TUNING_SEED,
            evaluate_every=config.evaluate_every or config.num_rounds,
            selection=replace(config.selection, metric=board.tasks[task].metric),
        )

    configs = {name: tried(values) for name, values in names.items()}
    say(f"{task}, {method}: chooses among {len(configs)}")
    found = sweep(configs, 1, out / "tuning" / task / method, say, launcher)
    return names[found["best"]], found["edges"]


def board_scores(board: Board, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each task and method the means over the seeds, and its paired differences from the reference."""
    scores = []
    for task, of_task in board.tasks.items():
        sign = -1.0 if of_task.metric in LOWER_IS_BETTER else 1.0
        plain = {
            method: [r for r in rows if (r["task"], r["method"], r["condition"]) == (task, method, "")]
            for method in board.methods
        }
        for method, own in plain.items():
            score: dict[str, Any] = {"task": task, "metric": of_task.metric, "method": method}
            strategy = _keys(board, task, method).get("strategy", RunConfig().strategy)
            score["waives"] = list(traits_by_name(strategy).waives)
            score["test"], score["deviation"] = _mean_and_deviation([r["test"] for r in own])
            difference = paired_interval(_tests(own), _tests(plain[board.reference]))
            known = {name: value if math.isfinite(value) else None for name, value in difference._asdict().items()}
            score["against_reference"] = None if method == board.reference else known
            # Of seeds that have diverged nothing is told.
            score["better"] = _sign(difference, sign) if difference.num_pairs == board.seeds else 0
            for name in (*COSTS, "memory_bytes"):
                score[name] = _mean_and_deviation([r[name] for r in own])[0]
            score["within"] = {
                name: _mean_and_deviation([r["within"][name] for r in own])[0] for name in of_task.budget
            }
            until = [r["until"] for r in own]
            score["target"] = of_task.target
            score["reached"] = sum(each is not None for each in until)
            score["until"] = (
                {name: float(np.mean([each[name] for each in until])) for name in COSTS} if all(until) else None
            )
            score["under"] = {
                condition: _mean_and_deviation(
                    [r["test"] for r in rows if (r["task"], r["method"], r["condition"]) == (task, method, condition)]
                )[0]
                for condition in board.conditions
            }
            scores.append(score)
    return scores


def _tests(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {row["seed"]: row["test"] for row in rows if row["test"] is not None}


def _mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return both, None where a value is missing: a mean of fewer seeds is another figure."""
    if not values or any(value is None or not math.isfinite(value) for value in values):
        return None, None
    known = np.array(values, dtype=np.float64)
    return float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else None


def _sign(difference: PairedInterval, sign: float) -> int:
    """Return 1 where a method is better than the reference, -1 where it is worse, 0 where the seeds do not tell."""
    return int(np.sign(sign * difference.mean)) if difference.leaves_out_zero else 0


def _said(scores: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each task and outcome, where the reference is behind first."""
    lines = {-1: [], 0: [], 1: []}  # type: dict[int, list[str]]
    for task in dict.fromkeys(score["task"] for score in scores):
        others = [s for s in scores if s["task"] == task and s["against_reference"] is not None]
        [reference] = [s["method"] for s in scores if s["task"] == task and s["against_reference"] is None]
        for better, words in ((1, "is behind"), (0, "cannot be told from"), (-1, "is ahead of")):
            named = [f"{s['method']} ({_interval(s)})" for s in others if s["better"] == better]
            if named:
                lines[-better].append(f"{task}: {reference} {words} {', '.join(named)} in {others[0]['metric']}.")
    return [*lines[-1], *lines[0], *lines[1]]


def _interval(score: Mapping[str, Any]) -> str:
    difference = score["against_reference"]
    mean, low, high = (difference[name] for name in ("mean", "low", "high"))
    if mean is None:
        return "no seed that both have"
    if low is None:
        return f"{mean:+.3g} with one seed"
    lost = "" if score["test"] is not None else f" of the {difference['num_pairs']} seeds that both have"
    return f"{mean:+.3g}, {low:+.3g} to {high:+.3g}{lost}"


def board_cells(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of the board's table; columns that no task fills are left out."""
    budgets = [name for name in COSTS if any(name in score["within"] for score in document["scores"])]
    conditions = list(dict.fromkeys(name for score in document["scores"] for name in score["under"]))
    asks_cost = any(score["target"] is not None for score in document["scores"])
    titles = ["task", "method", "test", "±", "against the reference", *(f"best within {name}" for name in budgets)]
    titles += ["target", "seeds that reach it", "MB until then", "s until then", "J until then"] * asks_cost
    titles += [f"under {name}" for name in conditions] + ["MB", "virtual s", "kJ", "GB of a device", "waives"]
    rows = []
    for score in document["scores"]:
        row = [
            f"{score['task']} ({score['metric']})",
            score["method"],
            *map(four_digits, (score["test"], score["deviation"])),
        ]
        row.append(_interval(score) if score["against_reference"] else "")
        row += [four_digits(score["within"].get(name)) for name in budgets]
        if asks_cost:
            until = score["until"] or dict.fromkeys(COSTS)
            row += [four_digits(score["target"]), f"{score['reached']} of {document['seeds']}"]
            row += [_of(until["bytes"], 1e6), _of(until["seconds"], 1.0), _of(until["joules"], 1.0)]
        row += [four_digits(score["under"].get(name)) for name in conditions]
        units = (("bytes", 1e6), ("seconds", 1.0), ("joules", 1e3), ("memory_bytes", 1e9))
        rows.append([*row, *(_of(score[name], unit) for name, unit in units), " ".join(score["waives"])])
    return titles, rows


def _of(value: float | None, unit: float) -> str:
    return "-" if value is None else four_digits(value / unit)


def _flat(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return a row of plain values; a curve has no place in a table."""
    cells: list[tuple[str, Any]] = []
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells += _flat(value, f"{prefix}{key}.")
        elif key != "curve" and value is not None:
            cells.append((prefix + key, value))
    return cells


def _board(raw: Mapping[str, Any]) -> Board:
    _check_keys(raw, "", ("tasks", "methods", "reference", "seeds", "conditions", "tune"))
    methods, tasks = _tables(raw, "methods"), _tables(raw, "tasks")
    if len(methods) < 2 or not tasks:
        raise ValueError("expected tables [methods.NAME] of two methods or more, and [tasks.NAME]; write them")
    reference = raw.get("reference", next(iter(methods)))
    if not isinstance(reference, str) or reference not in methods:
        raise ValueError(f"reference: expected one of {', '.join(methods)}, found {reference!r}")
    seeds = raw.get("seeds", Board.seeds)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= 100:
        raise ValueError(f"seeds: expected a whole number from 1 to 100, found {seeds!r}")
    tune = raw.get("tune", {})
    if not isinstance(tune, Mapping) or not all(isinstance(v, list) and v for v in read_sets(tune).values()):
        raise ValueError('tune: expected lists of values, such as "optimizer.lr" = [1e-3, 3e-3]')
    for name in (*methods, *tasks, *_tables(raw, "conditions")):
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r}: expected a name of letters, digits, - and _, for the folders of its runs")
    for name, table in _tables(raw, "conditions").items():
        if both := read_sets(table).keys() & read_sets(tune).keys():
            raise ValueError(f"conditions.{name}: {min(both)} is chosen by [tune]; leave it out of one of them")
    return Board(
        tasks={name: _task(name, table, methods) for name, table in tasks.items()},
        methods=methods,
        reference=reference,
        seeds=seeds,
        conditions=_tables(raw, "conditions"),
        tune=read_sets(tune),
    )


def _task(name: str, table: Mapping[str, Any], methods: Mapping[str, Any]) -> BoardTask:
    where = f"tasks.{name}"
    _check_keys(table, f"{where}.", ("config", "metric", "set", "methods", "budget", "target"))
    for key, kind in (("config", str), ("metric", str)):
        if not isinstance(table.get(key, ""), kind):
            raise ValueError(f"{where}.{key}: expected a text, found {table[key]!r}")
    if not table.get("metric"):
        raise ValueError(f"{where}.metric: missing; name one of the task's, such as accuracy")
    own = _tables(table, "methods", f"{where}.")
    for method in own:
        if method not in methods:
            raise ValueError(f"{where}.methods.{method}: no such method{did_you_mean(method, methods)}")
    budget, changes = table.get("budget", {}), table.get("set", {})
    for key, value in (("budget", budget), ("set", changes)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}.{key}: expected a table, found {value!r}")
    _check_keys(budget, f"{where}.budget.", COSTS)
    for key, value in {**budget, "target": table.get("target", 0)}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{where}: {key}: expected a number, found {value!r}")
    return BoardTask(table.get("config"), table["metric"], changes, own, budget, table.get("target"))


def _tables(raw: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Mapping[str, Any]]:
    tables = raw.get(name, {})
    if not isinstance(tables, Mapping) or not all(isinstance(each, Mapping) for each in tables.values()):
        raise ValueError(f"{prefix}{name}: expected tables [{prefix}{name}.NAME], found {tables!r}")
    return tables


def _check_keys(table: Mapping[str, Any], prefix: str, known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{prefix}{key}: expected one of {', '.join(known)}{did_you_mean(key, known)}")
