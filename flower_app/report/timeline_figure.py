"""The report's Gantt charts: the last round's pipeline of each cluster, modelled above measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from flower_app.report.data import NoData, RunData, extremes
from flower_app.report.drawing import WIDTH, new_figure

_POINTS = 0.86 * WIDTH * 72
"""Width of a panel's time axis [pt], about."""
_MOST = 8
"""Clusters of a run that are drawn: of more, those whose step takes longest and shortest."""
_ROW = 0.24
"""Height of a stage or link [inch]."""
_LOOKS: dict[str, dict[str, Any]] = {
    "F": {"facecolor": "#b9d7ee", "edgecolor": "#1f4e79", "linewidth": 0.5},
    "B": {"facecolor": "#1f4e79", "edgecolor": "#0d2438", "linewidth": 0.5},
    "W": {"facecolor": "#7f9c86", "edgecolor": "#2d4733", "linewidth": 0.5},
    "FB": {"facecolor": "#6fa8d6", "edgecolor": "#1f4e79", "linewidth": 0.5},
    "z": {"facecolor": "#f6c667", "edgecolor": "#7a4b00", "linewidth": 0.4},
    "g": {"facecolor": "#ffffff", "edgecolor": "#7a4b00", "linewidth": 0.4, "hatch": "/////"},
}
_LOOKS["zg"] = _LOOKS["z"]
_MEANING = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "FB": "forward and backward",
    "z": "link: activations",
    "g": "link: gradients",
    "zg": "link: both",
}
_LINKS = ("z", "g", "zg")


def draw_timeline(runs: Sequence[RunData]) -> Figure:
    """Two panels for each cluster.

    Raises
    ------
    NoData
        If no run has a timeline.
    """
    panels = [panel for run in runs for panel in _panels(run, len(runs) > 1)]
    if not panels:
        raise NoData("the run has no timeline.json; a round writes it when it ends")
    heights = [_ROW * max(_rows(events), 2) for _, events, _, _ in panels]
    height = sum(heights) + 0.62 * len(panels) + 0.4
    figure, axes = new_figure(len(panels), 1, height, heights=heights)
    for axis, (title, events, order, unit) in zip(axes[:, 0], panels, strict=True):
        _gantt(axis, events, order)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel(unit)
    kinds = {str(event[0]) for _, events, _, _ in panels for event in events}
    figure.legend(
        handles=[Patch(label=meaning, **_LOOKS[kind]) for kind, meaning in _MEANING.items() if kind in kinds],
        loc="outside upper left",
        ncols=4,
        frameon=False,
    )
    return figure


def add_boxes(axis: Axes, boxes: Sequence[tuple[float, float, float, float]], **look: Any) -> None:
    """Draw rectangles (left, width, lower edge, height) as one path: a tenth of the SVG of one each."""
    if boxes:
        left, width, low, height = np.array(boxes).T
        right, high = left + width, low + height
        corners = np.stack([left, low, right, low, right, high, left, high, left, low], axis=1)
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
        axis.add_patch(PathPatch(Path(corners.reshape(-1, 2), codes), **look))


def _panels(run: RunData, named: bool) -> list[tuple[str, Sequence[Sequence[Any]], Sequence[int], str]]:
    """Title, events, devices and time axis of each panel."""
    clusters: Sequence[Mapping[str, Any]] = (run.timeline or {}).get("clusters") or ()
    panels = []
    # The time of a step as modelled, or else as measured.
    events = [cluster.get("modelled") or cluster.get("measured") or () for cluster in clusters]
    step_s = [max((float(event[4]) for event in of_cluster), default=0.0) for of_cluster in events]
    places, some = extremes(np.array(step_s), _MOST)
    for i in places:
        cluster = clusters[i]
        name = f"{run.label}, " if named else ""
        name += f"cluster {cluster['cluster']}"
        if cluster.get("name"):
            name += f" ({cluster['name']})"
        if some and i == places[0]:
            name += f" (of {len(clusters)} clusters the {_MOST} with the longest and the shortest step are shown)"
        for clock, unit in (("modelled", "virtual time [s]"), ("measured", "wall time [s]")):
            if cluster.get(clock):
                panels.append((f"{name}, {clock}", cluster[clock], cluster.get("order") or (), unit))
    return panels


def _rows(events: Sequence[Sequence[Any]]) -> int:
    """Stages, and the links between them where there are events of links."""
    stages = 1 + max(int(event[1]) for event in events)
    return 2 * stages - 1 if any(event[0] in _LINKS for event in events) else stages


def _gantt(axis: Axes, events: Sequence[Sequence[Any]], order: Sequence[int]) -> None:
    rows = _rows(events)
    stages = sorted({int(event[1]) for event in events if event[0] not in _LINKS})
    spread = 2 if any(event[0] in _LINKS for event in events) else 1
    makespan = max(float(event[4]) for event in events)
    spans_by_place: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for kind, place, micro_batch, start, end in events:
        if kind in _LOOKS:
            spans_by_place.setdefault((kind, int(place)), []).append((int(micro_batch), float(start), float(end)))
    for (kind, place), spans in spans_by_place.items():
        low, height = _place(kind, spread * place)
        add_boxes(axis, [(start, end - start, low, height) for _, start, end in spans], **_LOOKS[kind])
        if kind in _LINKS:
            continue
        for i, start, end in spans:
            if (end - start) / makespan * _POINTS > 4.5 * len(str(i)) + 2:
                colour = "white" if kind == "B" else "black"
                axis.text(
                    (start + end) / 2, low + height / 2, str(i), color=colour, fontsize=7, ha="center", va="center"
                )
    labels = [f"stage {s}" + (f", device {order[s]}" if s < len(order) else "") for s in stages]
    axis.set_yticks([spread * s for s in stages], labels)
    axis.set_ylim(rows - 0.5, -0.5)
    axis.set_xlim(0, makespan)
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")


def _place(kind: str, row: int) -> tuple[float, float]:
    """Lower edge and height in rows; a link's two directions share the row below its stage."""
    if kind == "z" or kind == "zg":
        return row + 0.62, 0.36
    return (row + 1.02, 0.36) if kind == "g" else (row - 0.42, 0.84)
