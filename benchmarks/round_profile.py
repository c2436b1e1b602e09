"""Processor time of a steady round by activity: the run of ``steady_rounds.py`` under a sampler.

    python benchmarks/round_profile.py [--config NAME] [--set KEY=VALUE] [--rounds 24] [--skip 4]
    python benchmarks/round_profile.py --json         {"round_s": .., "cpu_s": .., "by_work": {..}}

Shares are those of all that Python's threads use, over all processes of the run; sampling makes a round a tenth longer
and more. Threads of Ray, gRPC and gloo that are not Python's are counted from outside, as the rest of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_sampler
import psutil
from watch_overhead import cpu_s

WORK = (
    ("optimizer steps", ("PartOptimizer.apply", "HeadTrainer.apply")),
    ("decoder: forward and backward pass", ("HeadTrainer.gradient",)),
    ("TEBs: forward and backward passes", ("Stage.forward", "Stage.backward")),
    ("checkpoints", ("write_checkpoint", "commit_round", "RoundCloser._commit")),
    ("evaluation", ("RoundCloser._evaluate", "GlobalModels.score")),
    ("plan: matching, power, segments", ("RoundPlanner.plan",)),
    ("average, and checks of what came", ("aggregate_train", "ReplyIntake", "CollaPipe.join")),
    ("stages hand tensors over, and wait", ("transport.py", "shared_process.py", "tensor_mailbox.py")),
    (
        "Ray: calls, answers, copies",
        ("site-packages/ray/", "ray/_private", "python/ray", "ray/actor.py", "shared_actor.py"),
    ),
    (
        "decoder's stream: frames and gRPC",
        ("site-packages/grpc/", "grpc/_", "link/stream.py", "link/frames.py", "decoder/service.py"),
    ),
    ("embedding, and threads of a batch", ("batch_run.py",)),
    ("control unit: the rest", ("control_unit.py", "round_report.py")),
    ("devices: the rest", ("runtime/device.py", "runtime/stage.py")),
    ("Flower: messages, records, its programs", ("site-packages/flwr/", "flwr/", "serverapp/")),
)
"""Kind of work, and what marks it in the name of a function or its file: the innermost mark of a stack counts."""
OTHER = "other Python"
NOT_PYTHON = "threads that are not Python's"
ROUNDS = "[0-9]*/rounds.jsonl"


def kind_of(stack: str) -> str:
    """Return the activity of a stack of functions."""
    names = stack.split(";")
    # What is computed counts as that, whatever is called for it.
    for kind, marks in WORK[:7]:
        if any(mark in name for name in names for mark in marks):
            return kind
    for name in reversed(names):
        for kind, marks in WORK[7:]:
            if any(mark in name for mark in marks):
                return kind
    return OTHER


def profile(program: str, config: str | None, sets: Sequence[str], rounds: int, skip: int) -> dict[str, Any]:
    """Run, and sum up what the rounds after the first ``skip`` took."""
    with tempfile.TemporaryDirectory(prefix="round-profile-") as name:
        folder = Path(name)
        samples, start, runs = folder / "samples", folder / "start", folder / "runs"
        samples.mkdir()
        start.mkdir()
        text = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport cpu_sampler\ncpu_sampler.start()\n"
        (start / "sitecustomize.py").write_text(text)
        settings = [f"num-rounds={rounds}", f"runs-dir={runs}", "evaluate-every=0", *sets]
        command = [program, "run", *(("--config", config) if config else ())]
        command += [part for setting in settings for part in ("--set", setting)]
        variables = {"PYTHONPATH": str(start), cpu_sampler.FOLDER: str(samples)}
        run = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | variables
        )
        marks: list[tuple[float, float]] = []
        for number in (skip, rounds - 1):
            while sum(file.read_bytes().count(b"\n") for file in runs.glob(ROUNDS)) < number:
                if run.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)}: ended with exit code {run.returncode}")
                time.sleep(0.05)
            marks.append((time.time(), cpu_s(psutil.Process(run.pid))))
        run.wait()
        (begun, used_before), (ended, used) = marks
        seconds: Counter[str] = Counter()
        for file in samples.iterdir():
            sample = json.loads(file.read_text())
            if begun < sample["at"] - cpu_sampler.WRITE_S / 2 <= ended:
                for stack, spent in sample["seconds"].items():
                    seconds[kind_of(stack)] += spent
    count = rounds - 1 - skip
    round_cpu_s = (used - used_before) / count
    by_work = {kind: spent / count for kind, spent in seconds.most_common()}
    by_work[NOT_PYTHON] = max(round_cpu_s - sum(by_work.values()), 0.0)
    return {"round_s": (ended - begun) / count, "cpu_s": round_cpu_s, "by_work": by_work}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    program = str(Path(sysconfig.get_path("scripts")) / "collapipe")
    parser.add_argument("--program", default=program, metavar="COLLAPIPE")
    parser.add_argument("--config", help="a TOML file, or a name in configs; default: the default run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--skip", type=int, default=4, help="rounds that do not count")
    parser.add_argument("--json", action="store_true", help="print one object to standard output and nothing else")
    args = parser.parse_args()
    shares = profile(args.program, args.config, args.sets, args.rounds, args.skip)
    if args.json:
        print(json.dumps(shares))
        return 0
    print(f"a round {shares['round_s']:.2f} s, of the processor {shares['cpu_s']:.2f} s")
    total = sum(shares["by_work"].values())
    for kind, spent in sorted(shares["by_work"].items(), key=lambda entry: -entry[1]):
        print(f"    {kind:<44} {spent:6.3f} s {100 * spent / total:5.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
