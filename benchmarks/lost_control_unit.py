"""Measure what a control unit that is away for a while costs a deployed run.

An edge server and some control units, each a network namespace with programs, certificates and keys of its own (root
is needed), train a small translation. In the midst of a round all processes of one control unit's machine are killed,
and started again after some seconds; or its network is pulled out for some seconds, and its processes live on. Measured
are the seconds until the others had finished that round, those from the machine's return until its cluster had trained
a round, and how many rounds had begun in between since its SuperNode was connected.

    python benchmarks/lost_control_unit.py [--clusters 3] [--killed 0,5,25,300] [--pulled 5,300] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.hosts import Namespaces, namespaces_missing
from helpers.lost_machines import lone_stack
from helpers.run_history import History

ROUNDS = 10_000
STALL_S = 1800.0
"""Time without a finished round after which the run counts as hanging [s]."""
LOST = 1
"""Cluster whose control unit is lost."""


def say(text: str) -> None:
    """Tell the user."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(history: History, kind: str, away_s: float) -> dict[str, Any]:
    """Have the control unit away once.

    Parameters
    ----------
    history : of the run
    kind : ``killed`` or ``pulled``
    away_s : how long [s]
    """
    say(f"{kind}, for {away_s:g} s")
    history.until_trained_by(*range(len(history.stack.data)))
    history.until_connected(LOST)
    if kind == "killed":
        history.lose({LOST: away_s})
    else:
        history.pull_network(LOST, away_s)
    absence = history.absences[LOST]
    # A short cut is mended within the round, which then misses nobody.
    history.until(lambda: len(history.rounds) > absence.round and (kind == "killed" or absence.returning))
    is_missed = any(LOST not in one.clusters for one in history.rounds[absence.round - 1 :])
    went_on_s, reason = history.went_on(LOST) if kind == "killed" or is_missed else (None, "")
    num_rounds, trained = history.rounds_until_back(LOST)
    return {
        "kind": kind,
        "away_s": away_s,
        "normal_round_s": absence.normal_s,
        "went_on_s": went_on_s,
        "reason": reason,
        "rounds_missed": sum(LOST not in one.clusters for one in history.rounds[absence.round - 1 : trained.number]),
        "trained_again_s": trained.ended - absence.lost_at - away_s,
        "rounds_until_back": num_rounds,
    }


def table(cases: list[dict[str, Any]]) -> str:
    """The cases for people."""
    columns = [
        "its machine",
        "away",
        "the others went on after",
        "a normal round took",
        "rounds missed",
        "had trained again, after its return",
        "in round, since it was connected",
    ]
    rows = [
        [
            case["kind"],
            f"{case['away_s']:g} s",
            "at once" if case["went_on_s"] is None else f"{case['went_on_s']:.0f} s",
            f"{case['normal_round_s']:.1f} s",
            str(case["rounds_missed"]),
            f"{case['trained_again_s']:.0f} s",
            str(case["rounds_until_back"]),
        ]
        for case in cases
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def seconds(text: str) -> list[float]:
    """Times with commas between [s]."""
    return [float(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=3)
    parser.add_argument("--killed", type=seconds, default=[0.0, 5.0, 25.0, 300.0], help="for how long each time [s]")
    parser.add_argument("--pulled", type=seconds, default=[5.0, 300.0], help="for how long each time [s]")
    parser.add_argument("--folder", type=Path, help="new; kept, with all logs; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if reason := namespaces_missing():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, interrupt)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="lost-control-unit-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"folder: {folder}")
    cases = []
    names = ["server", *(f"cu{n}" for n in range(arguments.clusters))]
    with Namespaces(names) as hosts, contextlib.redirect_stdout(sys.stderr):
        stack = lone_stack(hosts, folder, arguments.clusters, ROUNDS)
        stack.start()
        history = History(stack, *stack.begin(config=folder / "server" / "run.toml"), STALL_S)
        history.until(lambda: len(history.rounds) >= 3)
        for kind, times in (("killed", arguments.killed), ("pulled", arguments.pulled)):
            for away_s in times:
                cases.append(measure(history, kind, away_s))
                (folder / "report.json").write_text(json.dumps(cases, indent=2) + "\n")
    print(json.dumps(cases) if arguments.json else table(cases))
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(case["rounds_until_back"] <= 2 for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
