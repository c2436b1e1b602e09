"""What a run's directory says at this moment, as JSON values small enough to be asked for twice a second.

A round of a hundred clusters has a line of a hundred kilobytes: the page gets a few numbers of each round, a letter for
what each cluster did in it, and all of the newest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_app.report.data import left_out, used_bytes
from flower_app.runs.followed_rounds import FollowedRounds
from flower_app.runs.live_faults import faults_of_round, missing_signs
from flower_app.runs.run_directory import TIMELINE, read_run_config, read_summary, read_waiting
from strategies.estimation.cluster_times import DEVICE

TRAINED, FAILED_ROUND, LEFT_OUT, WAITED = "t", "f", "l", "."
"""What a cluster did in a round: trained, failed, had no plan, or was not selected."""
_NOTHING: dict[str, list[dict[str, Any]]] = {"faults_now": [], "signs_now": []}
_MOST_LOG_BYTES = 1 << 16
_MOST_FAULTS = 50
_LOGS = ("run.log", "simulation.log")
_REASON_CHARACTERS = 300


class WatchedRun:
    """One run directory; what was read once is kept.

    Parameters
    ----------
    run_dir : of a run that goes on, or has ended
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = read_run_config(run_dir)
        self.lines: list[dict[str, Any]] = []
        """One for each round, shortened."""
        self.newest: dict[str, Any] = {}
        """The newest round's line, whole."""
        self._followed = FollowedRounds(run_dir)

    def refresh(self) -> None:
        """Read the rounds that were added; all of them where a resumed run has taken some back."""
        kept, records = self._followed.read()
        if kept < len(self.lines):
            self.newest = {}
        self.lines = self.lines[:kept] + [short_line(record) for record in records]
        if records:
            self.newest = records[-1]

    def state(self, after: int, log_offset: int) -> dict[str, Any]:
        """Return what is new; ``newest`` and ``timeline``, which are large, with a new round alone.

        Parameters
        ----------
        after : newest round that is known to who asks
        log_offset : bytes of the log that are
        """
        self.refresh()
        summary = read_summary(self.run_dir)
        rounds = [line for line in self.lines if line["round"] > after]
        return {
            "run": self.run_dir.name,
            "status": "running" if summary is None else str(summary.get("status")),
            "summary": summary,
            "num_rounds": self.config.num_rounds,
            "settings": {
                "strategy": self.config.strategy,
                "policy": self.config.policy,
                "costs": self.config.costs,
                "scenario": Path(self.config.scenario).name,
                "task": self.config.task.name,
            },
            "last_round": self.lines[-1]["round"] if self.lines else 0,
            "rounds": rounds,
            **({"newest": details(self.newest), "timeline": self._timeline()} if rounds else {}),
            "waiting": read_waiting(self.run_dir) if summary is None else {},
            **(self._present() if summary is None else _NOTHING),
            "log": self._log(log_offset),
        }

    def _present(self) -> dict[str, list[dict[str, Any]]]:
        """Say what goes wrong in the round in progress: faults, and who gives no sign of life."""
        first = (self.lines[-1]["round"] if self.lines else 0) + 1
        signs = missing_signs(self.run_dir, first)[:_MOST_FAULTS]
        return {
            "faults_now": [_fault(fault) for fault in faults_of_round(self.run_dir, first)][:_MOST_FAULTS],
            "signs_now": [sign._asdict() | {"text": str(sign)} for sign in signs],
        }

    def _timeline(self) -> dict[str, Any] | None:
        try:
            document = json.loads((self.run_dir / TIMELINE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        # The page draws one cluster at a time; messages on links are left out.
        for cluster in document["clusters"]:
            cluster["modelled"] = [event for event in cluster["modelled"] if event[0] in ("F", "B", "W", "FB")]
        return dict(document)

    def _log(self, offset: int) -> dict[str, Any]:
        path = next((p for name in _LOGS if (p := self.run_dir / "logs" / name).is_file()), None)
        if path is None:
            return {"offset": 0, "text": ""}
        size = path.stat().st_size
        begin = offset if 0 < offset <= size else max(size - _MOST_LOG_BYTES, 0)
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(_MOST_LOG_BYTES)
        return {"offset": begin + len(data), "text": data.decode(errors="replace")}


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


def details(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the newest round alone."""
    names = {c["cluster"]: c.get("name") for c in (record.get("virtual") or {}).get("clusters") or ()}
    return {
        "clusters": [
            {
                "cluster": report["cluster"],
                "name": names.get(report["cluster"]),
                "num_devices": len((report.get("plan") or {}).get("delta") or ()),
                "devices": {
                    k: {"blocks": d.get("blocks"), "busy_s": d.get("busy_s"), "bytes": _number(used_bytes(d))}
                    for k, d in (report.get("devices") or {}).items()
                },
            }
            for report in record.get("clusters") or ()
        ],
        "estimates": [
            {
                "cluster": entry["cluster"],
                "times": [
                    {key: time[key] for key in ("place", "fixed_s", "sample_s")}
                    for time in entry["times"]
                    if time["kind"] == DEVICE
                ],
            }
            for entry in (record.get("plan") or {}).get("estimates") or ()
        ],
    }


def _states(record: Mapping[str, Any]) -> str:
    entries = {int(c["cluster"]): WAITED for c in (record.get("virtual") or {}).get("clusters") or ()}
    entries |= {int(entry["cluster"]): LEFT_OUT for entry in left_out(record)}
    entries |= {int(report["cluster"]): TRAINED for report in record.get("clusters") or ()}
    entries |= {int(f["cluster"]): FAILED_ROUND for f in record.get("failed") or () if f.get("cluster") is not None}
    return "".join(entries.get(n, WAITED) for n in range(max(entries, default=-1) + 1))


def _fault(fault: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: fault.get(key) for key in ("kind", "round", "cluster", "device", "step", "recovered", "seconds")}
    return kept | {"reason": str(fault.get("reason", ""))[:_REASON_CHARACTERS]}


def _number(value: float) -> float | None:
    return value if value == value else None
