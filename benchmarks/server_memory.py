"""Memory of the server's process for its head: a round as the server has it, without clusters.

The run is prepared as ``collapipe run`` does, its head takes a step on random activations of every cluster, and the
round is scored, committed and saved. Printed is private memory (USS) at the end of each stage and at its peak, imports
included; beside it the bytes of the head, and of what is trained of it.

    python benchmarks/server_memory.py --config tinyllama --set data.path=FOLDER [--clusters 2] [--out rows.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import own_parameters, target_weight, targets
from client_pipeline.runtime.control_unit.verification import random_batch
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer
from flower_app.config.sources import load_config
from flower_app.runs.run_directory import claim_run_directory
from flower_app.training.global_models import GlobalModels
from flower_app.training.prepared_run import PreparedRun, prepare
from strategies.checkpoint import Checkpoint, commit
from strategies.decoder.copies import DecoderCopies
from strategies.records import to_arrays


def private_mb() -> float:
    """Private memory of this process [MB]."""
    return float(psutil.Process().memory_full_info().uss) / 1e6


@contextmanager
def stage(name: str, rows: list[dict[str, object]]) -> Iterator[None]:
    """Note what this process holds at the end of a stage, and at its peak."""
    ended, peaks = threading.Event(), [private_mb()]

    def look() -> None:
        while not ended.wait(0.05):
            peaks.append(private_mb())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    rows.append({"stage": name, "end_mb": round(private_mb()), "peak_mb": round(max(peaks))})
    print(rows[-1], flush=True)


def train(run: PreparedRun, trainer: HeadTrainer, clusters: int, micro_batches: int) -> None:
    """Take one step of the head with ``clusters`` batches of random activations."""
    spec, config = run.prepared_task.spec, run.config
    batch = random_batch(spec, config.batch_size, config.data.max_length)
    hidden_BTD = torch.randn(*batch["input_ids"].shape, family_named(spec.family).width(spec))
    weight = target_weight(targets(batch))
    for cluster in range(clusters):
        step = StepId(seed=0, round=1, step=1, cluster=cluster)
        for index, rows in enumerate(torch.arange(config.batch_size).tensor_split(micro_batches)):
            piece = {name: value[rows] for name, value in batch.items()}
            trainer.gradient(step, index, hidden_BTD[rows], piece["attention_mask"], targets(piece), weight)
    trainer.apply([Contribution(cluster=n, weight=weight) for n in range(clusters)], 1)


def main() -> None:
    """Go through the stages of a round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="a TOML file, or a name in configs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--clusters", type=int, default=1, help="whose gradients are there at once")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSONL file, to which the rows are added")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.sets)
    rows: list[dict[str, object]] = []
    print(f"imports {private_mb():.0f} MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = claim_run_directory(Path(folder) / "run")
        with stage("prepared", rows):
            run = prepare(config, run_dir)
            models = GlobalModels(run.prepared_task, run.parts, run.frozen, 0)
            trainer = HeadTrainer(run.parts.head, config.optimizer, unit=run.scenario.planner.num_blocks)
        with stage("step", rows):
            train(run, trainer, arguments.clusters, arguments.micro_batches)
        with stage("round committed", rows):
            arrays = to_arrays(run.parts.weights(head=False))
            decoder = DecoderCopies(trainer).state()
            commit(run_dir, Checkpoint(1, models.whole(arrays), decoder, {}, {}, run.identity))
        with stage("scored and saved", rows):
            models.take(arrays)
            models.score("test")
            models.save(run_dir, run.task.saved(config.data), 1)
    head = sum(p.nbytes for p in run.parts.head.parameters())
    trained = sum(p.nbytes for p in own_parameters(run.parts.head).values())
    summary = {"head_mb": round(head / 1e6), "trained_mb": round(trained / 1e6, 1), "clusters": arguments.clusters}
    print(summary)
    if arguments.out is not None:
        shape = summary | {"lora_head": config.lora.head, "optimizer": config.optimizer.name}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | shape) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
