"""Wall time of a round on real machines: deployed programs on this machine, watched from outside.

An edge server and some control units, each its own device, run as docs/deployment.md starts them, on addresses of the
loopback. A round begins when the line of the one before is written. It is then seen in the logs when the SuperNode has
its order and when it sends the answer, and in the run's directory when the round's line is written; the round's own
report says what it trained. Of several clusters the last one counts.

    python benchmarks/deployment_rounds.py [--clusters 2] [--rounds 12] [--local-steps 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.hosts import Loopback
from helpers.lost_machines import lone_stack

LOOK_S = 0.02
PATIENCE_S = 1800.0
ORDER, ANSWER = "Receiving: train message", "Sending: train message"
"""Lines of a SuperNode's log about a round."""
MEANING = {
    "order": "until the SuperNode has its order: the server sends it, the SuperNode looks for it",
    "client app": "its process begins and imports, the app's bundle, Ray, the order's weights and the answer's",
    "training": "the control unit's own time: weights to the devices, local steps, weights back",
    "server": "the answer's way, average, checkpoint, and the round's line",
}


class Watcher:
    """Stamps what logs and the run's directory say, as it is seen."""

    def __init__(self, logs: list[Path], run_dir: Path) -> None:
        self._logs, self._rounds = dict.fromkeys(logs, 0), run_dir / "rounds.jsonl"
        self.orders: list[float] = []
        self.answers: list[float] = []
        self.lines: list[float] = []

    def look(self) -> None:
        """Read what was added."""
        now = time.time()
        for log, offset in self._logs.items():
            text = log.read_bytes()[offset:].decode(errors="replace")
            text = text[: text.rfind("\n") + 1]
            self._logs[log] = offset + len(text.encode())
            self.orders += [now] * text.count(ORDER)
            self.answers += [now] * text.count(ANSWER)
        count = self._rounds.read_bytes().count(b"\n") if self._rounds.exists() else 0
        self.lines += [now] * (count - len(self.lines))


def measure(folder: Path, clusters: int, rounds: int, local_steps: int) -> list[dict[str, float]]:
    """Run the deployment; returns the parts of each round after the first two."""
    names = ["server", *(f"cu{n}" for n in range(clusters))]
    with Loopback(names) as hosts:
        stack = lone_stack(hosts, folder, clusters, rounds)
        stack.start()
        sets = [f"local-steps={local_steps}", "decoder.bind=127.0.77.1:0", "costs=scenario"]
        run, run_dir = stack.begin(*sets, config=folder / "server" / "run.toml")
        watcher, deadline = Watcher([stack.log(name) for name in names[1:]], run_dir), time.monotonic() + PATIENCE_S
        while run.poll() is None:
            watcher.look()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run has not ended after {PATIENCE_S:g} s: {stack.said()}")
            time.sleep(LOOK_S)
        if run.returncode:
            raise RuntimeError(f"the run ended with {run.returncode}: {stack.said()}")
        lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        print(stack.log("run").read_text(encoding="utf-8")[-600:], file=sys.stderr)
    return [_parts(watcher, line, i) for i, line in enumerate(lines) if i >= 2]


def _parts(watcher: Watcher, line: dict[str, Any], i: int) -> dict[str, float]:
    begin, end = watcher.lines[i - 1], watcher.lines[i]
    order, answer = (
        max(moment for moment in moments if begin - LOOK_S <= moment <= end)
        for moments in (watcher.orders, watcher.answers)
    )
    trained = max(sum(report[key] for key in ("prepare_s", "train_s", "collect_s")) for report in line["clusters"])
    return {
        "order": order - begin,
        "client app": answer - order - trained,
        "training": trained,
        "server": end - answer,
        "round": end - begin,
    }


def table(parts: list[dict[str, float]]) -> list[str]:
    """Rows of Markdown: the median of each part, and its share of the round."""
    whole = statistics.median(part["round"] for part in parts)
    lines = ["| part of a round | median | share | what it is |", "| --- | --- | --- | --- |"]
    for name, meaning in MEANING.items():
        seconds = statistics.median(part[name] for part in parts)
        lines.append(f"| {name} | {seconds:.2f} s | {seconds / whole:.0%} | {meaning} |")
    return [*lines, f"| round | {whole:.2f} s | | {len(parts)} rounds |"]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--local-steps", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    if args.rounds < 4 or args.clusters < 1:
        parser.error("--rounds and --clusters: expected at least 4, and at least 1")
    return args


def main() -> int:
    """Measure, print the table."""
    args = arguments()
    # Whoever ends this ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="collapipe-rounds-") as folder:
        parts = measure(Path(folder), args.clusters, args.rounds, args.local_steps)
    print("\n".join(table(parts)), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
