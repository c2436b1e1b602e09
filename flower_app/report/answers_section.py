"""The report's table of answers, before and after the training."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from flower_app.report.mistakes_section import wide_table

_COLUMNS = ("question", "expected", "before", "after")


def answers_section(answers: Mapping[str, Any], label: str = "", number: int = 0) -> list[str]:
    """Return the section of one run, as HTML; none where it has no answers, or some of a form that is not known."""
    before, after = (answers.get(when) or () for when in ("before", "after"))
    suffix, name = (f"-{number}", f"{label}: ") if label else ("", "")
    rows = ["<tr>" + "".join(f"<th>{column}</th>" for column in _COLUMNS) + "</tr>"]
    try:
        for i, each in enumerate(after or before):
            answered = [each_time[i]["answer"] if i < len(each_time) else "-" for each_time in (before, after)]
            cells = (each["question"], each["reference"], *answered)
            rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    except (TypeError, KeyError):
        return []
    if len(rows) == 1:
        return []
    text = "The first questions of the test set, and what the model writes before and after the training."
    return [f'<h2 id="answers{suffix}">{escape(name)}Answers</h2>{wide_table(rows)}<p>{text}</p>']
