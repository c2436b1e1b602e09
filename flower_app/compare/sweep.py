"""``collapipe sweep``: every combination of some keys' values, each with several seeds; the best as a configuration.

Combinations are compared by ``selection.metric`` on the validation set. Runs are those of ``compare --train``: in one
simulation, one after the other, and those that have finished are taken as they are.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.table import Table

from client_pipeline import durable
from client_pipeline.counted import counted
from flower_app.compare.columns import four_digits
from flower_app.compare.trained import compare_training
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.sources import load_config
from flower_app.launch.launcher import Launcher
from flower_app.runs.run_directory import read_rounds, read_summary
from flower_app.training.early_stopping import LOWER_IS_BETTER

BEST, ROWS = "best.toml", "sweep.csv"
_OF_A_RUN = ("run-dir", "runs-dir", "resume")
_DRAWN_BY = ("seed", "scenario-seed")
_MOST = 1_000
"""Runs of a sweep."""


def combinations(config: str | None, sets: Sequence[str], over: Sequence[str], seeds: int) -> dict[str, RunConfig]:
    """Return the configurations of a sweep by name, such as ``optimizer.lr=0.001 lora.rank=8``.

    Parameters
    ----------
    config, sets : of :func:`~flower_app.config.sources.load_config`
    over : ``KEY=VALUE,VALUE,...``, or with ``|`` between values that have commas
    seeds : of each

    Raises
    ------
    ValueError
        For a pair without values, a key that comes twice, too many runs, or a configuration that is refused.
    """
    values: dict[str, list[str]] = {}
    for text in over:
        key, equals, listed = text.partition("=")
        found = [value.strip() for value in listed.split("|" if "|" in listed else ",")]
        if not equals or not all(found) or len(set(found)) < len(found):
            raise ValueError(f"--over: expected KEY=VALUE,VALUE,... of different values, found {text!r}")
        if key in values:
            raise ValueError(f"--over: {key} is named twice; give all its values at once")
        values[key] = found
    if not values:
        raise ValueError("sweep: expected --over KEY=VALUE,VALUE,... at least once, such as optimizer.lr=1e-3,3e-3")
    pairs = [[f"{key}={value}" for value in found] for key, found in values.items()]
    chosen = list(itertools.product(*pairs))
    if (runs := len(chosen) * seeds) > _MOST:
        raise ValueError(f"sweep: expected at most {_MOST:,} runs, found {runs:,}; give fewer values or --seeds")
    return {" ".join(combination): load_config(config, [*sets, *combination]) for combination in chosen}


def sweep(
    configs: Mapping[str, RunConfig],
    seeds: int,
    out: Path,
    say: Callable[[str], None],
    launcher: Launcher | None = None,
) -> dict[str, Any]:
    """Train each configuration with each seed, and write ``sweep.csv`` and ``best.toml``.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained.
    RunFailed
        If a run fails; the message names it and its logs.
    """
    compared = compare_training(configs, seeds, out, say, launcher)
    metric = next(iter(configs.values())).selection.metric
    rows = [
        {"name": name, "metric": metric, **_figures(metric, [Path(folder) for folder in runs["folders"]])}
        for name, runs in zip(configs, compared["runs"], strict=True)
    ]
    known = [row for row in rows if row["validation"] is not None]
    if not known:
        raise ValueError(
            f"sweep: no run has a validation score {metric}; set evaluate-every above 0, or selection.metric to one of "
            "the task's; where all have diverged, lower the rates"
        )
    # A combination that diverged with one seed is no better for the others.
    fewest = min(row["unscored"] for row in known)
    sound = [row for row in known if row["unscored"] == fewest]
    best = (min if metric in LOWER_IS_BETTER else max)(sound, key=lambda row: row["validation"])
    flat = {key: value for key, value in configs[best["name"]].to_flat().items() if key not in _OF_A_RUN}
    durable.write_text(out / BEST, tomli_w.dumps(nested(flat)))
    with (out / ROWS).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "seed", f"validation {metric}", f"test {metric}", "wall_s"])
        for row in rows:
            writer.writerows([row["name"], *values] for values in row["runs"])
    edges = _edges(configs, best["name"])
    return {
        "metric": metric,
        "seeds": seeds,
        "rows": rows,
        "best": best["name"],
        "edges": edges,
        "config": str(out / BEST),
    }


def _edges(configs: Mapping[str, RunConfig], best: str) -> list[str]:
    """Return a sentence for each number of the best configuration that is the lowest or highest of those tried."""
    tried, edges = [config.to_flat() for config in configs.values()], []
    for key, value in configs[best].to_flat().items():
        values = [flat[key] for flat in tried]
        numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
        if key in _DRAWN_BY or len(numbers) < len(values) or min(numbers) == max(numbers):
            continue
        for edge, word in ((min(numbers), "lowest"), (max(numbers), "highest")):
            # Nothing lies below 0.
            if value == edge and (edge > 0 or word == "highest"):
                edges.append(f"{key} = {edge:g} is the {word} that was tried; the best may lie beyond")
    return edges


def _figures(metric: str, folders: Sequence[Path]) -> dict[str, Any]:
    runs = []
    for number, folder in enumerate(folders):
        summary = read_summary(folder) or {}
        scores = {r["round"]: r["metrics"][metric] for r in read_rounds(folder)[0] if metric in (r["metrics"] or {})}
        validation = scores.get(summary.get("scored_round"), next(reversed(scores.values()), None))
        runs.append([number, validation, summary.get("metrics", {}).get(metric), summary.get("wall_s")])
    of_validation, of_test = ([run[i] for run in runs if run[i] is not None] for i in (1, 2))
    return {
        "validation": statistics.fmean(of_validation) if of_validation else None,
        "validation_deviation": statistics.stdev(of_validation) if len(of_validation) > 1 else None,
        "test": statistics.fmean(of_test) if of_test else None,
        "test_deviation": statistics.stdev(of_test) if len(of_test) > 1 else None,
        "unscored": len(runs) - len(of_validation),
        "runs": runs,
    }


def sweep_table(found: Mapping[str, Any]) -> Table:
    """Return a row for each combination: means and standard deviations over the seeds."""
    best = f"best: {found['best']}; as a configuration: {found['config']}"
    diverged = [
        f"{row['name']}: {counted(row['unscored'], 'seed')} of {found['seeds']} without a score"
        for row in found["rows"]
        if row["unscored"]
    ]
    table = Table(box=None, caption="\n".join([best, *found["edges"], *diverged]))
    for column in ("", f"validation {found['metric']}", "±", f"test {found['metric']}", "±"):
        table.add_column(column, justify="right" if column else "left")
    for row in found["rows"]:
        keys = ("validation", "validation_deviation", "test", "test_deviation")
        mark = " *" if row["name"] == found["best"] else ""
        table.add_row(row["name"] + mark, *(four_digits(row[key]) for key in keys))
    return table
