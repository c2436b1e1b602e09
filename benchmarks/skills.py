"""Four skills of SmolLM2, two of them in each cluster: what tuning in clusters keeps of one process, and who else does.

The skills are generators of reasoning-gym (``pip install reasoning-gym``), whose answers can be checked: exact match of
held-out questions, drawn from other seeds. A row is one training by one method at one learning rate with one seed: the
rates are compared with the first seed by validation, beyond the grid where its edge is the best, and the others train
at the best. Rows that are there are not trained again, so a run of this script goes on where the last one ended.

    python benchmarks/skills.py data FOLDER
    python benchmarks/skills.py run FOLDER --model MODEL --rows rows.jsonl
    python benchmarks/skills.py table --rows rows.jsonl [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from central import move
from process_memory import watch

from client_pipeline.families.families import merged
from client_pipeline.partition.parts import ModelParts
from flower_app.config.sources import load_config
from flower_app.runs.run_directory import find_run, read_rounds
from flower_app.saved_model import load_model
from flower_app.tasks.base import task

SKILLS: dict[str, dict[str, Any]] = {
    "needle_haystack": {"min_num_statements": 3, "max_num_statements": 4},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "word_sequence_reversal": {"min_words": 3, "max_words": 4},
    "fraction_simplification": {"min_value": 1, "max_value": 12, "min_factor": 2, "max_factor": 5, "styles": ["plain"]},
}
"""Generators and their settings; the first two are the skills of cluster 0.

Of ten that were tried the model answered none before tuning. Of six that 100 steps in one process then taught it, these
four had the most exact answers of 30: 0.87, 0.30, 0.63 and 0.53 (family_relationships 0.23, number_filtering 0.10).
"""
TRAIN, VALIDATION, TEST = 400, 25, 50
"""Conversations of each skill."""
_SEEDS = {"train": 1, "validation": 1001, "test": 2001}
_SYSTEM = "Answer only."
RATES = (1e-3, 2e-3, 4e-3)
METHODS = ("base", "central", "collapipe", "fedavg", "alone-0", "alone-1")
HERE = Path(__file__).parent
Row = dict[str, Any]


def write_data(folder: Path) -> None:
    """Write a file of conversations for each cluster, and the held-out ones of all skills."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(SKILLS)
    files = {
        "cluster-0": (names[:2], "train", TRAIN),
        "cluster-1": (names[2:], "train", TRAIN),
        "validation": (names, "validation", VALIDATION),
        "test": (names, "test", TEST),
    }
    for file, (skills, split, number) in files.items():
        rows = [row for skill in skills for row in _conversations(skill, _SEEDS[split], number)]
        random.Random(_SEEDS[split]).shuffle(rows)
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _conversations(skill: str, seed: int, number: int) -> Iterator[Row]:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(skill, size=number, seed=seed, **SKILLS[skill]):
        texts = {"system": _SYSTEM, "user": entry["question"], "assistant": str(entry["answer"])}
        messages = [{"role": role, "content": content} for role, content in texts.items()]
        yield {"messages": messages, "skill": skill}


def train(method: str, rate: float, seed: int, sets: Sequence[str], work: Path, device: str) -> tuple[Row, Path]:
    """Train by one method; returns its costs, and the folder that has the model."""
    place, model = work / "run", work / "model"
    changes = [f"optimizer.lr={rate:g}", f"seed={seed}", f"runtime.accelerator={device}", *sets]
    config = load_config("smollm2-skills", changes)
    samples = 2 * config.batch_size * config.num_rounds * config.local_steps
    central = [str(HERE / "central.py"), "--threads", "2", "--device", device, "--save", str(model), "--json"]
    central += ["--samples", str(samples)]
    # One process has the memory for the activations.
    fast = ["runtime.recompute=never", "task.evaluate-generate="]
    if method == "collapipe":
        command = [f"{sysconfig.get_path('scripts')}/collapipe", "run"]
        changes += [f"runs-dir={place}", "task.evaluate-generate="]
    elif method == "fedavg":
        command = [sys.executable, str(HERE / "fedavg_adapters.py"), "--save", str(model)]
        changes += fast
    elif method == "central":
        command = [sys.executable, *central, "--shares", "2"]
        changes += fast
    else:
        command = [sys.executable, *central, "--batch-size", str(2 * config.batch_size)]
        changes += [*fast, f"data.train-source=cluster-{method[-1]}.jsonl", "data.partition=iid"]
    command += ["--config", "smollm2-skills", *(part for change in changes for part in ("--set", change))]
    started = time.monotonic()
    memory = watch(command, 1.0)
    if memory["returncode"]:
        raise RuntimeError(f"{method}: exit code {memory['returncode']} of {' '.join(command)}")
    costs: Row = {}
    if device == "cpu":
        costs["wall_s"] = time.monotonic() - started
        costs["peak_bytes"] = max(process["uss"] for process in memory["processes"])
    if method == "collapipe":
        model = find_run("latest", place)
        rounds = read_rounds(model)[0]
        costs["virtual_s"] = sum(line["virtual"]["latency_s"] for line in rounds)
        streams = [cluster["stream_bytes"] for line in rounds for cluster in line["clusters"]]
        costs["bytes"] = sum(line["bytes_down"] + line["bytes_up"] for line in rounds) + sum(
            stream["up"] + stream["down"] for stream in streams
        )
    elif method == "fedavg":
        costs |= json.loads((model / "costs.json").read_text(encoding="utf-8"))
    return costs, model


def exact_matches(
    parts: ModelParts, tokenizer_json: str, sets: Sequence[str], folder: Path, device: str
) -> dict[str, Any]:
    """Return the share of exact answers of each skill, of validation and test."""
    config = load_config("smollm2-skills", list(sets))
    parts = merged(parts)
    move(parts, device)
    evaluator = task(config.task).evaluator(config.data, tokenizer_json)
    scores: dict[str, Any] = {}
    for split in ("validation", "test"):
        skills = [json.loads(line)["skill"] for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]
        score = evaluator.evaluate(parts, split)
        right = defaultdict(list)
        for skill, answer, reference in zip(skills, score.predictions, score.references, strict=True):
            right[skill].append(float(answer.strip() == reference.strip()))
        scores[split] = {skill: fmean(values) for skill, values in right.items()}
    return scores


def run(args: argparse.Namespace) -> None:
    """Train what has no row yet, cheapest comparison first."""
    folder = Path(args.folder).resolve()
    sets = [f"data.path={folder}", f"model.pretrained={args.model}", *args.set]
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    while job := _next_job(_read(args.rows), args.methods.split(","), args.seeds):
        if deadline and time.monotonic() > deadline:
            print("the minutes are over; the same command goes on")
            return
        method, rate, seed = job
        work = folder / "work" / method
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        costs: Row = {}
        if method == "base":
            config = load_config("smollm2-skills", sets)
            prepared = task(config.task).prepare(config.data, config.model, config.seed, config.num_clusters or 2)
            parts, tokenizer_json = prepared.build(0), prepared.tokenizer_json
        else:
            costs, place = train(method, rate, seed, sets, work, args.device)
            saved = load_model(place, "llama", "instruction")
            parts, tokenizer_json = saved.parts, saved.tokenizer_json
        row = {"method": method, "rate": rate, "seed": seed, "device": args.device, **costs}
        row |= exact_matches(parts, tokenizer_json, sets, folder, args.device)
        with args.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{method:10} {rate:g} seed {seed}: {fmean(row['test'].values()):.3f}", flush=True)


def _next_job(rows: Sequence[Row], methods: Sequence[str], seeds: int) -> tuple[str, float, int] | None:
    done = {(row["method"], row["rate"], row["seed"]) for row in rows}
    if "base" in methods and ("base", 0.0, 0) not in done:
        return "base", 0.0, 0
    trained = [method for method in methods if method != "base"]
    for rate in RATES:
        for method in trained:
            if (method, rate, 1) not in done:
                return method, rate, 1
    for method in trained:
        rates = [row["rate"] for row in rows if row["method"] == method and row["seed"] == 1]
        # A best at the grid's edge may not be the best: the grid goes on beyond it.
        if (best := _best_rate(rows, method)) in (min(rates), max(rates)):
            return method, best * 2 if best == max(rates) else best / 2, 1
    for seed in range(2, seeds + 1):
        for method in trained:
            if (method, rate := _best_rate(rows, method), seed) not in done:
                return method, rate, seed
    return None


def _best_rate(rows: Sequence[Row], method: str) -> float:
    tried = [row for row in rows if row["method"] == method and row["seed"] == 1]
    return float(max(tried, key=lambda row: fmean(row["validation"].values()))["rate"])


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def table(rows: Sequence[Row]) -> list[Row]:
    """Return each method's means over the seeds at its best rate, with the spread of the mean over skills."""
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        rate = _best_rate(rows, method) if method != "base" else 0.0
        chosen = [row for row in rows if row["method"] == method and row["rate"] == rate]
        means = [fmean(row["test"].values()) for row in chosen]
        line: Row = {"method": method, "rate": rate, "seeds": len(chosen)}
        line |= {skill: fmean(row["test"][skill] for row in chosen) for skill in chosen[0]["test"]}
        line |= {"mean": fmean(means), "spread": stdev(means) if len(means) > 1 else None}
        for cost in ("virtual_s", "wall_s", "bytes", "peak_bytes"):
            # The same at all rates; time and memory are of processors alone.
            measured = [row[cost] for row in rows if row["method"] == method and cost in row]
            line[cost] = fmean(measured) if measured else None
        lines.append(line)
    return lines


def main() -> int:
    """Write data, train, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("data", "run", "table"))
    parser.add_argument("folder", nargs="?", default=".", help="of the conversations")
    parser.add_argument("--model", help="folder or hub id of SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=Path, default=Path("rows.jsonl"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no training after so long; 0: train all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for training and scoring")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.what == "data":
        write_data(Path(args.folder))
    elif args.what == "run":
        run(args)
    elif args.json:
        print(json.dumps(table(_read(args.rows))))
    else:
        for line in table(_read(args.rows)):
            cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()]
            print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
