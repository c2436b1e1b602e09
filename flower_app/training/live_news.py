"""``live.json`` of a run directory: news of the control units about the round in progress.

One file for all clusters, written at once when something has changed and otherwise twice a second at most.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from client_pipeline.link.cluster_news import ClusterNews
from flower_app.runs.run_directory import write_live
from strategies.printable import printable

_WRITE_S = 0.5


class LiveNews:
    """Latest news of each cluster. Safe to call from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._clusters: dict[int, dict[str, Any]] = {}
        self._written_at = 0.0

    def hear(self, cluster: int, round_: int, text: str) -> None:
        """Take a piece of news.

        Raises
        ------
        ValueError
            If it is none, or of another round than its sender's token.
        """
        news = ClusterNews.from_text(text, cluster, printable)
        if news.round != round_:
            raise ValueError(f"news: expected those of round {round_}")
        now = time.time()
        entry = {
            "round": round_,
            "heard": now,
            "faults": [dict(fault) for fault in news.faults],
            "signs": [{"device": sign.device, "state": sign.state, "since": now - sign.seconds} for sign in news.signs],
        }
        with self._lock:
            before = self._clusters.pop(cluster, None)
            if not news.is_over:
                self._clusters[cluster] = entry
            has_changed = news.is_over or _content(before) != _content(entry)
            if has_changed or now - self._written_at >= _WRITE_S:
                self._written_at = now
                write_live(self._run_dir, self._clusters)

    def __enter__(self) -> LiveNews:
        """Remove the news of an earlier process."""
        write_live(self._run_dir, {})
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all news: no round is in progress."""
        with self._lock:
            self._clusters.clear()
            write_live(self._run_dir, {})


def _content(entry: dict[str, Any] | None) -> Any:
    if entry is None:
        return None
    return entry["faults"], [(sign["device"], sign["state"]) for sign in entry["signs"]]
