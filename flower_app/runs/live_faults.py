"""Faults of the round under way, before its line is written, for the watch page and the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.documents import json_value
from client_pipeline.link.cluster_news import ENDED
from flower_app.runs.run_directory import CLUSTERS, read_live

CLUSTER_SILENT_S = 1.3
"""A control unit reports twice a second; after this time it counts as silent [s]."""


class MissingSign(NamedTuple):
    """A device, or a whole cluster, that gives no sign of life."""

    round: int
    cluster: int
    device: int | None
    """Number of the device; None: the control unit."""
    state: str
    """``silent``, or ``ended``: its process is gone."""
    seconds: float
    """Since then [s]."""

    def __str__(self) -> str:
        """One line for people."""
        place = f"cluster {self.cluster}" + ("" if self.device is None else f", device {self.device}")
        if self.state == ENDED:
            return f"{place}: its process ended {self.seconds:.0f} s ago"
        return f"{place}: no sign of life for {self.seconds:.0f} s"


def faults_of_round(run_dir: Path, first: int) -> list[dict[str, Any]]:
    """Faults of rounds from ``first`` on: those that control units tell, and notes of others on this machine."""
    live = {cluster: news for cluster, news in read_live(run_dir).items() if news["round"] >= first}
    faults = [fault for news in live.values() for fault in news["faults"]]
    for path in sorted((run_dir / CLUSTERS).glob("*/faults.json")):
        try:
            kept = json_value(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # It is being replaced, or its cluster is being started again.
            continue
        if kept["round"] >= first:
            faults += [fault for fault in kept["faults"] if fault.get("cluster") not in live]
    return faults


def missing_signs(run_dir: Path, first: int) -> list[MissingSign]:
    """Return devices and control units without a sign of life in rounds from ``first`` on, as the server sees it."""
    now, missing = time.time(), []
    for cluster, news in sorted(read_live(run_dir).items()):
        round_, silent_s = int(news["round"]), max(now - float(news["heard"]), 0.0)
        if round_ < first:
            continue
        if silent_s > CLUSTER_SILENT_S:
            missing.append(MissingSign(round_, cluster, None, "silent", silent_s))
        for sign in news["signs"]:
            since_s = max(now - float(sign["since"]), 0.0)
            missing.append(MissingSign(round_, cluster, int(sign["device"]), str(sign["state"]), since_s))
    return missing
