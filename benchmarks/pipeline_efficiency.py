"""Efficiency of the segment pipeline on real Ray actors, beside ``torch.distributed.pipelining`` over gloo.

    efficiency = (one-thread time of the same m micro-batches through the whole model) * (S + m - 1) / (S * m)
                 / (time of one pipelined step)

1 means that the pipeline loses nothing but GPipe's bubble; a zero-bubble schedule (``zb-h1``), whose bubble is smaller,
may get beyond it. Whole model, ours and torch's take turns, round by round in changing order, so that all meet about
the same load; the figures are medians over the rounds. All three run the forward and backward pass of the embedding and
the TEBs of a classic Transformer under a trivial loss, without an optimizer step, one thread a stage; gradients are
cleared between the steps, outside the clock.

Two cores share caches, memory and the machine's other work, so that two processes that never speak to each other are
slower than one. The column "machine" is the efficiency of a pipeline without any cost of its own on them: two whole
models at the same time take r times as long as one alone, and all slots but the bubble's two are taken by both stages,
so it is (m + 1) / (2 + (m - 1) r) for S = 2.

Ours counts everything from the control unit's call to the last device's answer, and sends the activations and their
gradients to the control unit and back. It runs in the two arrangements of a simulation: "ours" is the automatic one,
two shared actors, with the control unit in the first device's; "alone" gives each of the three a process of its own, as
real machines do. Torch's is timed inside its processes, from a common start. Torch's column is empty where it cannot
run the case: it fails on uneven micro-batches (m = 7). All hand freed memory out again instead of giving it back. Ours
adds the gradients of large matrices in place (:mod:`client_pipeline.partition.weight_gradients`), the others as
autograd does.

    python benchmarks/pipeline_efficiency.py                       a table, and the overhead per action
    python benchmarks/pipeline_efficiency.py --schedules gpipe zb-h1 --repeats 5 --micro-batches 8    and the medians
    python benchmarks/pipeline_efficiency.py --json                [{"width": .., "segments": .., "micro_batches": ..,
                                                                     "schedule": ..,
                                                                     "ours": .., "alone": .., "torch": ..,
                                                                     "machine": ..}, ..]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from client_pipeline.runtime.ray.private_ray import prepare_private_ray, private_ray

# Ray reads its settings when it is imported.
prepare_private_ray()

import ray
import torch
from torch import Tensor
from torch_peer import STEP_TIMEOUT_S, Case, TorchPipeline, trivial_loss
from whole_model import TwoWholes, WholeModel

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.link.base import Gradient
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.shared_actor import end_actor, start_member
from client_pipeline.runtime.ray.arrangement import Arrangement
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.memory import keep_freed_memory
from client_pipeline.timetable.schedules import SCHEDULES

SEGMENTS = (3, 3)
SIZES = {128: (64, 32), 512: (64, 32), 768: (64, 24)}
"""Batch size and sequence length by width."""
MORE_ROUNDS = {128: 6}
"""More rounds by width: noise is large beside a short step."""
STEP = StepId(seed=0, round=1, step=1, cluster=0)
WARM_UP = 2
FIGURES = ("ours", "alone", "torch", "machine")
"""Efficiencies of a row."""


def make_case(
    width: int, segments: tuple[int, ...], num_micro_batches: int, size: tuple[int, int], schedule: str = "gpipe"
) -> Case:
    """Classic TEBs without dropout, split evenly."""
    spec = transformer.spec(
        vocab_size=1000,
        width=width,
        num_heads=max(width // 64, 1),
        feed_forward=4 * width,
        encoder_layers=sum(segments),
        decoder_layers=1,
        dropout=0.0,
    )
    batch_size, length = size
    return Case(
        spec=spec,
        segments=segments,
        batch_size=batch_size,
        length=length,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
    )


class TrivialLink:
    """A decoder that answers at once: the gradient of :func:`trivial_loss`."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[int, Tensor]] = queue.SimpleQueue()

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """Do nothing."""

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Hand the activations over."""
        self._waiting.put((micro_batch, hidden_BTD))

    def receive(self) -> Gradient:
        """Answer with the activations."""
        micro_batch, hidden_BTD = self._waiting.get(timeout=60)
        return Gradient(micro_batch=micro_batch, tensor=hidden_BTD, loss_sum=float(trivial_loss(hidden_BTD)))

    def drop_step(self) -> None:
        """Do nothing."""

    def end_step(self, scale: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    abort = close


class Ours:
    """The case on this project's pipeline, a Ray actor a stage; the control unit lives where this is made.

    Parameters
    ----------
    case : what is run
    placement : where the devices are
    """

    def __init__(self, case: Case, placement: Placement = Placement()) -> None:  # noqa: B008 (it is frozen)
        from client_pipeline.runtime.devices.pipeline import Pipeline

        torch.set_num_threads(1)
        self._case = case
        num_devices = len(case.segments)
        self._pipeline = Pipeline(
            name=f"benchmark/{os.getpid()}/{case.spec.config['width']}-{num_devices}-{bool(placement.shared_actor)}",
            spec=case.spec,
            optimizer=OptimizerConfig(name="sgd"),
            runtime=RuntimeConfig(threads=1, timeout=60.0),
            placement=placement,
        )
        self.cut_into(case.num_micro_batches, case.schedule)
        parts = build_parts(case.spec, seed=0)
        self._embedding = parts.embedding
        weights = parts.weights()
        self._pipeline.load({i: block_weights(weights, i) for i in range(sum(case.segments))})
        ids = case.input_ids()
        self._batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids, dtype=torch.bool),
            "labels": torch.zeros_like(ids),
        }

    def cut_into(self, num_micro_batches: int, schedule: str) -> None:
        """Change m and the order of the actions; the actors stay."""
        segments = self._case.segments
        self._pipeline.apply_plan(
            ClusterPlan(delta=segments, order=tuple(range(len(segments))), m=num_micro_batches, schedule=schedule)
        )

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._pipeline.run_step(STEP, [self._batch], self._embedding, TrivialLink())
        seconds = time.perf_counter() - start
        self._pipeline.discard()
        for parameter in self._embedding.parameters():
            parameter.grad = None
        return seconds

    def close(self) -> None:
        """End the actors."""
        self._pipeline.close()


class OursShared:
    """:class:`Ours` in the automatic arrangement on two cores: the control unit is a member of a shared actor, too."""

    def __init__(self, case: Case) -> None:
        arrangement = Arrangement(device_actors=2, cluster_actors=2)
        placement = arrangement.placement(0, len(case.segments))
        name = f"benchmark-{case.spec.config['width']}"
        self._unit = start_member(placement.shared_actor, 600.0, name, Ours, case, placement)

    def cut_into(self, num_micro_batches: int, schedule: str) -> None:
        """Change m and the order of the actions; the actors stay."""
        ray.get(self._unit.cut_into.remote(num_micro_batches, schedule), timeout=STEP_TIMEOUT_S)

    def step(self) -> float:
        """Seconds of one step."""
        return float(ray.get(self._unit.step.remote(), timeout=STEP_TIMEOUT_S))

    def close(self) -> None:
        """Dismiss control unit and devices."""
        ray.get(self._unit.close.remote(), timeout=STEP_TIMEOUT_S)
        end_actor(self._unit)


def start_torch(case: Case) -> TorchPipeline | None:
    """Torch's pipeline after its first step, or None if it cannot run the case."""
    peer = TorchPipeline(case)
    try:
        peer.step()
    except RuntimeError as error:
        print(f"torch cannot run m = {case.num_micro_batches}: {error}", file=sys.stderr)
        peer.close()
        return None
    return peer


def measure(case: Case, ours: OursShared, alone: Ours, rounds: int) -> dict[str, Any]:
    """Times of all contenders, in turns; efficiencies and times are medians over the rounds."""
    num_stages, m = len(case.segments), case.num_micro_batches
    ours.cut_into(m, case.schedule)
    alone.cut_into(m, case.schedule)
    whole, peer = WholeModel(case), start_torch(case)
    two = TwoWholes(case, whole)
    contenders: dict[str, Callable[[], float]] = {
        "whole": whole.step,
        "two": two.step,
        "ours": ours.step,
        "alone": alone.step,
    }
    if peer is not None:
        contenders["torch"] = peer.step
    times: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for number in range(WARM_UP + rounds):
            names = list(contenders)[:: 1 if number % 2 else -1]
            for name in names:
                seconds = contenders[name]()
                if number >= WARM_UP:
                    times[name].append(seconds)
    finally:
        two.close()
        if peer is not None:
            peer.close()
    slower = statistics.median(both / one for one, both in zip(times["whole"], times["two"], strict=True))
    ideal = (num_stages + m - 1) / (num_stages * m)

    def efficiency(name: str) -> float | None:
        if name not in times:
            return None
        return round(statistics.median(w * ideal / t for w, t in zip(times["whole"], times[name], strict=True)), 3)

    return {
        "width": case.spec.config["width"],
        "segments": num_stages,
        "micro_batches": m,
        "schedule": case.schedule,
        "ours": efficiency("ours"),
        "alone": efficiency("alone"),
        "torch": efficiency("torch"),
        "machine": round((m + 1) / (2 + (m - 1) * slower), 3),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
    }


def overhead(rounds: int) -> tuple[float, int]:
    """Seconds of one step with S = 3 and tiny TEBs, and its number of actions on the devices."""
    case = make_case(16, (1, 1, 1), 8, (8, 4))
    ours = Ours(case)
    try:
        times = [ours.step() for _ in range(10 + 10 * rounds)]
    finally:
        ours.close()
    return statistics.median(times[10:]), 2 * 3 * 8


def as_line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    figures = (row[name] for name in FIGURES)
    return f"{row['width']:>6} {row['segments']:>2} {row['micro_batches']:>3} {row['schedule']:>6} " + " ".join(
        f"{'-' if figure is None else format(figure, '.3f'):>7}" for figure in figures
    )


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case once, with the medians of its repeats."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in row if name not in FIGURES), []).append(row)
    return [
        of_case[0]
        | {
            name: None if of_case[0][name] is None else statistics.median(row[name] for row in of_case)
            for name in FIGURES
        }
        for of_case in cases.values()
    ]


def load_average() -> str:
    """Load of the machine over 1, 5 and 15 minutes, beside its processors."""
    values = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"load average {values} on {os.cpu_count()} processors"


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output, all else on standard error")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each case")
    parser.add_argument("--widths", type=int, nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 7])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["gpipe"])
    parser.add_argument("--repeats", type=int, default=1, help="starts of all processes; each repeat has its rows")
    given = parser.parse_args()
    out = sys.stderr if given.json else sys.stdout

    torch.set_num_threads(1)
    # As in every process of ours; it makes the whole model faster, too.
    keep_freed_memory()
    print(load_average(), file=out, flush=True)
    results = []
    with private_ray(num_cpus=2):
        print(
            f"{'width':>6} {'S':>2} {'m':>3} {'order':>6} {'ours':>7} {'alone':>7} {'torch':>7} {'machine':>7}"
            "   seconds of a step",
            file=out,
        )
        for width in [width for _ in range(given.repeats) for width in given.widths]:
            cases = [
                make_case(width, SEGMENTS, m, SIZES[width], schedule)
                for m in given.micro_batches
                for schedule in given.schedules
            ]
            ours, alone = OursShared(cases[0]), Ours(cases[0])
            for case in cases:
                result = measure(case, ours, alone, given.rounds * MORE_ROUNDS.get(width, 1))
                seconds = "  ".join(f"{name} {value:.3f}" for name, value in result.pop("seconds").items())
                print(f"{as_line(result)}   {seconds}", file=out, flush=True)
                results.append(result)
            ours.close()
            alone.close()
        if given.repeats > 1:
            print(f"medians of {given.repeats}", file=out)
            for line in medians(results):
                print(as_line(line), file=out)
        seconds, num_actions = overhead(given.rounds)
        print(
            f"S = 3, tiny TEBs, m = 8: {1e3 * seconds:.1f} ms a step, {1e3 * seconds / num_actions:.2f} ms an action",
            file=out,
        )
    print(load_average(), file=out)
    if given.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
