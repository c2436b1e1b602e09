"""A run in pictures: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from client_pipeline import durable
from flower_app.config.sources import read_config
from flower_app.report.contents import FIGURES, FigureSpec
from flower_app.report.data import NoData, RunData, as_number, left_out
from flower_app.report.machine_table import machine_section
from flower_app.runs.machines import read_machines
from flower_app.runs.run_directory import CONFIG, FINISHED, TIMELINE, read_rounds, read_summary
from strategies.dssda.power_control import control_summary, control_text

REPORT = "report.html"

_CLUSTERS = 12
"""Clusters that the head names one by one."""
_TROUBLES = 100
"""Rows of the table of troubles at most."""
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8,
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1060px; margin: 2em auto;
       padding: 0 1.2em; }
h1 { font-size: 1.6em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin: 2em 0 .3em; }
nav a { margin-right: 1em; } a { color: #0b559f; }
table { border-collapse: collapse; margin: .6em 0; }
th, td { text-align: left; vertical-align: top; padding: .2em .9em .2em 0; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; } td { overflow-wrap: anywhere; } code { font-size: .9em; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
figure svg text { font-family: "DejaVu Sans", Verdana, Arial, sans-serif; }
 figcaption { color: #444; font-size: .93em; }
.state { border-left: 5px solid #b00020; background: #fbeeee; padding: .5em .9em; margin: .8em 0; }
.no-data { border: 1px dashed #999; color: #555; padding: 1.2em; text-align: center; }
@media print { nav { display: none; } figure { break-inside: avoid; } }
"""


@dataclass(frozen=True, kw_only=True)
class _Run:
    path: Path
    data: RunData
    summary: Mapping[str, Any] | None
    config: Mapping[str, Any]
    """Flat keys; empty where the file cannot be read."""
    machines: Sequence[Mapping[str, Any]]
    """Lines of ``machines.jsonl``."""


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or of several beside each other.

    Parameters
    ----------
    run_dirs : the run directories
    out : the file; None: ``report.html`` in the run's directory, or in the current one for several runs

    Returns
    -------
    The file's path.

    Raises
    ------
    ValueError
        If there is no run.
    """
    if not run_dirs:
        raise ValueError("report: expected at least one run, found none")
    if out is None:
        out = run_dirs[0] / REPORT if len(run_dirs) == 1 else Path.cwd() / REPORT
    runs = [_read(path, label) for path, label in zip(run_dirs, _labels(run_dirs), strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    return durable.write_text(out, _page(runs), lasting=False)


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """Directory names; with a number where two are the same."""
    names = [path.name for path in run_dirs]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _read(run_dir: Path, label: str) -> _Run:
    rounds, _ = read_rounds(run_dir)
    try:
        timeline = json.loads((run_dir / TIMELINE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        timeline = None
    try:
        # As it stands: a run of another version may have keys that are no longer known.
        config = read_config(run_dir / CONFIG)
    except (FileNotFoundError, ValueError):
        config = {}
    data = RunData(label=label, rounds=rounds, timeline=timeline)
    machines, summary = read_machines(run_dir), read_summary(run_dir)
    return _Run(path=run_dir.resolve(), data=data, summary=summary, config=config, machines=machines)


def _page(runs: Sequence[_Run]) -> str:
    title = runs[0].data.label if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<h1>CollaPipe: {escape(title)}</h1>", *(_state(run, len(runs) > 1) for run in runs)]
    links = "".join(f'<a href="#{spec.id}">{escape(spec.title)}</a> ' for spec in FIGURES)
    machines = machine_section({run.data.label: run.machines for run in runs})
    sections = [_section(spec, runs) for spec in FIGURES]
    body += [f"<nav>{links}</nav>", _header(runs), *sections, _troubles(runs), machines]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>CollaPipe: {escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _state(run: _Run, named: bool) -> str:
    """What to know first of a run that did not finish."""
    if run.summary is not None and run.summary.get("status") == FINISHED:
        return ""
    done = f"The report shows the {len(run.data.rounds)} rounds that were written."
    if run.summary is None:
        text = f"No summary yet: the run is still active, or was stopped from outside. {done}"
    else:
        text = f"The run ended as “{run.summary.get('status')}”: {run.summary.get('error', 'no message')}. {done}"
    prefix = f"<b>{escape(run.data.label)}</b>: " if named else ""
    return f'<p class="state">{prefix}{escape(text)}</p>'


def _header(runs: Sequence[_Run]) -> str:
    """One column a run."""
    columns = [_facts(run) for run in runs]
    rows = []
    if len(runs) > 1:
        rows.append("<tr><th></th>" + "".join(f"<th>{escape(run.data.label)}</th>" for run in runs) + "</tr>")
    for name in columns[0]:
        cells = "".join(f"<td>{column[name]}</td>" for column in columns)
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<table id="run">{"".join(rows)}</table>'


def _facts(run: _Run) -> dict[str, str]:
    """HTML of what identifies and sums up a run."""
    config, data, summary = run.config, run.data, run.summary or {}
    policies = {str(p) for record in data.rounds if (p := (record.get("plan") or {}).get("policy"))}
    policy = ", ".join(sorted(policies)) or config.get("policy", "-")
    wall = as_number(summary.get("wall_s"))
    if np.isnan(wall) and data.rounds:
        wall = as_number(data.rounds[-1].get("wall_s"))
    scores = ", ".join(f"{name} {_short(value)}" for name, value in (summary.get("metrics") or {}).items())
    signature = f" ({summary['signature']})" if summary.get("signature") else ""
    command = f"collapipe run --config {shlex.quote(str(run.path / CONFIG))} --set run-dir="
    rounds = f"{len(data.rounds)} of {config.get('num-rounds', '-')}, {config.get('local-steps', '-')} local steps each"
    facts = {
        "name": config.get("name", data.label),
        "status": summary.get("status", "no summary"),
        "strategy": config.get("strategy", "-"),
        "policy": policy,
        "power control": _power_control(data),
        "scenario": config.get("scenario", "-"),
        "clusters": _clusters(data),
        "rounds": rounds,
        "test metrics": f"{scores}{signature}" if scores else "not scored",
        "privacy": _privacy(summary.get("privacy") or (data.rounds[-1].get("privacy") if data.rounds else None)),
        "virtual time": _seconds(data.series("virtual", "latency_s")),
        "energy": _sum(data.series("virtual", "energy_j"), "J"),
        "wall time": "-" if np.isnan(wall) else f"{wall:,.1f} s",
        "directory": str(run.path),
    }
    return {name: escape(str(value)) for name, value in facts.items()} | {
        "again": f"<code>{escape(command)}</code>",
    }


def _power_control(data: RunData) -> str:
    """How often the convex programs' powers were used, and how near the optimum they came."""
    plans = [record.get("plan") or {} for record in data.rounds]
    controls = [control for plan in plans if isinstance(control := plan.get("power_control"), dict)]
    summary = control_summary(controls)
    return control_text(summary["power_control"]) if summary else "-"


def _clusters(data: RunData) -> str:
    """How many there are, and of a few their sites and devices."""
    numbers, devices = data.cluster_numbers, data.num_devices
    if not numbers:
        return "-"
    if len(numbers) > _CLUSTERS:
        sizes = [devices[n] for n in numbers if n in devices]
        text = f"{len(numbers):,}"
        return f"{text}; {len(sizes):,} have trained, on {min(sizes)} to {max(sizes)} devices" if sizes else text
    words = [f"{n} {data.names[n]}" if n in data.names else f"{n}" for n in numbers]
    words = [f"{word} ({devices[n]} devices)" if n in devices else word for word, n in zip(words, numbers, strict=True)]
    return f"{len(numbers)}: {', '.join(words)}"


def _privacy(epsilons: Mapping[str, Any] | None) -> str:
    """What the noise guarantees, in a line."""
    if not epsilons:
        return "no noise: activations and updates are sent unchanged"
    parts = []
    for what in ("updates", "activations"):
        if amount := epsilons.get(what):
            parts.append(f"{what}: epsilon {amount['epsilon']:.4g} for one {amount['unit']}")
    if amount := epsilons.get("together"):
        parts.append(f"together: epsilon {amount['epsilon']:.4g} for one {amount['unit']}")
    seeded = "; the seed is known, so nothing is guaranteed" if epsilons.get("seeded") else ""
    return (
        f"{'; '.join(parts)}; at delta {epsilons.get('delta', 0):g}{seeded}; labels, lengths and losses are not covered"
    )


def _section(spec: FigureSpec, runs: Sequence[_Run]) -> str:
    caption = spec.caption if len(runs) == 1 else spec.several
    # A run without rounds has a place in the header, but no curve.
    data = [run.data for run in runs if run.data.rounds]
    try:
        if not data:
            raise NoData("no round was completed")
        picture = to_svg(spec, data)
    except NoData as why:
        picture = f'<p class="no-data">no data: {escape(str(why))}</p>'
    return (
        f'<h2>{escape(spec.title)}</h2>\n<figure id="{spec.id}">{picture}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def to_svg(spec: FigureSpec, data: Sequence[RunData]) -> str:
    """Draw a figure as SVG to stand in a page: names are the figure's own, text is text.

    Raises
    ------
    NoData
        If the runs have nothing to show in it.
    """
    # The salt makes the names that matplotlib gives depend on the figure alone.
    with matplotlib.rc_context(_LOOK | {"svg.hashsalt": spec.id}):
        figure: Figure = spec.draw(data)
        file = io.StringIO()
        # Not by ``savefig``, which draws all of a figure that has a layout twice, the first time into nothing.
        canvas: Any = FigureCanvasSVG(figure)  # has no types
        canvas.print_svg(file, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = _shorter(svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{spec.id}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(spec.title)}" ', 1)


def _shorter(svg: str) -> str:
    """A hundredth of a point is enough, the page sets the font, and what is not turned needs no rotation."""
    svg = re.sub(
        r'(?<= )(?:d|x|y|points|transform)="[^"]*"',
        lambda attribute: re.sub(
            r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), attribute[0]
        ),
        svg,
    )
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    return re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)


def _troubles(runs: Sequence[_Run]) -> str:
    """Who failed or was left out, when and why; the same reason of a cluster in one row."""
    rounds_by_fault: dict[tuple[str, str, str, str], list[int]] = {}
    for run in runs:
        for record in run.data.rounds:
            for kind, entries in (("failed", record.get("failed") or ()), ("left out", left_out(record))):
                for entry in entries:
                    number = entry.get("cluster", "-")
                    site = run.data.names.get(number)
                    cluster = f"{number} {site}" if site else str(number)
                    key = (run.data.label, kind, cluster, str(entry.get("reason", "-")))
                    rounds_by_fault.setdefault(key, []).append(int(record["round"]))
    heading = '<h2 id="troubles">Failed and left out</h2>'
    if not rounds_by_fault:
        return f"{heading}<p>No cluster failed or was left out.</p>"
    rows = []
    for (label, kind, cluster, reason), numbers in list(rounds_by_fault.items())[:_TROUBLES]:
        cells = ([label] if len(runs) > 1 else []) + [cluster, kind, _ranges(numbers), reason]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    titles = (["run"] if len(runs) > 1 else []) + ["cluster", "what", "rounds", "reason"]
    more_line = (
        f"<p>{len(rounds_by_fault) - _TROUBLES} more are in rounds.jsonl.</p>"
        if len(rounds_by_fault) > _TROUBLES
        else ""
    )
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"{heading}<table><tr>{head}</tr>{''.join(rows)}</table>{more_line}"


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7; a long list ends with its count."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return ", ".join(words if len(words) <= 12 else [*words[:12], f"... ({len(set(numbers))} rounds)"])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _sum(values: np.ndarray[Any, np.dtype[np.float64]], unit: str) -> str:
    return f"{np.nansum(values):,.1f} {unit}" if np.any(np.isfinite(values)) else "-"


def _seconds(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    total = float(np.nansum(values))
    return f"{_sum(values, 's')} ({total / 3600:.2f} h)" if total >= 3600 else _sum(values, "s")
