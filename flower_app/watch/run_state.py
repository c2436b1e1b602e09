"""State of a run, read from its directory, as JSON values small enough for two requests a second.

A round of a hundred clusters has a line of a hundred kilobytes: the page gets a few numbers of each round, a letter for
what each cluster did in it, and all of the newest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client_pipeline.documents import json_value
from client_pipeline.link.cluster_news import ENDED
from client_pipeline.system.scenario_table import MOST_COUNT
from flower_app.report.data import left_out, used_bytes
from flower_app.runs.followed_rounds import FollowedRounds, seconds_left
from flower_app.runs.live_faults import MissingSign, faults_of_round, missing_signs
from flower_app.runs.run_directory import CONFIG, TIMELINE, read_live, read_run_config, read_summary, read_waiting
from flower_app.runs.run_logs import newest_lines
from strategies.estimation.cluster_times import DEVICE

TRAINED, FAILED_ROUND, LEFT_OUT, WAITED = "t", "f", "l", "."
"""Letters for a cluster in a round: it trained, failed, had no plan, or was not selected."""
_NOTHING: dict[str, list[dict[str, Any]]] = {"faults_now": [], "signs_now": []}
_MOST_FAULTS = 50
_REASON_CHARACTERS = 300


class WatchedRun:
    """One run directory; what was read once is kept."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = read_run_config(run_dir)
        self._config_stamp = self._stamp()
        self.lines: list[dict[str, Any]] = []
        """One for each round, shortened."""
        self.newest: dict[str, Any] = {}
        """The newest round's line, whole."""
        self._followed = FollowedRounds(run_dir)
        self._clusters: dict[int, dict[str, Any]] = {}
        """Each cluster as the newest round that it trained in has it; one that is lost stays."""
        self._ended: dict[int, list[tuple[MissingSign, float]]] = {}
        """Devices whose process had ended when their cluster was heard last, and since when, by cluster."""

    def refresh(self) -> None:
        """Read the rounds that were added; all of them where a resumed run has taken some back."""
        if (stamp := self._stamp()) != self._config_stamp:
            # A run that goes on may have more rounds than it began with.
            self.config, self._config_stamp = read_run_config(self.run_dir), stamp
        kept, records = self._followed.read()
        if kept < len(self.lines):
            self.newest = {}
            for entry in self._clusters.values():
                entry["lost"] = None
        self.lines = self.lines[:kept] + [short_line(record) for record in records]
        for record in records:
            note_clusters(self._clusters, record)
        if records:
            self.newest = records[-1]

    def state(self, after: int, log_offset: int) -> dict[str, Any]:
        """Return what is new; ``newest`` and ``timeline``, which are large, with a new round alone."""
        self.refresh()
        summary = read_summary(self.run_dir)
        rounds = [line for line in self.lines if line["round"] > after]
        details = {
            "round": self.newest.get("round"),
            "clusters": [self._clusters[n] for n in sorted(self._clusters)],
            "estimates": estimates(self.newest),
        }
        return {
            "run": self.run_dir.name,
            "status": "running" if summary is None else str(summary.get("status")),
            "summary": summary,
            "num_rounds": self.config.num_rounds,
            "left_s": seconds_left(self.lines, self.config.num_rounds) if summary is None else 0.0,
            "settings": {
                "strategy": self.config.strategy,
                "policy": self.config.policy,
                "costs": self.config.costs,
                "scenario": Path(self.config.scenario).name,
                "task": self.config.task.name,
            },
            "last_round": self.lines[-1]["round"] if self.lines else 0,
            "rounds": rounds,
            **({"newest": details, "timeline": self._timeline()} if rounds else {}),
            "waiting": read_waiting(self.run_dir) if summary is None else {},
            **(self._present() if summary is None else _NOTHING),
            "log": newest_lines(self.run_dir, log_offset, is_over=summary is not None),
        }

    def _present(self) -> dict[str, list[dict[str, Any]]]:
        """Say what goes wrong in the round in progress: faults, and who gives no sign of life."""
        first = (self.lines[-1]["round"] if self.lines else 0) + 1
        signs = self._signs(first)[:_MOST_FAULTS]
        return {
            "faults_now": [_fault(fault) for fault in faults_of_round(self.run_dir, first)][:_MOST_FAULTS],
            "signs_now": [sign._asdict() | {"text": str(sign)} for sign in signs],
        }

    def _signs(self, first: int) -> list[MissingSign]:
        """Return who gives no sign of life; between rounds, those whose process had ended before."""
        now, heard = time.time(), read_live(self.run_dir)
        signs = missing_signs(self.run_dir, first)
        for cluster in heard:
            ended = [sign for sign in signs if sign.cluster == cluster and sign.state == ENDED]
            self._ended[cluster] = [(sign, now - sign.seconds) for sign in ended]
        earlier = [pair for cluster, pairs in self._ended.items() if cluster not in heard for pair in pairs]
        return [*signs, *(sign._replace(seconds=now - since) for sign, since in earlier)]

    def _stamp(self) -> int:
        return (self.run_dir / CONFIG).stat().st_mtime_ns

    def _timeline(self) -> dict[str, Any] | None:
        try:
            document = json_value((self.run_dir / TIMELINE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # The page draws one cluster at a time; messages on links are left out.
        for cluster in document["clusters"]:
            cluster["modelled"] = [event for event in cluster["modelled"] if event[0] in ("F", "B", "W", "FB")]
        return dict(document)


def short_line(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round's line in a few hundred bytes."""
    virtual, plan = record.get("virtual") or {}, record.get("plan") or {}
    predictions = plan.get("predictions") or []
    slowest = max(predictions, key=lambda p: p["measured_train_s"], default=None)
    return {
        "round": int(record["round"]),
        "loss": record.get("train_loss"),
        "metrics": record.get("metrics") or {},
        "round_s": record.get("round_s"),
        "wall_s": record.get("wall_s"),
        "latency_s": virtual.get("latency_s"),
        "energy_j": virtual.get("energy_j"),
        "bytes_up": record.get("bytes_up"),
        "bytes_down": record.get("bytes_down"),
        "queue": max((c.get("queue") or 0.0 for c in virtual.get("clusters") or ()), default=None),
        "states": _states(record),
        "predicted_s": slowest and slowest["predicted_train_s"],
        "measured_s": slowest and slowest["measured_train_s"],
        "faults": [_fault(fault) for fault in (record.get("faults") or ())[:_MOST_FAULTS]],
        "changes": [
            {"cluster": c["cluster"], "taken": c["taken"], "reason": c["reason"]} for c in plan.get("changes") or ()
        ],
    }


def note_clusters(clusters: dict[int, dict[str, Any]], record: Mapping[str, Any]) -> None:
    """Put a round's news of each cluster in place of the older ones.

    Parameters
    ----------
    clusters : by number: ``cluster``, ``name``, ``num_devices``; ``devices`` of the newest ``round``
        that it trained in; ``lost``, the round since which it has failed
    record : line of a round
    """
    for planned in (record.get("virtual") or {}).get("clusters") or ():
        entry = _entry(clusters, int(planned["cluster"]))
        entry["name"] = planned.get("name") or entry["name"]
        entry["num_devices"] = len(planned.get("delta") or ()) or entry["num_devices"]
    for report in record.get("clusters") or ():
        entry = _entry(clusters, int(report["cluster"]))
        devices = {
            k: {"blocks": d.get("blocks"), "busy_s": d.get("busy_s"), "bytes": _number(used_bytes(d))}
            for k, d in (report.get("devices") or {}).items()
        }
        num_devices = len((report.get("plan") or {}).get("delta") or ()) or entry["num_devices"]
        entry.update(num_devices=num_devices, devices=devices, round=record["round"], lost=None)
    for failed in record.get("failed") or ():
        if failed.get("cluster") is not None:
            entry = _entry(clusters, int(failed["cluster"]))
            entry["lost"] = entry["lost"] or record["round"]


def _entry(clusters: dict[int, dict[str, Any]], number: int) -> dict[str, Any]:
    unknown: dict[str, Any] = {
        "cluster": number,
        "name": None,
        "num_devices": 0,
        "devices": {},
        "round": None,
        "lost": None,
    }
    return clusters.setdefault(number, unknown)


def estimates(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a TEB takes on each device, as estimated after a round."""
    return [
        {
            "cluster": entry["cluster"],
            "times": [
                {key: time[key] for key in ("place", "fixed_s", "sample_s")}
                for time in entry["times"]
                if time["kind"] == DEVICE
            ],
        }
        for entry in (record.get("plan") or {}).get("estimates") or ()
    ]


def _states(record: Mapping[str, Any]) -> str:
    entries = {int(c["cluster"]): WAITED for c in (record.get("virtual") or {}).get("clusters") or ()}
    entries |= {int(entry["cluster"]): LEFT_OUT for entry in left_out(record)}
    entries |= {int(report["cluster"]): TRAINED for report in record.get("clusters") or ()}
    entries |= {int(f["cluster"]): FAILED_ROUND for f in record.get("failed") or () if f.get("cluster") is not None}
    return "".join(entries.get(n, WAITED) for n in range(min(max(entries, default=-1) + 1, MOST_COUNT)))


def _fault(fault: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: fault.get(key) for key in ("kind", "round", "cluster", "device", "step", "recovered", "seconds")}
    return kept | {"reason": str(fault.get("reason", ""))[:_REASON_CHARACTERS]}


def _number(value: float) -> float | None:
    return value if value == value else None
