"""A run's numbers in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flower_app.report.tensorboard_log import scalars
from flower_app.watch.run_state import WatchedRun

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


_HELP = {
    "collapipe_running": ("gauge", "1 while the run goes on, 0 when it has ended."),
    "collapipe_round": ("gauge", "Newest round that is done."),
    "collapipe_rounds": ("gauge", "Rounds of the run."),
    "collapipe_waiting_clusters": ("gauge", "Clusters that the round under way waits for."),
    "collapipe_faults_total": ("counter", "Faults by kind, over all rounds."),
    "collapipe_replans_total": ("counter", "Plans that were changed by what was measured."),
    "collapipe_scalar": ("gauge", "Numbers of the newest round, by the tag that TensorBoard shows them with."),
    "collapipe_predicted_seconds": ("gauge", "Local steps of the newest round, as predicted."),
    "collapipe_measured_seconds": ("gauge", "Local steps of the newest round, as measured."),
}


def metrics_text(run: WatchedRun) -> str:
    """Return all metrics of a run."""
    state = run.state(after=0, log_offset=0)
    by_name: dict[str, list[Sample]] = {}
    for sample in _samples(run, state):
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, samples in by_name.items():
        kind, words = _HELP[name]
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels({'run': state['run']} | s.labels)} {_value(s.value)}" for s in samples]
    return "\n".join(lines) + "\n"


def _samples(run: WatchedRun, state: Mapping[str, Any]) -> Iterator[Sample]:
    yield Sample("collapipe_running", {}, float(state["status"] == "running"))
    yield Sample("collapipe_round", {}, float(state["last_round"]))
    yield Sample("collapipe_rounds", {}, float(state["num_rounds"]))
    yield Sample("collapipe_waiting_clusters", {}, float(len(state["waiting"])))
    kinds: dict[str, int] = {}
    for line in run.lines:
        for fault in line["faults"]:
            kinds[str(fault["kind"])] = kinds.get(str(fault["kind"]), 0) + 1
    for kind, number in sorted(kinds.items()):
        yield Sample("collapipe_faults_total", {"kind": kind}, float(number))
    replans = sum(change["taken"] for line in run.lines for change in line["changes"])
    yield Sample("collapipe_replans_total", {}, float(replans))
    for tag, value in scalars(run.newest) if run.newest else ():
        yield Sample("collapipe_scalar", {"tag": tag}, value)
    for prediction in ((run.newest.get("plan") or {}).get("predictions")) or ():
        for name in ("predicted", "measured"):
            labels = {"cluster": str(prediction["cluster"])}
            yield Sample(f"collapipe_{name}_seconds", labels, float(prediction[f"{name}_train_s"]))


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
