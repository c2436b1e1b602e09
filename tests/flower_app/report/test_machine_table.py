"""Machines of a run: noted at each start, and shown in the report."""

import re

from client_pipeline.runtime.ray.machine import machine_facts
from flower_app.report.page import machine_section
from flower_app.runs.machines import ClusterMachines, note_machines, read_machines

HERE = machine_facts()
BOX = HERE | {"host": "box<1>", "cores": 4, "memory": 8_000_000_000, "torch": "2.9.0"}
DEVICE = HERE | {"host": "pi", "cores": 2, "memory": 1_500_000_000}


def cells(html):
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


def noted(folder, *starts):
    for completed, clusters in starts:
        note_machines(folder, completed, clusters)
    return read_machines(folder)


def test_a_simulation_is_one_row_of_one_machine(tmp_path):
    starts = noted(tmp_path, (0, {0: ClusterMachines(HERE, {}), 1: ClusterMachines(HERE, {})}))
    header, row = cells(machine_section({"demo": starts}))
    assert header == ["who", "host", "cores", "memory", "system", "Python", "torch", "ray", "flwr"][: len(header)]
    assert row[:3] == ["server; control units and devices of clusters 0, 1", HERE["host"], str(HERE["cores"])]
    assert row[3] == f"{HERE['memory'] / 1e9:.1f} GB" and row[5:] == [
        HERE[name] for name in ("python", "torch", "ray", "flwr")
    ]


def test_real_machines_stand_one_by_one_and_those_of_a_continued_run_too(tmp_path):
    first = {0: ClusterMachines(BOX, {"0": DEVICE, "1": DEVICE | {"host": "pj"}})}
    starts = noted(tmp_path, (0, first), (4, first), (7, {0: ClusterMachines(BOX, {"0": DEVICE})}))
    assert [start["after_round"] for start in starts] == [0, 4, 7]
    html = machine_section({"demo": starts})
    header, *rows = cells(html)
    assert header[:2] == ["rounds", "who"] and "box&lt;1&gt;" in html
    assert [row[:3] for row in rows] == [
        ["from 1", "server", HERE["host"]],
        ["from 1", "control units of clusters 0", "box&lt;1&gt;"],
        ["from 1", "devices of cluster 0: 0", "pi"],
        ["from 1", "devices of cluster 0: 1", "pj"],
        # The start after round 4 was on the same machines.
        ["from 8", "server", HERE["host"]],
        ["from 8", "control units of clusters 0", "box&lt;1&gt;"],
        ["from 8", "devices of cluster 0: 0", "pi"],
    ]
    assert ["8.0 GB", "1.5 GB"] == [rows[1][4], rows[2][4]] and rows[1][7] == "2.9.0"
