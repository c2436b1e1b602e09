"""The command line in a process of its own or in this one, and a configuration that takes seconds."""

import contextlib
import csv
import json
import subprocess
import sys
from pathlib import Path

TINY = {
    "num-rounds": 3,
    "local-steps": 3,
    "batch-size": 8,
    "evaluate-every": 0,
    "data.num-examples": 300,
    "data.evaluation-examples": 20,
    "data.vocab-size": 400,
    "model.width": 16,
    "model.num-heads": 2,
    "model.feed-forward": 32,
    "model.decoder-layers": 1,
    "optimizer.lr": 0.01,
    "optimizer.warmup-steps": 0,
    "task.max-new-tokens": 8,
}


def collapipe(*arguments, cwd, timeout=560):
    command = [sys.executable, "-m", "flower_app.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, timeout=timeout, capture_output=True, text=True)


def collapipe_here(*arguments, cwd):
    """Output of a command that succeeds, without a process of its own."""
    from typer.testing import CliRunner

    from flower_app.cli.main import app

    with contextlib.chdir(cwd):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def sets(**more):
    pairs = {**TINY, **{key.replace("_", "-"): value for key, value in more.items()}}
    return [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]


def rounds(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


def write_rows(name, rows):
    """Write a table of rows, which are dictionaries, in the format of its ending."""
    if name.endswith(".jsonl"):
        Path(name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        return
    with open(name, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if name.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(rows)


def init(*words):
    """Run ``collapipe init`` in this process; returns its exit code, and its text on standard error."""
    from typer.testing import CliRunner

    from flower_app.cli.main import app

    result = CliRunner().invoke(app, ["init", *words])
    return result.exit_code, result.stderr.strip()
