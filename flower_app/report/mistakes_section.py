"""The report's tables of labels: scores of each class, confusions, and the worst mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from client_pipeline.documents import json_value
from flower_app.runs.run_directory import MISTAKES

_DARKEST = 0.55
"""Opacity of a cell with all of a class: text on it stays readable."""


def read_mistakes(run_dir: Path) -> Mapping[str, Any]:
    """Read the labels of a run's test set; empty where it has none, or of a form that is not known."""
    try:
        mistakes = json_value((run_dir / MISTAKES).read_text(encoding="utf-8"))
        labels_sections(mistakes)
        return dict(mistakes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def labels_sections(mistakes: Mapping[str, Any], label: str = "", number: int = 0) -> list[str]:
    """Return the three sections of one run, as HTML; none where it has no labels."""
    if not mistakes:
        return []
    suffix, before = (f"-{number}", f"{label}: ") if label else ("", "")
    titles = (("classes", "Classes"), ("confusions", "Confusions"), ("worst", "Worst mistakes"))
    bodies = (_classes(mistakes), _confusions(mistakes), _worst(mistakes))
    return [
        f'<h2 id="{key}{suffix}">{escape(before + title)}</h2>{body}'
        for (key, title), body in zip(titles, bodies, strict=True)
    ]


def wide_table(rows: Sequence[str], id_: str = "") -> str:
    """Return a table of rows that scrolls by itself where the page is narrower."""
    name = f' id="{id_}"' if id_ else ""
    return f'<div class="wide"><table{name}>{"".join(rows)}</table></div>'


def table_row(cells: Sequence[str], tag: str = "td") -> str:
    """Return a row of a table of texts."""
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _classes(mistakes: Mapping[str, Any]) -> str:
    number, wrong, scored = int(mistakes["examples"]), int(mistakes["wrong"]), str(mistakes["scored"])
    scores = ("precision", "recall", "f1")
    rows = [table_row(("class", *scores, "support"), "th")]
    for each in mistakes["classes"]:
        rows.append(
            table_row((each["name"], *(f"{float(each[score]):.4f}" for score in scores), f"{int(each['support']):,}"))
        )
    more = int(mistakes["num_classes"]) - len(mistakes["classes"])
    lines = [
        f"On the test set {wrong:,} of {number:,} examples have a mistake.",
        f"Support is the number of {scored} of a class.",
        f"Precision is the share of the {scored} found that are right, recall that of the expected that are found.",
        "f1 is the harmonic mean of both.",
        f"{more:,} more classes have less support." if more else "",
    ]
    return f"{wide_table(rows)}<p>{escape(' '.join(lines))}</p>"


def _confusions(mistakes: Mapping[str, Any]) -> str:
    triples = [(str(expected), str(predicted), int(count)) for expected, predicted, count in mistakes["confusions"]]
    if not mistakes["whole"]:
        rows = [table_row(("expected", "found", "labels"), "th"), *(table_row((e, f, f"{n:,}")) for e, f, n in triples)]
        return f"{wide_table(rows)}<p>The most frequent mistakes.</p>"
    counts, totals = Counter[tuple[str, str]](), Counter[str]()
    for expected, predicted, count in triples:
        counts[expected, predicted] += count
        totals[expected] += count
        totals[predicted] += 0
    names = sorted(totals, key=lambda name: (-totals[name], name))
    rows = [table_row(("expected \\ found", *names), "th")]
    for expected in names:
        cells = "".join(
            _cell(counts[expected, predicted], totals[expected], expected == predicted) for predicted in names
        )
        rows.append(f"<tr><th>{escape(expected)}</th>{cells}</tr>")
    return (
        f"{wide_table(rows)}<p>Labels by expected class (row) and found class (column). Those on the diagonal "
        "are right; a darker cell is a larger share of its row.</p>"
    )


def _cell(count: int, total: int, right: bool) -> str:
    share = _DARKEST * count / total if total else 0.0
    colour = "11, 85, 159" if right else "213, 94, 0"
    return f'<td class="count" style="background: rgba({colour}, {share:.2f})">{count:,}</td>'


def _worst(mistakes: Mapping[str, Any]) -> str:
    if not mistakes["worst"]:
        return "<p>There is no mistake.</p>"
    entries = []
    for each in mistakes["worst"]:
        loss, confidence = ("-" if each[key] is None else f"{float(each[key]):.4g}" for key in ("loss", "confidence"))
        entries.append(
            f"<li>{escape(str(each['text']))}<br><b>expected</b> {escape(str(each['expected']))} <b>found</b> "
            f"{escape(str(each['found']))} <b>loss</b> {loss} <b>confidence</b> {confidence}</li>"
        )
    return (
        f"<ol>{''.join(entries)}</ol><p>The {len(entries)} mistakes with the greatest loss: cross-entropy, mean over "
        "the labels of an example. Confidence is the mean probability of the labels found. Long texts are cut.</p>"
    )
