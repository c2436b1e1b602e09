"""Metrics of a run for Prometheus: of one run directory, or of the newest in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flower_app.report.data import scalars
from flower_app.runs.run_directory import LATEST, find_run, read_summary, read_waiting
from flower_app.watch.prometheus_text import Sample, exposition
from flower_app.watch.run_state import WatchedRun

_MEANINGS = {
    "collapipe_running": "1 while the run goes on, 0 when it has ended.",
    "collapipe_round": "Newest round that is done.",
    "collapipe_rounds": "Rounds of the run.",
    "collapipe_waiting_clusters": "Clusters that the round under way waits for.",
    "collapipe_faults_total": "Faults by kind, over all rounds.",
    "collapipe_replans_total": "Plans that were changed by what was measured.",
    "collapipe_scalar": "Numbers of the newest round, by the tag that TensorBoard shows them with.",
    "collapipe_predicted_seconds": "Local steps of the newest round, as predicted.",
    "collapipe_measured_seconds": "Local steps of the newest round, as measured.",
}


def metrics_text(run: WatchedRun) -> str:
    """Return all metrics of a run."""
    run.refresh()
    return exposition(_samples(run), _MEANINGS, {"run": run.run_dir.name})


class NewestRun:
    """Metrics of the newest run in a folder, which may be missing, looked up at each request."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._run: WatchedRun | None = None

    def text(self) -> str:
        """Return all metrics; an empty text without a run."""
        try:
            run_dir = find_run(self._runs_dir / LATEST)
        except FileNotFoundError:
            return exposition((), _MEANINGS, {})
        if self._run is None or self._run.run_dir != run_dir:
            self._run = WatchedRun(run_dir)
        return metrics_text(self._run)


def _samples(run: WatchedRun) -> Iterator[Sample]:
    summary = read_summary(run.run_dir)
    yield Sample("collapipe_running", {}, float(summary is None))
    yield Sample("collapipe_round", {}, float(run.lines[-1]["round"] if run.lines else 0))
    yield Sample("collapipe_rounds", {}, float(run.config.num_rounds))
    waiting = read_waiting(run.run_dir) if summary is None else {}
    yield Sample("collapipe_waiting_clusters", {}, float(len(waiting)))
    kinds = Counter(str(fault["kind"]) for line in run.lines for fault in line["faults"])
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
