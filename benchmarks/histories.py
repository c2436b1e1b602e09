"""See what becomes of a deployed run when its machines stand still, lose their network or their clock, or die.

An edge server and three control units or more, each a network namespace with programs, certificates and keys of its own
(root is needed), train a small translation. A seed draws what happens between the rounds: SIGSTOP of the server app,
the SuperLink, a SuperNode, a control unit's or a device's process; the network of the server or of a control unit
pulled out; a machine killed with all its processes, and started again; the server app killed, and the run resumed; the
server's clock stepped by an hour and, some seconds later, back (by ``stepped_clock.c``, where there is a C compiler); a
second run on the same nodes; a second ``--resume`` of the same run. A checker then holds the rounds, the step counts of
all optimizers and the examples drawn against each other: each step applied once, no round committed twice, nothing of
another run.

    python benchmarks/histories.py [--clusters 3] [--rounds 40] [--events 16] [--seed 0] [--folder FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from history_checker import problems, read

from helpers.hosts import Namespaces, namespaces_missing
from helpers.lost_machines import lone_stack

STALL_S = 900.0
"""Time without a finished round after which the run counts as hanging [s]."""
RESUMES, AGAIN_S = 20, 10.0
ROLES = {
    "server app": ("server", "flwr-serverapp"),
    "SuperLink": ("server", "flower-superlink"),
    "SuperNode": ("cu", "flower-supernode"),
    "control unit": ("cu", "ray::ControlUnit"),
    "device": ("cu", "ray::Device"),
}
KINDS = (
    *(f"freeze {role}" for role in ROLES),
    "partition server",
    "partition control unit",
    "kill machine",
    "kill server app",
    "stop server app",
    "clock step",
    "second run",
    "second resume",
)


class Histories:
    """One run and what happens to it.

    Parameters
    ----------
    stack : the machines' programs, started
    draw : says who and for how long
    clock : file that the clock's shim reads the offset of the server from; None: the clock stays as it is
    """

    def __init__(self, stack: Any, draw: random.Random, clock: Path | None) -> None:
        self.stack, self.hosts, self.draw, self.clock = stack, stack.hosts, draw, clock
        self.config = stack.folder / "server" / "run.toml"
        self.run, self.run_dir = stack.begin(config=self.config)
        self.events: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        """End of an event, and its time [s, monotonic]."""
        self.started_again = 0
        """Programs of control units that had ended."""
        self._resumes = 0
        """Number of resumptions that may follow the last event that ends the run."""

    def rounds(self) -> list[dict[str, Any]]:
        """Lines of the rounds so far."""
        path = self.run_dir / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def strike(self, kind: str) -> None:
        """Have something happen; it ends by itself."""
        cluster = self.draw.randrange(len(self.stack.data))
        seconds = self.draw.choice((3.0, 10.0, 25.0, 45.0))
        self.events.append({"kind": kind, "after_round": len(self.rounds()), "cluster": cluster, "seconds": seconds})
        say(f"after round {len(self.rounds())}: {kind}, cluster {cluster}, {seconds:g} s")
        if kind.startswith("freeze "):
            place, program = ROLES[kind.removeprefix("freeze ")]
            pids = self.hosts.pids("server" if place == "server" else f"cu{cluster}", program)
            send(pids, signal.SIGSTOP)
            self._later(seconds, lambda: send(pids, signal.SIGCONT))
        elif kind.startswith("partition "):
            name = "server" if kind.endswith("server") else f"cu{cluster}"
            self.hosts.connect(name, False)
            self._later(seconds, lambda: self.hosts.connect(name, True))
        elif kind == "kill machine":
            if f"cu{cluster}" in self.stack.boxes:
                self.stack.cut_power(f"cu{cluster}")
                self._later(seconds, lambda: self.stack.start_cu(cluster))
        elif kind == "kill server app":
            self._resumes = RESUMES
            send(self.hosts.pids("server", "flwr-serverapp"), signal.SIGKILL)
        elif kind == "stop server app":
            # Longer than the SuperLink waits for its heartbeats: the command has to notice it, and a resumed run has to
            # wait until the one that stands still has ended.
            self._resumes = RESUMES
            pids = self.hosts.pids("server", "flwr-serverapp")
            send(pids, signal.SIGSTOP)
            self._later(150.0, lambda: send(pids, signal.SIGCONT))
        elif kind == "clock step":
            # While it is off Flower takes no SuperNode's signature: they end, and are started until clocks agree.
            self.clock.write_text("3600")
            self._later(seconds, lambda: self.clock.write_text("0"))
        elif kind == "second run":
            self._refused("second run", "--config", self.config, "--set", "name=second")
        else:
            self._refused("second resume", "--resume", self.run_dir.name)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _refused(self, kind: str, *arguments: Any) -> None:
        """Start what must be refused while the run goes on."""
        done = self.hosts.run("server", *self.stack.run_command(*arguments), cwd=self.stack.folder, timeout=STALL_S)
        if self.run.poll() is None and done.returncode == 0:
            self.wrong.append(f"{kind}: it was not refused")
        self.events[-1] |= {"exit_code": done.returncode, "said": done.stderr.strip().splitlines()[-1:]}

    def end_due(self, now: float = math.inf) -> None:
        """End the events that have lasted long enough."""
        for due, action in list(self._due):
            if due <= now:
                self._due.remove((due, action))
                action()

    def keep_up(self) -> None:
        """Start control units' programs again that have ended, as the systemd units of ``deploy`` do."""
        for cluster in range(len(self.stack.data)):
            name = f"cu{cluster}"
            if name in self.stack.boxes and self.stack.boxes[name].poll() is not None:
                say(f"the programs of {name} have ended; they are started again")
                send(self.hosts.processes(name), signal.SIGKILL)
                self.stack.gone(name)
                self.started_again += 1
                self._later(AGAIN_S, lambda cluster=cluster: self.stack.start_cu(cluster))

    def follow(self, num_rounds: int, schedule: dict[int, list[str]]) -> None:
        """Let the run go its way, with what happens after which round, to its end."""
        seen, progress = 0, time.monotonic()
        while not self._finished():
            self.end_due(time.monotonic())
            self.keep_up()
            if (count := len(self.rounds())) != seen:
                for number in range(seen + 1, count + 1):
                    for kind in schedule.pop(number, []):
                        self.strike(kind)
                seen, progress = count, time.monotonic()
                say(f"round {count}/{num_rounds}")
            if time.monotonic() - progress > STALL_S:
                self.wrong.append(f"no round within {STALL_S:g} s after round {seen}")
                return
            if self.run.poll() is not None and not self._finished():
                if not self._resumes:
                    self.wrong.append(f"the run ended after round {seen}: {self._summary()}")
                    return
                self._resumes -= 1
                say(f"the run is resumed: {self._summary().get('error', '')}")
                time.sleep(AGAIN_S)
                self.hosts.running.remove(self.run)
                command = self.stack.run_command("--resume", self.run_dir.name)
                log = self.stack.log("run")
                self.run = self.hosts.start("server", *command, log=log, cwd=self.stack.folder)
            time.sleep(0.2)

    def _finished(self) -> bool:
        return self.run.poll() is not None and self._summary().get("status") == "finished"

    def _summary(self) -> dict[str, Any]:
        path = self.run_dir / "summary.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def report(self, local_steps: int, batch_size: int) -> dict[str, Any]:
        """Events that happened, and contradictions."""
        clusters = range(len(self.stack.data))
        folders = {n: self.stack.folder / f"state-cu{n}/checkpoints/{self.run_dir.name}/cluster-{n}" for n in clusters}
        sizes = {"clusters": len(clusters), "local-steps": local_steps, "batch-size": batch_size}
        evidence = read(self.run_dir, folders, sizes)
        lines = evidence.lines
        trained = [{report["cluster"] for report in line["clusters"]} for line in lines]
        return {
            "events": self.events,
            "rounds": len(lines),
            "rounds_missed": {n: sum(n not in those for those in trained) for n in clusters},
            "longest_round_s": max((line["round_s"] for line in lines), default=0.0),
            "median_round_s": sorted(line["round_s"] for line in lines)[len(lines) // 2] if lines else 0.0,
            "started_again": self.started_again,
            "decoder_steps": list(evidence.decoder_steps),
            "status": evidence.status,
            "problems": [*self.wrong, *problems(evidence)],
        }


def send(pids: list[int], number: int) -> None:
    """Signal processes; they may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def say(text: str) -> None:
    """Tell the user."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def schedule_of(draw: random.Random, num_rounds: int, num_events: int, kinds: list[str]) -> dict[int, list[str]]:
    """Draw the kind of fault after each round: each kind in its turn, in an order of the seed's."""
    turns = [kind for _ in range(num_events // len(kinds) + 1) for kind in draw.sample(kinds, len(kinds))][:num_events]
    # The run needs a checkpoint to be resumed from, and rounds to come back in.
    places = sorted(draw.choices(range(2, max(num_rounds - 4, 3)), k=num_events))
    schedule: dict[int, list[str]] = {}
    for place, kind in zip(places, turns, strict=True):
        schedule.setdefault(place, []).append(kind)
    return schedule


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--events", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help=f"of what may happen, with commas between; default: {', '.join(KINDS)}")
    parser.add_argument("--folder", type=Path, help="new; kept, with all logs; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if reason := namespaces_missing():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, interrupt)
    kinds = arguments.kinds.split(",") if arguments.kinds else list(KINDS)
    if "clock step" in kinds and shutil.which("cc") is None:
        say("no C compiler, cc: the clock is not stepped")
        kinds.remove("clock step")
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="histories-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = histories(folder, arguments, kinds)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found) if arguments.json else table(found))
    if arguments.folder is None and not found["problems"]:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if found["problems"] else 0


def histories(folder: Path, arguments: argparse.Namespace, kinds: list[str]) -> dict[str, Any]:
    """Run it in namespaces that end with this."""
    draw = random.Random(arguments.seed)
    schedule = schedule_of(draw, arguments.rounds, arguments.events, kinds)
    say(f"folder: {folder}; {schedule}")
    with Namespaces(["server", *(f"cu{n}" for n in range(arguments.clusters))]) as hosts:
        stack = lone_stack(hosts, folder, arguments.clusters, arguments.rounds)
        clock = None
        if "clock step" in kinds:
            clock = folder / "clock"
            clock.write_text("0")
            stack.environments["server"] = {"LD_PRELOAD": str(stepped_clock(folder)), "STEPPED_CLOCK": str(clock)}
        stack.start()
        history = Histories(stack, draw, clock)
        try:
            history.follow(arguments.rounds, schedule)
        finally:
            history.end_due()
        return history.report(local_steps=2, batch_size=8) | {"seed": arguments.seed, "clusters": arguments.clusters}


def stepped_clock(folder: Path) -> Path:
    """Build the library that gives a program a clock which can be stepped."""
    library, source = folder / "stepped_clock.so", Path(__file__).with_name("stepped_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


def table(found: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["| what happened | times |", "| --- | --- |"]
    lines += [f"| {kind} | {times} |" for kind, times in sorted(Counter(e["kind"] for e in found["events"]).items())]
    missed = ", ".join(f"cluster {cluster}: {count}" for cluster, count in found["rounds_missed"].items())
    lines += [
        "",
        f"{found['rounds']} rounds, {found['status']}; decoder steps {found['decoder_steps']}",
        f"rounds missed: {missed}",
        f"median round {found['median_round_s']:.1f} s, longest {found['longest_round_s']:.1f} s",
        *(f"problem: {problem}" for problem in found["problems"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
