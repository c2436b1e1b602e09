"""Rows of an experiment as files, and back."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from flower_app.experiments.experiment import Finding, Row

ROWS, TABLE, MEANS = "results.jsonl", "results.csv", "means.csv"
FINDINGS, PICTURE = "findings.json", "figure.png"


def write_rows(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Write each row as soon as it is there, and all of them as CSV at the end.

    Parameters
    ----------
    rows : of the run part
    folder : where ``results.jsonl`` and ``results.csv`` go

    Returns
    -------
    The rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with (folder / ROWS).open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            written.append(row)
    _write_table(written, folder / TABLE)
    return written


def write_means(rows: Sequence[Row], folder: Path) -> None:
    """Write ``means.csv``: of each curve and seed the mean of every number over its rows, where it has several.

    Rows of planned rounds are too many to read; so their first quarter, while the queues fill, is left out here.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if "seed" not in row or "round" not in row:
            return
        groups.setdefault((row["curve"], row["seed"]), []).append(row)
    means = []
    for (curve, seed), group in groups.items():
        last = max(row["round"] for row in group)
        counted = [row for row in group if row["round"] > last // 4]
        mean: Row = {"curve": curve, "seed": seed, "rows": len(counted)}
        for column in group[0]:
            values = [row[column] for row in counted if isinstance(row[column], float)]
            if values:
                mean[column] = float(f"{sum(values) / len(values):.6g}")
        means.append(mean)
    _write_table(means, folder / MEANS)


def _write_table(rows: Sequence[Row], path: Path) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read_rows(folder: Path) -> list[Row]:
    """Read what :func:`write_rows` left.

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
    return rows


def write_findings(findings: Sequence[Finding], folder: Path) -> None:
    """Write the paper's figures beside ours."""
    text = json.dumps([vars(finding) for finding in findings], indent=2, ensure_ascii=False)
    (folder / FINDINGS).write_text(text + "\n", encoding="utf-8")


def markdown(findings: Sequence[Finding]) -> str:
    """The findings as a table, as ``docs/results.md`` has it."""
    lines = ["| | paper | ours | why |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {f.what} | {f.paper} | {f.ours} | {f.why} |" for f in findings)])
