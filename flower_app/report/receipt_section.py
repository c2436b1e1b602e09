"""The receipt: what a run was predicted to take, beside what was measured and counted."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from client_pipeline import durable
from flower_app.config.sources import read_config
from flower_app.report.data import RunData, as_number
from flower_app.report.mistakes_section import table_row, wide_table
from flower_app.runs.run_directory import CONFIG, read_rounds

RECEIPT = "receipt.json"
_UNITS = {"s": 1.0, "MB": 1e6}


def receipt(data: RunData, costs: str) -> list[dict[str, Any]]:
    """Return the figures that have both sides, as JSON values.

    Parameters
    ----------
    data : of the run
    costs : its key ``costs``

    Returns
    -------
    For each ``what``, ``unit`` (``s`` or ``byte``), ``predicted``, ``real`` and ``error``, (real - predicted) /
    predicted:

    * the local steps of each round's slowest cluster, all rounds (where ``costs = "measured"``),
    * uploads of the clusters, as Flower's messages bring them; with ``costs = "model"``, which counts them, also the
      activations on the server's streams,
    * bytes between the devices,
    * memory of the device that has held most.
    """
    rows = [
        ("local steps of the slowest cluster", "s", *_both(*data.predictions())),
        ("uploads", "byte", *_both(_sums(data, "uplink_bytes"), _uploaded(data, costs == "model"))),
        ("between devices", "byte", *_both(data.link_bytes(), _counted(data))),
        ("most that a device holds", "byte", *_largest(data)),
    ]
    return [
        {"what": what, "unit": unit, "predicted": predicted, "real": real, "error": (real - predicted) / predicted}
        for what, unit, predicted, real in rows
        # Who uploads nothing has a prediction for the evaluations' weights alone.
        if predicted > 0 and real > 0
    ]


def write_receipt(run_dir: Path) -> Path:
    """Write ``receipt.json`` of a run."""
    data = RunData(label=run_dir.name, rounds=read_rounds(run_dir)[0], timeline=None)
    costs = str(read_config(run_dir / CONFIG).get("costs", "scenario"))
    return durable.write_text(run_dir / RECEIPT, json.dumps(receipt(data, costs), indent=1), lasting=False)


def receipt_section(data: RunData, label: str = "", number: int = 0, costs: str = "") -> list[str]:
    """Return the section of one run, as HTML; none where nothing has both sides.

    Parameters
    ----------
    data : of the run
    label, number : its name, and its number among several; empty: it is alone
    costs : its key ``costs``
    """
    lines = receipt(data, costs)
    if not lines:
        return []
    suffix, name = (f"-{number}", f"{label}: ") if label else ("", "")
    rows = [table_row(("", "predicted", "real", "error"), "th")]
    for line in lines:
        unit = "MB" if line["unit"] == "byte" else line["unit"]
        values = [f"{line[key] / _UNITS[unit]:,.4g} {unit}" for key in ("predicted", "real")]
        rows.append(table_row((line["what"], *values, f"{line['error']:+.1%}")))
    text = "Sums over the rounds, and the device that has held most."
    if costs == "scenario":
        text += " Predictions are of the scenario's model, not of this one: costs = model counts this one."
    elif costs == "model":
        text += " Predictions are for texts of planner.length tokens: shorter ones send and hold less, and"
        text += " runtime.fused-micro-batches hold more."
    return [f'<h2 id="receipt{suffix}">{escape(name)}Receipt</h2>{wide_table(rows)}<p>{text}</p>']


def _both(predicted: Any, real: Any) -> tuple[float, float]:
    """Sum the rounds that have both."""
    known = np.isfinite(predicted) & np.isfinite(real)
    return (float(predicted[known].sum()), float(real[known].sum())) if known.any() else (np.nan, np.nan)


def _sums(data: RunData, key: str) -> Any:
    values = data.cluster_series(key)
    return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)


def _uploaded(data: RunData, with_streams: bool) -> Any:
    """Bytes that have come up, (R,)."""
    messages = data.series("bytes_up")
    if not with_streams:
        return messages
    streams = [
        sum(as_number((report.get("stream_bytes") or {"up": 0}).get("up")) for report in record.get("clusters") or ())
        for record in data.rounds
    ]
    return messages + np.array(streams)


def _counted(data: RunData) -> Any:
    """Bytes between the devices of all clusters that have reported, (R,)."""
    reports = [
        [as_number(report.get("link_bytes")) for report in record.get("clusters") or ()] for record in data.rounds
    ]
    return np.array([sum(values) if values else np.nan for values in reports])


def _largest(data: RunData) -> tuple[float, float]:
    both = (pair for pair in data.memory().values() if np.isfinite(pair[1]))
    return max(both, key=lambda pair: pair[1], default=(np.nan, np.nan))
