"""Which machines a run has used, as they name themselves before its first round: ``machines.jsonl``.

A run that is continued elsewhere adds a line: its wall seconds are those of several machines then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.runtime.machine import machine_facts
from flower_app.runs.run_directory import read_objects

MACHINES = "machines.jsonl"

MachineFacts = Mapping[str, str | int]
"""As :func:`client_pipeline.runtime.machine.machine_facts` has them."""


class ClusterMachines(NamedTuple):
    """The machines of one cluster."""

    control_unit: MachineFacts
    devices: Mapping[str, MachineFacts]
    """By the device's number; empty where the devices run on the control unit's machine."""


def note_machines(run_dir: Path, completed: int, clusters: Mapping[int, ClusterMachines]) -> None:
    """Add a line with the server's machine, this one, and those of the clusters.

    Parameters
    ----------
    run_dir : the run directory
    completed : rounds that were done before
    clusters : machines of each cluster that named them
    """
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
