"""A run in pictures: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from client_pipeline import durable
from client_pipeline.documents import json_value
from client_pipeline.runtime.ray.machine import REPORTED_PACKAGES
from flower_app.config.sources import read_config
from flower_app.report.answers_section import answers_section
from flower_app.report.contents import FIGURES, FigureSpec
from flower_app.report.data import NoData, RunData, as_number, left_out
from flower_app.report.mistakes_section import labels_sections, read_mistakes, wide_table
from flower_app.report.receipt_section import receipt_section
from flower_app.runs.machines import MACHINES, read_machines
from flower_app.runs.run_directory import (
    ANSWERS,
    CONFIG,
    FINISHED,
    MISTAKES,
    ROUNDS,
    SUMMARY,
    TIMELINE,
    read_answers,
    read_rounds,
    read_summary,
)
from strategies.dssda.paper.power_control import control_summary, control_text

REPORT = "report.html"
_INPUTS = (ANSWERS, CONFIG, MACHINES, MISTAKES, ROUNDS, SUMMARY, TIMELINE)

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
.wide, figure { overflow-x: auto; } .count { text-align: right; }
.wide td { overflow-wrap: break-word; } li { overflow-wrap: anywhere; margin: .5em 0; } li b { margin-left: .5em; }
ol { padding-left: 1.8em; } #run td { overflow-wrap: anywhere; min-width: 12em; }
summary { font-size: 1.15em; font-weight: 600; margin: 2em 0 .3em; cursor: pointer; }
th, td { text-align: left; vertical-align: top; padding: .2em .9em .2em 0; border-bottom: 1px solid #e3e3e3; }
th { font-weight: 600; } td { overflow-wrap: anywhere; } code { font-size: .9em; }
figure { margin: 0; } figure svg { width: 100%; min-width: 820px; height: auto; }
figure svg text { font-family: "DejaVu Sans", Verdana, Arial, sans-serif; }
 figcaption { color: #444; font-size: .93em; }
.state { border-left: 5px solid #b00020; background: #fbeeee; padding: .5em .9em; margin: .8em 0; }
.no-data { border: 1px dashed #999; color: #555; padding: 1.2em; text-align: center; }
@media (max-width: 600px) { body { margin: 1em auto; padding: 0 .7em; } th, td { padding-right: .5em; } }
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
    mistakes: Mapping[str, Any]
    """Mistakes by label of the test set; empty where there are none."""
    answers: Mapping[str, Any]
    """Answers before and after the training; empty where there are none."""


def write_report(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or of several beside each other.

    Parameters
    ----------
    run_dirs : the run directories
    out : the file; None: ``report.html`` in the run's directory, or in the current one for several runs

    Raises
    ------
    ValueError
        If there is no run, or the file is one of a run's records.
    """
    if not run_dirs:
        raise ValueError("report: expected at least one run, found none")
    if out is None:
        out = run_dirs[0] / REPORT if len(run_dirs) == 1 else Path.cwd() / REPORT
    durable.check_not_input("--out", out, *(run_dir / name for run_dir in run_dirs for name in _INPUTS))
    names = [path.name for path in run_dirs]
    # With a number where two directories have the same name.
    labels = [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
    runs = [_read(path, label) for path, label in zip(run_dirs, labels, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    return durable.write_text(out, _page(runs), lasting=False)


def _read(run_dir: Path, label: str) -> _Run:
    rounds, _ = read_rounds(run_dir)
    try:
        timeline = json_value((run_dir / TIMELINE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        timeline = None
    if not isinstance(timeline, dict) or not isinstance(timeline.get("clusters"), list):
        timeline = None
    try:
        # As it stands: a run of another version may have keys that are no longer known.
        config = read_config(run_dir / CONFIG)
    except (FileNotFoundError, ValueError):
        config = {}
    return _Run(
        path=run_dir.resolve(),
        data=RunData(label=label, rounds=rounds, timeline=timeline),
        summary=read_summary(run_dir),
        config=config,
        machines=read_machines(run_dir),
        mistakes=read_mistakes(run_dir),
        answers=read_answers(run_dir),
    )


def _page(runs: Sequence[_Run]) -> str:
    title = runs[0].data.label if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<h1>CollaPipe: {escape(title)}</h1>", *(_state(run, len(runs) > 1) for run in runs)]
    for number, run in enumerate(runs, 1):
        body += labels_sections(run.mistakes, run.data.label if len(runs) > 1 else "", number)
        body += answers_section(run.answers, run.data.label if len(runs) > 1 else "", number)
        body += receipt_section(run.data, run.data.label if len(runs) > 1 else "", number, run.config.get("costs", ""))
    links = "".join(f'<a href="#{spec.id}">{escape(spec.title)}</a> ' for spec in FIGURES)
    machines = machine_section({run.data.label: run.machines for run in runs})
    learned, modelled = ([_section(spec, runs) for spec in FIGURES if spec.modelled == is_modelled]
                         for is_modelled in (False, True))  # fmt: skip
    summary = "<summary>Network and plans: latency, queues, energy, memory, bytes, pipelines</summary>"
    body += ['<h2 id="about">Run</h2>', _header(runs), f"<nav>{links}</nav>", *learned, _troubles(runs), machines]
    body += [f"<details>{summary}", *modelled, "</details>"]
    return html_page(title, body)


def html_page(title: str, body: Sequence[str]) -> str:
    """Return a page in the reports' style; ``body`` is HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>CollaPipe: {escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _state(run: _Run, named: bool) -> str:
    """Return the state and error of a run that did not finish."""
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
    return wide_table(rows, "run")


def _facts(run: _Run) -> dict[str, str]:
    """HTML of what identifies and sums up a run."""
    config, data, summary = run.config, run.data, run.summary or {}
    # The share of rounds that used the convex programs' powers, and their gap to the optimum.
    plans = [record.get("plan") or {} for record in data.rounds]
    controls = control_summary([c for plan in plans if isinstance(c := plan.get("power_control"), dict)])
    policies = {str(p) for record in data.rounds if (p := (record.get("plan") or {}).get("policy"))}
    policy = ", ".join(sorted(policies)) or config.get("policy", "-")
    wall = as_number(summary.get("wall_s"))
    if np.isnan(wall) and data.rounds:
        wall = as_number(data.rounds[-1].get("wall_s"))
    scores = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} -"
        for name, value in (summary.get("metrics") or {}).items()
    )
    signature = f" ({summary['signature']})" if summary.get("signature") else ""
    command = f"collapipe run --config {shlex.quote(str(run.path / CONFIG))} --set run-dir="
    rounds = f"{len(data.rounds)} of {config.get('num-rounds', '-')}, {config.get('local-steps', '-')} local steps each"
    facts = {
        "name": config.get("name", data.label),
        "status": summary.get("status", "no summary"),
        "strategy": config.get("strategy", "-"),
        "policy": policy,
        "power control": control_text(controls["power_control"]) if controls else "-",
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


def _clusters(data: RunData) -> str:
    """Return the number of clusters, with the sites and devices of a few."""
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
    """Return one line on the guarantee of the noise."""
    if not epsilons:
        return "no noise: activations and updates are sent unchanged"
    parts = []
    for what in ("updates", "activations", "gradients"):
        if amount := epsilons.get(what):
            parts.append(f"{what}: epsilon {amount['epsilon']:.4g} for one {amount['unit']}")
    if amount := epsilons.get("together"):
        parts.append(f"together: epsilon {amount['epsilon']:.4g} for one {amount['unit']}")
    seeded = "; the seed is known, so nothing is guaranteed" if epsilons.get("seeded") else ""
    bare = "lengths and losses" if "gradients" in epsilons else "labels, lengths and losses"
    return f"{'; '.join(parts)}; at delta {epsilons.get('delta', 0):g}{seeded}; {bare} are not covered"


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
    """Return the clusters that failed or were left out, with round and reason; equal reasons share a row."""
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
    return f"{heading}{wide_table([f'<tr>{head}</tr>', *rows])}{more_line}"


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


def _sum(values: np.ndarray[Any, np.dtype[np.float64]], unit: str) -> str:
    return f"{np.nansum(values):,.1f} {unit}" if np.any(np.isfinite(values)) else "-"


def _seconds(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    total = float(np.nansum(values))
    return f"{_sum(values, 's')} ({total / 3600:.2f} h)" if total >= 3600 else _sum(values, "s")


_SHOWN = 100
"""Machines at most."""
_TITLES = ("who", "host", "cores", "memory", "system", "Python", *REPORTED_PACKAGES)


def machine_section(starts_by_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the section, as HTML: a row for each machine in the ``machines.jsonl`` of each run, with its tasks."""
    rows = [
        [label, f"from {int(start['after_round']) + 1}", *row]
        for label, starts in starts_by_run.items()
        for i, start in enumerate(starts)
        # A start on the same machines, with the same versions, has no row.
        if i == 0 or any(start[key] != starts[i - 1][key] for key in ("server", "clusters"))
        for row in _rows(start)
    ]
    heading = '<h2 id="machines">Machines</h2>'
    if not rows:
        return f"{heading}<p>The run has not named its machines.</p>"
    # A column that says the same everywhere says nothing.
    shown = [i for i in range(len(rows[0])) if i > 1 or len({row[i] for row in rows}) > 1]
    titles = ["run", "rounds", *_TITLES]
    head = "".join(f"<th>{titles[i]}</th>" for i in shown)
    cells = ["".join(f"<td>{escape(row[i])}</td>" for i in shown) for row in rows[:_SHOWN]]
    more = f"<p>{len(rows) - _SHOWN} more are in machines.jsonl.</p>" if len(rows) > _SHOWN else ""
    table = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    return f'{heading}<div class="wide">{table}</div>{more}'


def _rows(start: Mapping[str, Any]) -> Iterator[list[str]]:
    """Cells of each machine; the same one stands once."""
    who_by_machine: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for role, number, machine in _places(start):
        names = ("host", "cores", "memory", "system", "python", *REPORTED_PACKAGES)
        key = tuple(_cell(name, machine.get(name)) for name in names)
        who_by_machine.setdefault(key, {}).setdefault(role, []).append(number)
    for key, roles in who_by_machine.items():
        who = "; ".join(f"{role} {', '.join(numbers)}".strip() for role, numbers in roles.items())
        yield [who, *key]


def _places(start: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    yield "server", "", start["server"]
    for cluster, machines in start["clusters"].items():
        with_devices = "" if machines["devices"] else " and devices"
        yield f"control units{with_devices} of clusters", cluster, machines["control_unit"]
    for cluster, machines in start["clusters"].items():
        for device, machine in machines["devices"].items():
            yield f"devices of cluster {cluster}:", device, machine


def _cell(name: str, value: Any) -> str:
    if name == "memory" and isinstance(value, int):
        return f"{value / 1e9:.1f} GB"
    return "-" if value is None else str(value)
