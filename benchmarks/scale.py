"""Costs of 48, 200 and 1,000 simulated devices: memory of all processes, and seconds per round.

``collapipe run`` trains on the scenario ``city`` and on smaller ones made like it; as many clusters train at once as
there are channels. A process counts with what it has to itself (USS): shared libraries and Ray's shared memory are
added once, from the machine's own count. With ``--own-actors`` the smallest network is trained once more with an actor
for each device, and the losses of both runs are compared bit for bit.

    python benchmarks/scale.py [--devices 48,200,1000] [--rounds 5] [--own-actors] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from soak_processes import Family

from client_pipeline.system.scenario import load_scenario

CITY = Path(__file__).resolve().parents[1] / "configs/scenarios/city.toml"
NETWORKS = {48: (5, 23), 200: (20, 0), 1000: (100, 79)}
"""Clusters, and the seed with which they have so many devices in all."""
MODEL = {"model.encoder-layers": 4, "model.width": 64, "decoder-sync": "step"}
_SAMPLE_S = 1.0


def scenario_of(num_devices: int, folder: Path) -> Path:
    """Write the scenario of a network like ``city``; returns its file."""
    clusters, seed = NETWORKS[num_devices]
    text = CITY.read_text(encoding="utf-8")
    for key, old, new in (("clusters", 100, clusters), ("seed", 79, seed)):
        assert f"{key} = {old}" in text, key
        text = text.replace(f"{key} = {old}", f"{key} = {new}")
    path = folder / f"city-{num_devices}.toml"
    path.write_text(text, encoding="utf-8")
    assert sum(len(devices) for devices in load_scenario(str(path)).clusters) == num_devices
    return path


def measure(num_devices: int, rounds: int, folder: Path, sets: dict[str, Any]) -> dict[str, Any]:
    """Train once; returns a row, and raises if the run fails."""
    scenario = scenario_of(num_devices, folder)
    run_dir = folder / f"run-{num_devices}{'-own' if sets else ''}"
    family = Family()
    keys = {"scenario": scenario, "num-rounds": rounds, "run-dir": run_dir, **MODEL, **sets}
    command = [str(Path(sys.executable).with_name("collapipe")), "run"]
    for key, value in keys.items():
        command += ["--set", f"{key}={value}"]
    before = psutil.virtual_memory().available
    started = time.monotonic()
    peak_uss, peak_used, most_processes = 0, 0, 0
    with (folder / f"{run_dir.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | family.environment)
        while process.poll() is None:
            sample = family.sample()
            peak_uss, most_processes = max(peak_uss, sample.uss), max(most_processes, sample.processes)
            peak_used = max(peak_used, before - psutil.virtual_memory().available)
            time.sleep(_SAMPLE_S)
    left = family.left(30.0)
    if process.returncode or left:
        raise RuntimeError(f"{run_dir.name}: exit code {process.returncode}, still running: {left}; see {log.name}")
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    return {
        "devices": num_devices,
        "clusters": NETWORKS[num_devices][0],
        "own_actors": bool(sets),
        "trained_per_round": median(len(line["clusters"]) for line in lines),
        "processes": most_processes,
        "uss_bytes": peak_uss,
        "used_bytes": peak_used,
        "first_round_s": lines[0]["wall_s"],
        "round_s": median(line["round_s"] for line in lines[1:]),
        "whole_s": time.monotonic() - started,
        "losses": [line["train_loss"] for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="48,200,1000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--own-actors", action="store_true")
    parser.add_argument("--folder", type=Path, help="new; kept, with all logs; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = sorted(int(number) for number in given.devices.split(","))
    if unknown := set(sizes) - NETWORKS.keys():
        parser.error(f"--devices: expected some of {', '.join(map(str, NETWORKS))}, found {sorted(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = [measure(size, given.rounds, folder, {}) for size in sizes]
        if given.own_actors:
            own = {"runtime.devices-per-actor": 1, "runtime.clusters-per-actor": 1}
            rows.append(measure(sizes[0], given.rounds, folder, own))
    equal = rows[-1]["losses"] == rows[0]["losses"] if given.own_actors else None
    if given.json:
        print(json.dumps({"rows": rows, "losses_equal": equal}))
        return
    print("devices  clusters  at once  processes  own memory GB  machine's GB  to round 1 s  a round s  in all s")
    for row in rows:
        print(
            f"{row['devices']:>7}  {row['clusters']:>8}  {row['trained_per_round']:>7g}  {row['processes']:>9}  "
            f"{row['uss_bytes'] / 1e9:>13.1f}  {row['used_bytes'] / 1e9:>12.1f}  {row['first_round_s']:>12.1f}  "
            f"{row['round_s']:>9.1f}  {row['whole_s']:>8.1f}{'  an actor each' if row['own_actors'] else ''}"
        )
    if equal is not None:
        print(f"losses of both arrangements equal bit for bit: {'yes' if equal else 'NO'}")


if __name__ == "__main__":
    main()
