"""Rows of an experiment as files, and back."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from client_pipeline import durable
from experiments.base.experiment import PaperFinding, Row, distinct, select
from experiments.base.planning import quarter, settled

ROWS, TABLE, COMPACT = "results.jsonl", "results.csv", "compact.csv"
FINDINGS, PICTURE = "findings.json", "figure.png"


def write_rows(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Write each row as soon as it is there, and all of them as CSV at the end, in the order of the curves.

    Parameters
    ----------
    rows : of the run part
    folder : where ``results.jsonl`` and ``results.csv`` go

    Returns
    -------
    The rows, in the order of the curves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    row_lines: list[Row] = []

    def write(aside: Path) -> None:
        with aside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                row_lines.append(row)

    # All rows or none: a figure of some of them would look like one of all.
    durable.write_file(folder / ROWS, write)
    row_lines = _in_order(row_lines)
    write_table(row_lines, folder / TABLE)
    return row_lines


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by curve, whichever was made last: findings hold the first curve against the others."""
    return sorted(rows, key=lambda row: str(row["curve"]))


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each curve and seed: the mean of every number, without the first quarter of the rounds.

    Findings count the same rounds: in the first quarter the queues still fill.
    """
    return [_mean(settled(network_rows)) for network_rows in _networks(rows)]


def quarter_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the means of each curve and seed over each quarter of its rounds, numbered by the quarter's last round."""
    means = []
    for network_rows in _networks(rows):
        last = max(row["round"] for row in network_rows)
        for part in dict.fromkeys(quarter(row["round"], last) for row in network_rows):
            counted = [row for row in network_rows if quarter(row["round"], last) == part]
            means.append(_mean(counted) | {"round": counted[-1]["round"]})
    return means


def _networks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of each curve and seed."""
    for curve in distinct(rows, "curve"):
        curve_rows = select(rows, curve=curve)
        for seed in distinct(curve_rows, "seed"):
            yield select(curve_rows, seed=seed)


def _mean(counted: Sequence[Row]) -> Row:
    """Mean of every number."""
    mean: Row = {"curve": counted[0]["curve"], "seed": counted[0]["seed"], "rows": len(counted)}
    for column, first in counted[0].items():
        if column not in ("seed", "round") and isinstance(first, int | float):
            mean[column] = sum(row[column] for row in counted) / len(counted)
    return mean


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows as CSV, numbers to six digits; ``results.jsonl`` has them all."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_rows(folder: Path) -> list[Row]:
    """Read what :func:`write_rows` left, in the order of the curves.

    Raises
    ------
    FileNotFoundError
        If the experiment has not run there.
    ValueError
        For a line that is no JSON object.
    """
    path = folder / ROWS
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; run the experiment first, without --plot")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected JSON, {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
        rows.append(row)
    return _in_order(rows)


def write_findings(findings: Sequence[PaperFinding], folder: Path) -> None:
    """Write the paper's figures beside ours."""
    text = json.dumps([vars(finding) for finding in findings], indent=2, ensure_ascii=False)
    durable.write_text(folder / FINDINGS, text + "\n")


def markdown(findings: Sequence[PaperFinding]) -> str:
    """Return the findings as a Markdown table."""
    lines = ["| | paper | ours | why |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {f.what} | {f.paper} | {f.ours} | {f.why} |" for f in findings)])
