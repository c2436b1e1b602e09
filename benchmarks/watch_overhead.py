"""Cost of a watched round: rounds with the page and a scrape each second, and without, in turns.

One run goes on; blocks of its rounds take turns. In a watched one `collapipe watch` is asked for what Prometheus and a
page ask for: `/metrics` each second, `/state` each 0.4 s. In the others it stands still (SIGSTOP). Its
processor time is counted from outside, and so is that of all processes of the run.

    python benchmarks/watch_overhead.py [--rounds 27] [--block 2] [--config NAME] [--set KEY=VALUE] [--out rows.json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from steady_rounds import PATIENCE_S, POLL_S, ROUNDS

COLLAPIPE = (sys.executable, "-m", "flower_app.cli")
TOKEN = "the token of a benchmark"
ASKED_EACH_S = {"/metrics": 1.0, "/state": 0.4}
SKIPPED = 2
"""First rounds, in which processes begin."""


class Asker(threading.Thread):
    """Asks as Prometheus and one page do, while it is to."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, self._last_round, self._log = address, 0, 0
        self.is_asking = threading.Event()

    def run(self) -> None:
        """Ask without end."""
        due = dict.fromkeys(ASKED_EACH_S, 0.0)
        while self.is_asking.wait():
            for path, period_s in ASKED_EACH_S.items():
                if time.monotonic() >= due[path]:
                    due[path] = time.monotonic() + period_s
                    self._ask(path)
            time.sleep(POLL_S)

    def _ask(self, path: str) -> None:
        query = f"?after={self._last_round}&log={self._log}" if path == "/state" else ""
        request = urllib.request.Request(self._address + path + query, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = answer.read()
        if path == "/state":
            state = json.loads(body)
            self._last_round, self._log = state["last_round"], state["log"]["offset"]


def cpu_s(root: psutil.Process) -> float:
    """Processor time of a process and all that it has started and that is still there [s]."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system
    return total


def measure(config: str | None, sets: Sequence[str], rounds: int, block: int, folder: Path) -> list[dict[str, float]]:
    """Train, and return one row for each round: whether it was watched, its time, and processor times [s]."""
    settings = [f"num-rounds={rounds}", f"runs-dir={folder}", "evaluate-every=0", *sets]
    command = [*COLLAPIPE, "run", *(("--config", config) if config else ())]
    command += [part for text in settings for part in ("--set", text)]
    log = folder / "log"
    with log.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    watch = None
    try:
        deadline = time.monotonic() + PATIENCE_S

        def wait_for_round(number: int) -> float:
            while sum(lines.read_bytes().count(b"\n") for lines in folder.glob(ROUNDS)) < number:
                if run.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)}: {log.read_text()}")
                time.sleep(POLL_S)
            return time.monotonic()

        wait_for_round(1)
        (run_dir,) = (path.parent for path in folder.glob(ROUNDS))
        words = folder / "watch.log"
        with words.open("w") as file:
            watch = subprocess.Popen(
                [*COLLAPIPE, "watch", str(run_dir), "--port", "0"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLLAPIPE_WATCH_TOKEN": TOKEN},
            )
        while not (match := re.search(r"http://[\d.:]+", words.read_text())):
            time.sleep(POLL_S)
        asker = Asker(match.group())
        asker.start()
        # The page's first look takes all rounds at once: it is not a round's.
        asker.is_asking.set()
        of_run, of_watch, rows = psutil.Process(run.pid), psutil.Process(watch.pid), []
        wait_for_round(SKIPPED)
        # The first round of a block is not compared: another kind of block ends in its beginning.
        for number in range(SKIPPED + 1, rounds):
            place, is_watched = (number - SKIPPED - 1) % block, (number - SKIPPED - 1) // block % 2 == 0
            if place == 0:
                switch(asker, of_watch, is_watched)
            before = (time.monotonic(), cpu_s(of_run), cpu_s(of_watch))
            end = wait_for_round(number)
            rows.append(
                {
                    "round": number,
                    "watched": is_watched,
                    "compared": place > 0,
                    "wall_s": round(end - before[0], 3),
                    "cpu_s": round(cpu_s(of_run) - before[1], 2),
                    "watch_cpu_s": round(cpu_s(of_watch) - before[2], 2),
                }
            )
        asker.is_asking.clear()
        run.wait(PATIENCE_S)
        return rows
    finally:
        for process in (watch, run):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT)
                process.wait(60)


def switch(asker: Asker, watch: psutil.Process, is_watched: bool) -> None:
    """Begin to watch, or stop."""
    if is_watched:
        watch.resume()
        asker.is_asking.set()
    else:
        asker.is_asking.clear()
        # What was asked last is answered first.
        time.sleep(0.5)
        watch.suspend()


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of the rounds that are compared, and the shares of all that were watched."""
    asked = [row for row in rows if row["watched"]]
    watched, alone = ([row for row in rows if row["compared"] and row["watched"] == kind] for kind in (True, False))

    def share(first: Sequence[dict[str, float]], name: str, second: Sequence[dict[str, float]]) -> float:
        return statistics.median(row[name] for row in first) / statistics.median(row[name] for row in second) - 1.0

    return {
        "rounds": len(watched),
        "wall_s": statistics.median(row["wall_s"] for row in alone),
        "wall_more": share(watched, "wall_s", alone),
        "cpu_s": statistics.median(row["cpu_s"] for row in alone),
        "run_cpu_more": share(watched, "cpu_s", alone),
        "watch_cpu_s": statistics.mean(row["watch_cpu_s"] for row in asked),
        "watch_share": sum(row["watch_cpu_s"] for row in asked) / sum(row["cpu_s"] for row in asked),
        "watch_core": sum(row["watch_cpu_s"] for row in asked) / sum(row["wall_s"] for row in asked),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=27)
    parser.add_argument("--block", type=int, default=2, help="rounds of one kind, one after the other")
    parser.add_argument("--config", help="a TOML file, or a name in configs; default: the default run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, help="a JSON file that gets the rounds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="watched-") as folder:
        rows = measure(args.config, args.sets, args.rounds, args.block, Path(folder))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")
    figures = summary(rows)
    print(f"{figures['rounds']} rounds watched, in turns with as many that are not; load {os.getloadavg()[0]:.0f}")
    print(f"a round            {figures['wall_s']:6.2f} s, watched {figures['wall_more']:+.2%}")
    print(f"processors, run    {figures['cpu_s']:6.2f} s, watched {figures['run_cpu_more']:+.2%}")
    print(
        f"processors, watch  {figures['watch_cpu_s']:6.3f} s a round: {figures['watch_share']:.2%} of the run's, "
        f"{figures['watch_core']:.2%} of a core"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
