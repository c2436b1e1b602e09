"""The last round's pipelines as a Chrome trace, which https://ui.perfetto.dev and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client_pipeline import durable
from flower_app.runs.run_directory import TIMELINE

TRACE = "trace.json"

_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "FB": "forward and backward",
    "z": "activations",
    "g": "gradient",
    "zg": "activations and gradient",
}
_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "W": "thread_state_uninterruptible",
    "FB": "thread_state_runnable",
}
"""Names of the trace viewer's own palette; Perfetto colours by name."""
_STAGES = ("F", "B", "W", "FB")
_MICROSECONDS = 1e6
CLOCKS = ("modelled", "measured")


def chrome_trace(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``timeline.json`` into the trace event format.

    One process for each cluster's modelled and one for its measured pipeline, in the order of the clusters; in it one
    thread for each stage, and one for each direction of the link after it: both may be busy at once.

    Parameters
    ----------
    timeline : ``round`` and ``clusters``, each with ``order`` and the events ``modelled`` and ``measured``

    Returns
    -------
    A JSON object; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for cluster in timeline.get("clusters") or ():
        for clock in CLOCKS:
            if cluster.get(clock):
                events += _process(cluster, clock, pid=2 * int(cluster["cluster"]) + 1 + CLOCKS.index(clock))
    trace_values = {"round": timeline.get("round")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": trace_values}


def write_trace(run_dir: Path) -> Path | None:
    """Write ``trace.json`` beside ``timeline.json``; None where the run has no timeline."""
    try:
        timeline = json.loads((run_dir / TIMELINE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return durable.write_text(run_dir / TRACE, json.dumps(chrome_trace(timeline)), lasting=False)


def _process(cluster: Mapping[str, Any], clock: str, pid: int) -> list[dict[str, Any]]:
    """Names of the process and its threads, then what happened in them."""
    clock_events: Sequence[Sequence[Any]] = cluster[clock]
    site = f" ({cluster['name']})" if cluster.get("name") else ""
    metadata = [_name("process_name", pid, 0, f"cluster {cluster['cluster']}{site}, {clock}")]
    metadata.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for thread in sorted({_thread(str(kind), int(place)) for kind, place, *_ in clock_events}):
        place, role = divmod(thread - 1, 3)
        order: Sequence[int] = cluster.get("order") or ()
        name = f"stage {place}" + (f", device {order[place]}" if place < len(order) else "")
        if role:
            name = f"link {place} to {place + 1}" if role == 1 else f"link {place + 1} to {place}"
        metadata.append(_name("thread_name", pid, thread, name))
        metadata.append(
            {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": thread, "args": {"sort_index": thread}}
        )
    return metadata + [_complete(event, pid) for event in clock_events]


def _complete(event: Sequence[Any], pid: int) -> dict[str, Any]:
    kind, place, micro_batch, start, end = event
    trace = {
        "ph": "X",
        "name": f"{kind}{micro_batch}",
        "cat": _NAMES.get(kind, kind),
        "pid": pid,
        "tid": _thread(kind, place),
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {"what": _NAMES.get(kind, kind), "micro-batch": micro_batch},
    }
    return trace | ({"cname": _COLOURS[kind]} if kind in _COLOURS else {})


def _thread(kind: str, place: int) -> int:
    """A stage has 1, 4, 7, ...; then come the link to the next stage, and the way back."""
    return 3 * place + (1 if kind in _STAGES else 3 if kind == "g" else 2)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
