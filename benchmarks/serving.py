"""Tokens a second of a served model beside the library's ``generate`` in one process, interleaved in one run.

    python benchmarks/serving.py RUN [--devices 2] [--tokens 64] [--repeats 5] [--json]

The peer is the run's merged model under ``transformers.generate`` with one thread; the devices have a thread each.
A token of one request is parted into the time on the devices and between them, the head's, and the rest: choosing the
token, and the queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from client_pipeline.runtime.ray.private_ray import prepare_private_ray

prepare_private_ray()

import torch  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from client_pipeline.families.families import merged  # noqa: E402
from client_pipeline.serving.generation import AnsweringModel  # noqa: E402
from flower_app.runs.run_directory import find_run, read_run_config  # noqa: E402
from flower_app.saved_model import load_model, read_model  # noqa: E402
from flower_app.serving.run_model import served_run  # noqa: E402

_PROMPT = "The people of the town came to the square to hear what the old captain had to say about the sea."


class Spent:
    """Seconds that the engine's steps spend, by place."""

    def __init__(self, engine: Any) -> None:
        self.devices = self.head = 0.0
        self.steps = 0
        run, scores = engine._stages.run, engine._scores

        def timed_run(step: Any, x_RTD: torch.Tensor) -> Any:
            started = time.perf_counter()
            future = run(step, x_RTD)
            future.add_done_callback(lambda _: self._took(time.perf_counter() - started))
            return future

        def timed_scores(*given: Any) -> torch.Tensor:
            started = time.perf_counter()
            found: torch.Tensor = scores(*given)
            self.head += time.perf_counter() - started
            return found

        engine._stages.run, engine._scores = timed_run, timed_scores

    def _took(self, seconds: float) -> None:
        self.devices += seconds
        self.steps += 1

    def begin(self) -> None:
        """Forget what was spent so far."""
        self.devices = self.head = 0.0
        self.steps = 0


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_dir = find_run(args.run)
    config = read_run_config(run_dir)
    model = load_model(run_dir, config.model.family, config.task.name)
    stored = read_model(run_dir, config.model.family, config.task.name)
    whole: Any = merged(model.parts).reference
    whole.eval()
    options = GenerationConfig(max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
    with served_run(run_dir, stored, args.devices, 1, print) as served:
        ids = torch.tensor([served.text_prompt(_PROMPT)])
        mask = torch.ones_like(ids)

        def alone() -> None:
            whole.generate(input_ids=ids, attention_mask=mask, generation_config=options)

        def through(_: int = 0) -> None:
            AnsweringModel(whole.config).write(served._engine, ids, mask, generation_config=options)

        def together() -> None:
            with ThreadPoolExecutor(args.at_once) as threads:
                list(threads.map(through, range(args.at_once)))

        spent, parted = Spent(served._engine), []
        kinds = {
            "generate": (alone, 1),
            "one request": (through, 1),
            f"{args.at_once} requests": (together, args.at_once),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        with torch.no_grad():
            for repeat in range(args.repeats + 1):
                for kind, (write, number) in kinds.items():
                    spent.begin()
                    started = time.perf_counter()
                    write()
                    took = time.perf_counter() - started
                    if repeat:
                        rates[kind].append(number * args.tokens / took)
                    if repeat and kind == "one request":
                        rest = took - spent.devices - spent.head
                        parted.append([1e3 * part / spent.steps for part in (spent.devices, spent.head, rest)])
    names = list(kinds)
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    ratios = [
        statistics.median(b / a for a, b in zip(rates[x], rates[y], strict=True)) for x, y in (names[:2], names[1:])
    ]
    parts = [statistics.median(values) for values in zip(*parted, strict=True)]
    found = {
        "tokens_per_s": medians,
        "one_to_generate": ratios[0],
        "several_to_one": ratios[1],
        "token_ms": dict(zip(("devices", "head", "rest"), parts, strict=True)),
    }
    if args.json:
        print(json.dumps(found))
        return 0
    print("| kind | tokens a second |\n| --- | --- |")
    for kind, rate in medians.items():
        print(f"| {kind} | {rate:.1f} |")
    print(f"a token of one request: devices {parts[0]:.1f} ms, head {parts[1]:.1f} ms, rest {parts[2]:.1f} ms")
    print(f"one request / generate: {ratios[0]:.2f}; {names[2]} / one: {ratios[1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
