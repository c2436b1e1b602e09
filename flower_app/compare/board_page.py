"""A board as one page: what is said, the table, and each task's curves."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from client_pipeline import durable
from flower_app.compare.board import board_cells
from flower_app.report.mistakes_section import table_row, wide_table
from flower_app.report.page import html_page

PAGE = "board.html"
_AXES = (("MB", 2, 1e6), ("virtual s", 3, 1.0), ("kJ", 4, 1e3))
"""What a score is drawn over: label, column of a curve, unit."""


def write_page(document: Mapping[str, Any], out: Path) -> Path:
    """Write ``board.html``, which needs nothing else.

    Parameters
    ----------
    document : of :func:`~flower_app.compare.board.run_board`
    out : its folder
    """
    titles, rows = board_cells(document)
    cells = [table_row(titles, "th"), *(table_row(row) for row in rows)]
    said = "".join(f"<li>{escape(line)}</li>" for line in document["said"])
    body = [
        "<h1>CollaPipe: board</h1>",
        f"<p>Against {escape(document['reference'])}: mean of the paired differences over {document['seeds']} seeds, "
        f"with its 95 % interval.</p><ul>{said}</ul>",
        wide_table(cells, "board"),
        "<p>Bytes are those of messages and of the server's streams; seconds and joules are modelled. Scores within a "
        "budget and the cost of the target are by the validation set, the others by the test set.</p>",
    ]
    for task in dict.fromkeys(row["task"] for row in document["rows"]):
        of_task = [row for row in document["rows"] if row["task"] == task and not row["condition"]]
        metric = next(score["metric"] for score in document["scores"] if score["task"] == task)
        picture = base64.b64encode(_curves(of_task, metric)).decode()
        body.append(
            f'<h2>{escape(task)}</h2><figure><img alt="{escape(metric)} of each method" '
            f'style="width: 100%; min-width: 820px" src="data:image/svg+xml;base64,{picture}"></figure>'
        )
    return durable.write_text(out / PAGE, html_page("board", body), lasting=False)


def _curves(rows: Sequence[Mapping[str, Any]], metric: str) -> bytes:
    """Draw a task's evaluations as SVG, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axis, (label, column, unit) in zip(figure.subplots(1, len(_AXES), sharey=True), _AXES, strict=True):
        for row in rows:
            number = methods.index(row["method"])
            axis.plot(
                [point[column] / unit for point in row["curve"]],
                [point[1] for point in row["curve"]],
                marker="osv^Dx*+P<>"[number % 11],
                markersize=3,
                linewidth=1,
                color=f"C{number % 10}",
                label=row["method"] if row["seed"] == 0 else None,
            )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"{metric}, validation")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
