"""Memory of a control unit with a corpus of millions of lines.

Generates parallel text, starts a control unit and its devices on it as a run does (read, share out, encode), trains a
few rounds, and prints the peak of the control unit's process since its start. A small corpus beside it shows what the
process takes without any data: Python, torch and Ray.

    python benchmarks/large_corpus.py [--lines 5000000] [--rounds 3] [--clusters 1] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray

# Ray reads its settings when it is imported.
prepare_private_ray()

import ray

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit.actors import start_control_unit, train_round
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task
from flower_app.tasks.generated.generator import generate
from flower_app.training.cluster_data import load_cluster_data

SENTENCES = 20_000
"""Different sentences that the grammar draws; a line is two of them, so 400 million different lines are possible."""
SMALL = 10_000
"""Lines of the small corpus, on which the tokenizer is trained."""
SETTINGS = {
    "local-steps": 2,
    "data.source": "files",
    "data.train-source": "train.en",
    "data.train-target": "train.de",
    "data.validation-source": "validation.en",
    "data.validation-target": "validation.de",
    "data.max-length": 64,
    "model.width": 32,
    "model.feed-forward": 64,
    "model.max-length": 64,
}
PLAN = ClusterPlan(delta=(2, 2), order=(0, 1), m=4)
PATIENCE_S = 3600.0


def write_corpus(folder: Path, lines: int) -> int:
    """Write the corpus; returns its size [byte]."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs, rng = generate(SENTENCES, "train", 0), random.Random(0)
    with (folder / "train.en").open("w") as english, (folder / "train.de").open("w") as german:
        for _ in range(lines):
            (one, eins), (two, zwei) = rng.choice(pairs), rng.choice(pairs)
            english.write(f"{one} {two}\n")
            german.write(f"{eins} {zwei}\n")
    for side, language in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in generate(20, "validation", 0))
        (folder / f"validation.{language}").write_text(text)
    return sum((folder / f"train.{language}").stat().st_size for language in ("en", "de"))


def measure(folder: Path, lines: int, rounds: int, clusters: int) -> dict[str, Any]:
    """Train cluster 0's share of a corpus of so many lines."""
    size = write_corpus(folder / str(lines), lines)
    small = RunConfig.from_flat(SETTINGS | {"data.path": str(folder / str(SMALL))})
    prepared = task(small.task).prepare(small.data, small.model, small.seed, num_clusters=1)
    config = RunConfig.from_flat(SETTINGS | {"data.path": str(folder / str(lines))})
    setup = ClusterSetup(
        run=f"large-corpus-{os.getpid()}-{lines}",
        cluster=0,
        spec=prepared.spec,
        optimizer=config.optimizer,
        runtime=config.runtime,
        seed=config.seed,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        load_data=partial(load_cluster_data, config, prepared.tokenizer_json, 0, clusters, ()),
    )
    started = time.perf_counter()
    described = start_control_unit(setup)
    loaded = time.perf_counter()
    weights = prepared.build(config.seed).weights()
    for number in range(1, rounds + 1):
        result = train_round(setup.run, 0, RoundOrder(round=number, weights=weights, plan=PLAN), PATIENCE_S)
        weights = result.weights
    trained = time.perf_counter()
    for name in [setup.actor_name, *(f"{setup.actor_name}/device-{device}" for device in PLAN.order)]:
        ray.kill(ray.get_actor(name, namespace="collapipe"))
    return {
        "lines": lines,
        "corpus_bytes": size,
        "examples": described["num_examples"],
        "control_unit_peak_bytes": result.report["peak_bytes"],
        "load_s": loaded - started,
        "train_s": trained - loaded,
        "loss": result.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clusters", type=int, default=1, help="cluster 0 trains on its share of so many")
    parser.add_argument("--folder", type=Path, help="where the corpus goes (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with private_ray(num_cpus=2, namespace="collapipe"), tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        if not arguments.json:
            print("    lines   text MB    examples   peak of the control unit MB   load s   train s")
        for lines in (SMALL, arguments.lines):
            row = measure(folder, lines, arguments.rounds, arguments.clusters)
            rows.append(row)
            if not arguments.json:
                print(
                    f"{lines:>9,}   {row['corpus_bytes'] / 1e6:>7.0f}   {row['examples']:>9,}   "
                    f"{row['control_unit_peak_bytes'] / 1e6:>27.0f}   {row['load_s']:>6.0f}   {row['train_s']:>7.0f}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"corpora": rows}))


if __name__ == "__main__":
    main()
