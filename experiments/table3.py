"""Table III: memory of one device under each framework, as its process has it and as the model counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client_pipeline.system.costs import model_costs
from experiments.base import style
from experiments.base.experiment import Curve, Experiment, PaperFinding, Row, distinct, select
from experiments.base.planning import mean_spread
from experiments.base.training import Training, train_all, trainings
from flower_app.runs.run_directory import read_rounds
from flower_app.saved_model import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(curves: Sequence[Curve], folder: Path, say: Callable[[str], None]) -> Iterator[Row]:
    """One row for each run; the first curve is what the others are held against."""
    wanted = trainings(curves, folder)
    train_all(wanted, folder, say)
    for training in wanted:
        yield _row(training)


def _row(training: Training) -> Row:
    """Largest device of a run: peak of its process above what it had before it held anything, and as modelled."""
    config = training.config
    spec = load_model(training.run_dir, config.model.family).spec
    length = config.planner.length or config.data.max_length
    block = model_costs(spec, sequence_length=length, batch_size=config.batch_size).block_memory
    rounds = read_rounds(training.run_dir)[0]
    devices = [device for record in rounds for cluster in record["clusters"] for device in cluster["devices"].values()]
    used_bytes = [device["peak_bytes"] - device["idle_bytes"] for device in devices]
    blocks = [device["blocks"] for device in devices]
    return {
        "curve": training.curve.name,
        "label": training.curve.label,
        "what": config.strategy,
        "seed": training.seed,
        "batch": config.batch_size,
        "width": config.model.width,
        "tebs": max(blocks),
        "whole_tebs": config.model.encoder_layers,
        "measured_mb": max(used_bytes) / 1e6,
        "modelled_mb": max(blocks) * block / 1e6,
        "mean_measured_mb": float(np.mean(used_bytes)) / 1e6,
    }


def draw(rows: Sequence[Row]) -> Figure:
    """Measured beside modelled for each framework."""
    figure, [axis] = style.figure(7, 4.4)
    names = distinct(rows, "curve")
    at = np.arange(len(names))
    for i, (column, text) in enumerate((("measured_mb", "measured"), ("modelled_mb", "modelled"))):
        means, spreads = zip(*(_of(rows, name, column) for name in names), strict=True)
        axis.bar(at + 0.4 * i, means, 0.4, yerr=spreads, capsize=3, color=["0.35", "0.85"][i], edgecolor="0.15",
                 hatch=style.HATCHES[i], label=text)  # fmt: skip
    labels = [f"{select(rows, curve=name)[0]['label']}\n{_tebs(rows, name)} TEBs" for name in names]
    axis.set_xticks(at + 0.2, labels, fontsize=8)
    style.label(axis, "", "memory of the largest device [MB]")
    axis.legend(fontsize=8)
    return figure


def _of(rows: Sequence[Row], name: str, column: str) -> tuple[float, float]:
    return mean_spread([row[column] for row in select(rows, curve=name)])


def _tebs(rows: Sequence[Row], name: str) -> str:
    """Return the number of TEBs that the largest device holds, as a range over the networks."""
    counts = sorted(row["tebs"] for row in select(rows, curve=name))
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def findings(rows: Sequence[Row]) -> list[PaperFinding]:
    """Memory of each framework, and CollaPipe's share of it."""
    names = distinct(rows, "curve")
    first_name = names[0]
    paper_findings = []
    for name in names:
        first_row = select(rows, curve=name)[0]
        (measured, spread), (modelled, _) = _of(rows, name, "measured_mb"), _of(rows, name, "modelled_mb")
        ours = f"{measured:.0f} ± {spread:.0f} MB measured, {modelled:.0f} MB modelled"
        if name != first_name:
            shares = [100 * _of(rows, first_name, c)[0] / _of(rows, name, c)[0] for c in ("measured_mb", "modelled_mb")]
            ours += f"; CollaPipe needs {shares[0]:.0f} % (measured), {shares[1]:.0f} % (modelled) of it"
        paper_findings.append(
            PaperFinding(
                what=f"{first_row['label']}: largest device, {_tebs(rows, name)} of {first_row['whole_tebs']} TEBs, "
                f"batch {first_row['batch']}",
                paper="cut by more than half" if first_row["what"] == "vanilla-fl" else "-",
                ours=ours,
                why=_WHY.get(first_row["what"], "not in the paper"),
            )
        )
    return paper_findings


_WHY = {
    "collapipe": "segments by DSSDA, at most 4 TEBs on a device (C7)",
    "vanilla-fl": "a device holds the whole encoder with gradients and optimizer states; its share of the batch "
    "decides how many activations come on top",
    "pipeline": "even segments over all devices: no device holds less, and the slowest holds as much as the fastest",
    "titanic": "segments in proportion to speed: the fastest device holds most",
}

EXPERIMENT = Experiment(name="table3", shows="memory of one device", run=run, draw=draw, findings=findings, trains=True)
