"""Phases of a run before its first round and after its last, noted by the server app: ``phases.jsonl``.

Who follows a run shows these, so that half a minute of start-up does not look like a run that hangs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flower_app.runs.run_directory import read_objects

PHASES = "phases.jsonl"
LAUNCHING = "Flower's programs"
LOADING = "data, tokenizer and model"
NODES = "nodes to come"
SETTING_UP = "clusters to load their data"
TRAINING = "round 1"
TESTING = "test score"


def begin_phase(run_dir: Path, phase: str) -> None:
    """Note that a phase begins now, and with it that the one before has ended."""
    # Nothing goes on from it: a line that a crash takes along is no loss.
    with (run_dir / PHASES).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"phase": phase, "began": time.time()}) + "\n")


def phases_size(run_dir: Path) -> int:
    """Return the file's length: earlier phases of a continued run are older [byte]."""
    path = run_dir / PHASES
    return path.stat().st_size if path.exists() else 0


def read_phases(run_dir: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines after byte ``offset``.

    Returns
    -------
    Phases with ``phase`` and ``began`` [s since 1970], and the offset from which to go on.
    """
    return read_objects(run_dir / PHASES, offset)
