"""Time of a round once a run has found its pace, beside the same samples in one process, and who uses the processor.

    ratio = (seconds of a round) / (seconds of benchmarks/central.py, two threads, on as many samples)

The run and the central training take turns, so that both meet about the same load; the figures are medians over the
rounds after the first ``--skip``, and over the repeats. Processor time is counted from outside, over all processes of
the run; on a machine with other work it is what can be compared.

    python benchmarks/steady_rounds.py                     a table; of another model with --config and --set
    python benchmarks/steady_rounds.py --json              {"round_s": .., "central_s": .., "ratio": .., "cpu_s": ..,
                                                           "central_cpu_s": .., "cpu_by_process": {..}}
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.02
ROUNDS = "[0-9]*/rounds.jsonl"
"""Log of a run, in the folder of the runs, where ``latest`` leads to the same file."""
PATIENCE_S = 1800.0
CENTRAL = Path(__file__).with_name("central.py")
PROCESSES = {
    "flwr-simulation": "server app",
    "ray::ClientAppActor": "Flower's workers",
    "ray::": "actors",
    "/ray/": "Ray",
    "flower": "SuperLink",
    "collapipe": "command",
}
"""Words of command lines, the first that fits, and the owner."""


class TimedRounds:
    """A run, with the time and the processor time at the end of each round."""

    def __init__(self, program: str, config: str | None, sets: Sequence[str], rounds: int, folder: Path) -> None:
        settings = [f"num-rounds={rounds}", f"runs-dir={folder}", *sets]
        command = [
            program,
            "run",
            *(("--config", config) if config else ()),
            *(part for text in settings for part in ("--set", text)),
        ]
        self.ends: list[float] = []
        self.cpu: list[dict[str, float]] = []
        """By process, at the end of each round [s]."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        root, begun = psutil.Process(process.pid), time.monotonic()
        while process.poll() is None and time.monotonic() < begun + PATIENCE_S:
            done = sum(file.read_bytes().count(b"\n") for file in folder.glob(ROUNDS))
            if done > len(self.ends):
                # Of rounds that ended between two looks the last one counts.
                self.ends += [time.monotonic()] * (done - len(self.ends))
                self.cpu += [_cpu_by_process(root)] * (done - len(self.cpu))
            time.sleep(POLL_S)
        output = process.communicate()[0]
        if process.returncode or len(self.ends) < rounds:
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}: {output}")

    def round_s(self, skip: int) -> float:
        """Median time of a round [s]."""
        return statistics.median(b - a for a, b in zip(self.ends[skip:], self.ends[skip + 1 :], strict=False))

    def cpu_by_process(self, skip: int) -> dict[str, float]:
        """Mean processor time of a round [s]."""
        rounds = len(self.cpu) - 1 - skip
        first, last = self.cpu[skip], self.cpu[-1]
        return {name: (last[name] - first.get(name, 0.0)) / rounds for name in last}


def _cpu_by_process(root: psutil.Process) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times, line = process.cpu_times(), " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        name = next((name for mark, name in PROCESSES.items() if mark in line), "others")
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def central(config: str | None, sets: Sequence[str], samples: int, steps: int) -> tuple[float, float]:
    """Time and processor time of the central training of as many samples in as many steps, after a warm-up [s]."""
    code = f"""
import json, sys, time
from dataclasses import replace
sys.path.insert(0, {str(CENTRAL.parent)!r})
import torch
from central import CentralTraining
from flower_app.config.sources import load_config
from flower_app.tasks.base import task
torch.set_num_threads(2)
config = load_config({config!r}, {list(sets)!r})
chosen = task(config.task)
prepared = chosen.prepare(config.data, config.model, config.seed, num_clusters=1)
prepared = replace(prepared, spec=config.adapted(prepared.spec))
data = chosen.cluster_data(config.data, prepared.tokenizer_json, 0, 1, config.seed)
training = CentralTraining(
    prepared.build(config.seed), [data], config.optimizer, {samples // steps}, config.seed,
    recompute=config.recomputes,
)
walls, cpus = [], []
for _ in range(8):
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range({steps}):
        training.train_step()
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
print(json.dumps([sorted(walls[1:])[3], sorted(cpus[1:])[3]]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall_s, cpu_s = json.loads(result.stdout.splitlines()[-1])
    return float(wall_s), float(cpu_s)


def measure(
    program: str, name: str | None, sets: Sequence[str], rounds: int, skip: int, repeats: int
) -> dict[str, Any]:
    """Let the run and the central training take turns."""
    from client_pipeline.system.scenario import load_scenario
    from flower_app.config.sources import load_config

    config = load_config(name, sets)
    num_clusters = config.num_clusters or load_scenario(config.scenario).num_clusters
    samples = config.local_steps * config.batch_size * config.gradient_accumulation * num_clusters
    walls, ratios, centrals, cpus = [], [], [], []
    for repeat in range(repeats):
        before = central(name, sets, samples, config.local_steps)
        with tempfile.TemporaryDirectory(prefix="steady-") as folder:
            run = TimedRounds(program, name, sets, rounds, Path(folder))
        around = [(a + b) / 2 for a, b in zip(before, central(name, sets, samples, config.local_steps), strict=True)]
        walls.append(run.round_s(skip))
        centrals.append(around)
        ratios.append(walls[-1] / around[0])
        cpus.append(run.cpu_by_process(skip))
        print(f"repeat {repeat + 1}: {walls[-1]:.2f} s, {ratios[-1]:.1f} times central", file=sys.stderr)
    by_process = {name: statistics.median(found.get(name, 0.0) for found in cpus) for name in cpus[0]}
    return {
        "samples": samples,
        "round_s": statistics.median(walls),
        "central_s": statistics.median(wall for wall, _ in centrals),
        "ratio": statistics.median(ratios),
        "cpu_s": sum(by_process.values()),
        "central_cpu_s": statistics.median(cpu for _, cpu in centrals),
        "cpu_by_process": by_process,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own = str(Path(sysconfig.get_path("scripts")) / "collapipe")
    parser.add_argument("--program", default=own, metavar="COLLAPIPE")
    parser.add_argument("--config", help="a TOML file, or a name in configs; default: the default run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--skip", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one object to standard output and nothing else")
    args = parser.parse_args()
    figures = measure(args.program, args.config, args.sets, args.rounds, args.skip, args.repeats)
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"a round of {figures['samples']} samples  {figures['round_s']:6.2f} s, processor {figures['cpu_s']:.2f} s")
    print(f"in one process, 2 threads  {figures['central_s']:6.2f} s, processor {figures['central_cpu_s']:.2f} s")
    print(f"ratio                      {figures['ratio']:6.1f}")
    for name, seconds in sorted(figures["cpu_by_process"].items(), key=lambda entry: -entry[1]):
        print(f"    {name:<18} {seconds:6.2f} s of the processor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
