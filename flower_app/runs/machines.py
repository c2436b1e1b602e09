"""Machines of a run, as they name themselves before its first round: ``machines.jsonl``.

A run that is continued elsewhere adds a line: its wall seconds are those of several machines then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.runtime.ray.machine import machine_facts
from flower_app.runs.run_directory import read_objects

MACHINES = "machines.jsonl"

MachineFacts = Mapping[str, str | int]
"""Facts of :func:`client_pipeline.runtime.ray.machine.machine_facts`."""


class ClusterMachines(NamedTuple):
    """The machines of one cluster."""

    control_unit: MachineFacts
    devices: Mapping[str, MachineFacts]
    """By the device's number; empty where the devices run on the control unit's machine."""


def note_machines(run_dir: Path, completed: int, clusters: Mapping[int, ClusterMachines]) -> None:
    """Add a line with the machines of the server, this one, and of the clusters, after ``completed`` rounds."""
    line = {
        "after_round": completed,
        "server": machine_facts(),
        "clusters": {str(n): machines._asdict() for n, machines in sorted(clusters.items())},
    }
    # Nothing goes on from it: a line that a crash takes along is no loss.
    with (run_dir / MACHINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_machines(run_dir: Path) -> list[dict[str, Any]]:
    """Read the machines of every start of a run; of earlier releases there are none."""
    return read_objects(run_dir / MACHINES)[0]
