"""Strategies and policies beside each other, trained for real: the same data, seeds, networks and accounting."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from client_pipeline import durable
from flower_app.compare.columns import four_digits
from flower_app.compare.planned import shares_text
from flower_app.config.run_config import RunConfig
from flower_app.launch.launcher import Launcher
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.report.data import used_bytes
from flower_app.report.pictures import write_pictures
from flower_app.runs.run_directory import read_rounds, read_summary
from strategies.registry import COLLAPIPE

CURVES = ("round", "virtual_s", "bytes", "energy_j", "train_loss", "metric")
"""Columns of ``curves.csv`` after name and seed; bytes, seconds and joules are sums up to the round."""
_AXES = (
    ("round", 2, 1.0),
    ("virtual time [h]", 3, 3600.0),
    ("Flower messages [MB]", 4, 1e6),
    ("modelled energy [kJ]", 5, 1e3),
)
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osv^Dx*+P<>"


def contenders(base: RunConfig, policies: str, strategies: str, plan_file: str = "") -> dict[str, RunConfig]:
    """The configurations to compare, by name.

    Raises
    ------
    ValueError
        If there is none, or a name comes twice.
    """
    configs: dict[str, RunConfig] = {}
    listed = [(name, True) for name in policies.split(",")] + [(name, False) for name in strategies.split(",")]
    for name, is_policy in ((name.strip(), is_policy) for name, is_policy in listed):
        if not name:
            continue
        if name in configs:
            raise ValueError(f"compare: {name} is named twice; expected each policy and strategy once")
        if is_policy:
            plan = plan_file if name == "fixed" else ""
            configs[name] = replace(base, strategy=COLLAPIPE, policy=name, plan=plan)
        else:
            configs[name] = replace(base, strategy=name, policy=RunConfig().policy, plan="")
    if not configs:
        raise ValueError("compare: nothing to compare; name --policies, --strategies or both")
    return configs


def compare_training(
    configs: Mapping[str, RunConfig],
    num_seeds: int,
    out: Path,
    say: Callable[[str], None],
    launcher: Launcher | None = None,
) -> dict[str, Any]:
    """Train every contender with every seed, and write ``compare.json``, ``curves.csv`` and ``curves.png``.

    A run that has finished in ``out`` with the same configuration is taken as it is, and one that stopped goes on.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained.
    RunFailed
        If a run fails; the message names it and its logs.
    """
    if num_seeds < 1:
        raise ValueError(f"--seeds: expected at least 1, found {num_seeds}")
    out = out.resolve()
    file_names = {name: "".join(c if c.isalnum() or c in "-_." else "-" for c in name) for name in configs}
    series = [
        SeriesRun(name, replace(seeded(config, i), run_dir=str(out / f"{file_names[name]}-seed{i}")))
        for i in range(num_seeds)
        for name, config in configs.items()
    ]
    train_series(series, out / "session", say, launcher)
    runs: dict[str, list[Path]] = {name: [] for name in configs}
    for name, config in series:
        run_dir = Path(config.run_dir)
        runs[name].append(run_dir)
        if not (run_dir / "report.html").is_file() and (report := write_pictures(run_dir)):
            say(f"report: {report}")
    figures = [_figures(name, folders) for name, folders in runs.items()]
    rows = [
        row for name, folders in runs.items() for i, folder in enumerate(folders) for row in _curve(name, i, folder)
    ]
    comparison = {"metric": _metric_name(next(iter(runs.values()))[0]), "seeds": num_seeds, "runs": figures}
    durable.write_text(out / "compare.json", json.dumps(comparison, indent=2))
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "seed", *CURVES])
        writer.writerows(rows)
    draw_curves(rows, str(comparison["metric"]), out / "curves.png")
    say(f"comparison: {out}")
    return comparison


def seeded(config: RunConfig, i: int) -> RunConfig:
    """The configuration with the i-th seed, from its own on, of model, data order and network."""
    from client_pipeline.system.scenario import load_scenario

    network = config.scenario_seed if config.scenario_seed >= 0 else load_scenario(config.scenario).seed
    return replace(config, seed=config.seed + i, scenario_seed=network + i)


def _figures(name: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Means over seeds and rounds; the first quarter of the rounds, while the queues fill, does not count."""
    rounds_by_run = [read_rounds(folder)[0] for folder in folders]
    rounds = [record for records in rounds_by_run for record in records[len(records) // 4 :]]
    virtual = [record["virtual"] for record in rounds]
    trained = [c for v in virtual for c in v["clusters"] if c["selected"]]
    metrics = [(read_summary(folder) or {}).get("metrics", {}).get(_metric_name(folder)) for folder in folders]
    validations = [_validation_metric(folder) for folder in folders]
    devices = [d for r in rounds for c in r["clusters"] for d in c["devices"].values()]
    return {
        "name": name,
        "folders": [str(folder) for folder in folders],
        "metric": _mean(metrics),
        "metrics": metrics,
        "validation": _mean(validations),
        "validations": validations,
        "latency_s": _mean([v["latency_s"] for v in virtual]),
        "pipeline_s": _mean([c["pipeline_s"] for c in trained]),
        "pipeline_fused_s": _mean([c["pipeline_fused_s"] for c in trained]),
        "pipeline_eq15_s": _mean([c["pipeline_eq15_s"] for c in trained]),
        "latency_eq15_s": _mean([v["latency_eq15_s"] for v in virtual]),
        "energy_j": _mean([v["energy_j"] for v in virtual]),
        "bytes": _mean([r["bytes_up"] + r["bytes_down"] for r in rounds]),
        "link_bytes": _mean([sum(sum(c["link_bytes"]) for c in v["clusters"] if c["selected"]) for v in virtual]),
        "memory_bytes": max(max(c["device_memory_bytes"]) for c in trained),
        "process_bytes": max(used_bytes(d) for d in devices),
        "gamma": _mean([c["gamma"] for v in virtual for c in v["clusters"]]),
        "gamma_max": virtual[0]["gamma_max"],
        "selected_share": np.mean([[c["selected"] for c in v["clusters"]] for v in virtual], axis=0).tolist(),
        "wall_s": _mean([(read_summary(folder) or {}).get("wall_s") for folder in folders]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _metric_name(folder: Path) -> str:
    """The task's first metric beside its loss."""
    names = list((read_summary(folder) or {}).get("metrics", {}))
    return next((name for name in names if name != "loss"), "loss")


def _validation_metric(folder: Path) -> float | None:
    """Return the metric of the model that is scored on the test set, or of the last model that was evaluated."""
    name, scored_round = _metric_name(folder), (read_summary(folder) or {}).get("scored_round")
    values = {r["round"]: r["metrics"][name] for r in read_rounds(folder)[0] if name in (r["metrics"] or {})}
    return values.get(scored_round, next(reversed(values.values()), None))


def _curve(name: str, seed: int, folder: Path) -> list[list[Any]]:
    rows, seconds, sent_bytes, joules = [], 0.0, 0.0, 0.0
    metric = _metric_name(folder)
    for record in read_rounds(folder)[0]:
        seconds += record["virtual"]["latency_s"] or 0.0
        joules += record["virtual"]["energy_j"] or 0.0
        sent_bytes += record["bytes_up"] + record["bytes_down"] + record.get("setup_bytes", 0)
        value = record["metrics"].get(metric)
        rows.append([name, seed, record["round"], seconds, sent_bytes, joules, record["train_loss"], value])
    return rows


def training_columns(metric: str) -> dict[str, str]:
    """Return the columns of the table of trained runs, each with its meaning."""
    return {
        "name": "policy or strategy; means over seeds, of rounds without the first quarter",
        f"validation {metric}": "of the model that the run keeps, or its last evaluation",
        f"test {metric}": "of the model that the run keeps, after the last round",
        "latency s": "of a round, modelled [s]",
        "Δ latency": "how far the first row's is from this one",
        "step s": "one step of a selected cluster's pipeline, modelled [s]",
        "Δ step": "how far the first row's is from this one",
        "Eq. (15) s": "the same step by Eq. (15) [s]",
        "energy J": "devices and uploads of a round, modelled [J]",
        "Γ": "convergence bound, mean over the clusters; ! where it exceeds the threshold",
        "messages MB": "Flower's messages of a round, counted [MB]",
        "links MB": "between the devices in a round, modelled [MB]",
        "memory GB": "most that a device needs, modelled [GB]",
        "process MB": "most that a device's tensors took, measured [MB]",
        "selected %": "share of the rounds in which each cluster trained",
    }


def training_table(comparison: Mapping[str, Any]) -> Table:
    """One row a contender; differences are those of the first one from it, in per cent."""
    table = Table(box=None)
    first_runs = comparison["runs"][0]
    for column in training_columns(str(comparison["metric"])):
        table.add_column(column, justify="left" if column == "name" else "right")
    for run in comparison["runs"]:
        table.add_row(
            run["name"],
            four_digits(run["validation"]),
            four_digits(run["metric"]),
            four_digits(run["latency_s"]),
            _change(first_runs["latency_s"], run["latency_s"]),
            four_digits(run["pipeline_s"]),
            _change(first_runs["pipeline_s"], run["pipeline_s"]),
            four_digits(run["pipeline_eq15_s"]),
            four_digits(run["energy_j"]),
            four_digits(run["gamma"]) + ("" if (run["gamma"] or 0) <= run["gamma_max"] else " !"),
            four_digits(run["bytes"] / 1e6),
            four_digits(run["link_bytes"] / 1e6),
            four_digits(run["memory_bytes"] / 1e9),
            four_digits(run["process_bytes"] / 1e6),
            shares_text(run["selected_share"]),
        )
    return table


def _change(value: float | None, reference: float | None) -> str:
    if value is None or not reference or value == reference:
        return ""
    return f"{100 * (value - reference) / reference:+.1f} %"


def draw_curves(rows: Sequence[Sequence[Any]], metric: str, path: Path) -> None:
    """Draw the rows of ``curves.csv``: the metric where it was evaluated, one curve for each name and seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flat
    names = list(dict.fromkeys(row[0] for row in rows))
    for axis, (label, column, unit) in zip(axes, _AXES, strict=True):
        for i, name in enumerate(names):
            for seed in dict.fromkeys(row[1] for row in rows if row[0] == name):
                points = [row for row in rows if row[:2] == [name, seed] and row[7] is not None]
                axis.plot(
                    [row[column] / unit for row in points],
                    [row[7] for row in points],
                    linestyle=_STYLES[i % len(_STYLES)],
                    marker=_MARKERS[i % len(_MARKERS)],
                    markersize=4,
                    linewidth=1.2,
                    color=f"C{i % 10}",
                    label=name if seed == 0 else None,
                )
        axis.set_xlabel(label)
        axis.set_ylabel(f"{metric}, validation")
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)
