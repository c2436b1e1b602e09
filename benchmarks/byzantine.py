"""One hostile cluster of five (seven for bulyan) under every rule: every malformed reply, and every refused stream.

    python benchmarks/byzantine.py [--json FILE] [--rules none,krum] [--stock FedAvg,Krum]

Real strategies, planner, decoder service and streams, in one process; the clients stand in for control units. In each
case the encoders have to be, bit for bit, what the others' updates alone come to; the decoder what it is with a cluster
that takes its steps and then keeps silent; and with a refused stream all of it what it is in the cluster's absence.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
Json = dict[str, Any]
STOCK = ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum")


def rule_cases(rule: str) -> Iterator[Json]:
    """Each case of a rule that joins encoders in the strategy ``collapipe``."""
    from helpers import byzantine as suite
    from helpers.malformed import KINDS, with_metrics

    def honest(order: Any, reply: Any) -> Any:
        return reply

    def too_much(order: Any, reply: Any) -> Any:
        return with_metrics(reply, **{"num-examples": 33})

    silent = suite.played(rule, KINDS["nothing"])
    absent = suite.played(rule, honest, suite.absent)
    free = suite.played(rule, honest)
    hostile = suite.clusters_for(rule) - 1
    by_hand = suite.joined_by_hand(rule, silent)
    answers = {**KINDS, "more weight than it trained": too_much}
    for name, answer in answers.items():
        found = suite.played(rule, answer)
        good = suite.same(found.encoder(), by_hand) and suite.same(found.head(), silent.head())
        yield _case(rule, "reply", name, found.failed, hostile, good)
    for name, stream in suite.STREAMS.items():
        found = suite.played(rule, honest, stream)
        yield _case(rule, "stream", name, found.failed, hostile, suite.same(found.weights, absent.weights))
    found = suite.played(rule, honest, suite.one_step_only)
    yield _case(rule, "stream", "one step of two", found.failed, hostile, suite.same(found.encoder(), by_hand))
    found = suite.played(rule, honest, suite.restarted)
    good = not found.failed and suite.same(found.weights, free.weights)
    yield {"rule": rule, "kind": "stream", "case": "steps begun four times", "failed": found.failed, "good": good}


def stock_cases(strategy: str) -> Iterator[Json]:
    """Each malformed reply under one of Flower's own strategies."""
    from helpers import hostile_reply as suite
    from helpers.malformed import KINDS

    alone, _ = suite.round_of(KINDS["nothing"], strategy)
    for name, answer in KINDS.items():
        try:
            weights, record = suite.round_of(answer, strategy)
        except AssertionError as error:
            yield _case(strategy, "reply", name, [{"cluster": None, "reason": str(error)}], suite.HOSTILE, False)
            continue
        good = all(weights[key].tolist() == value.tolist() for key, value in alone.items())
        yield _case(strategy, "reply", name, record["failed"], suite.HOSTILE, good)


def _case(rule: str, kind: str, name: str, failed: list[Json], hostile: int, good: bool) -> Json:
    named = [entry["cluster"] for entry in failed] == [hostile]
    return {"rule": rule, "kind": kind, "case": name, "failed": failed, "good": bool(good and named)}


def main() -> int:
    """Run all cases, print a line for each rule; 1 if any is not as it should be."""
    import torch
    from flwr.supercore.task_identity import TaskIdentity

    from helpers.byzantine import RULES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for every case")
    parser.add_argument("--rules", default=",".join(RULES), help="of collapipe")
    parser.add_argument("--stock", default=",".join(STOCK), help="Flower's strategies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Messages can only be made in a process that Flower runs.
    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    for logger in ("flwr", "collapipe"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    cases: list[Json] = []
    print(f"{'rule':16} {'replies':>8} {'streams':>8} {'as they should be':>18} {'CPU s':>7}")
    for rules, play in ((options.rules, rule_cases), (options.stock, stock_cases)):
        for rule in filter(None, rules.split(",")):
            began = time.process_time()
            found = list(play(rule))
            cases += found
            kinds = [sum(case["kind"] == kind for case in found) for kind in ("reply", "stream")]
            good = sum(case["good"] for case in found)
            print(f"{rule:16} {kinds[0]:8} {kinds[1]:8} {good:18} {time.process_time() - began:7.1f}", flush=True)
    wrong = [case for case in cases if not case["good"]]
    for case in wrong:
        print(f"not as it should be: {case['rule']}, {case['kind']}: {case['case']}: {case['failed']}")
    print(f"{len(cases)} cases, {len(wrong)} not as they should be")
    if options.json:
        options.json.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
