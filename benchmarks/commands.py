"""CollaPipe's commands, each in a process of its own: part of other benchmarks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def collapipe(*words: str, folder: Path | None = None) -> str:
    """Run a command in a folder; returns what it printed.

    Raises
    ------
    RuntimeError
        If it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "flower_app.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"collapipe {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def as_settings(keys: Mapping[str, Any]) -> list[str]:
    """Write keys as ``--set`` takes them."""
    return [f"{key}={value}" for key, value in keys.items()]


def train(config: str, settings: Sequence[str], run_dir: Path) -> None:
    """Run ``collapipe run``: a configuration, unless its name is empty, with ``KEY=VALUE`` settings; the last wins."""
    words = [word for setting in (*settings, f"run-dir={run_dir}") for word in ("--set", setting)]
    collapipe("run", *(("--config", config) if config else ()), *words)
