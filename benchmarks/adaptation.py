"""Adaptation of a run to a changed network: regret, and error of the predictions.

A cluster of devices whose speeds and rates are known to nobody but the benchmark trains round after round. The planner
sees the reports of the rounds alone, as a control unit gives them. The regret of a round is its time over that of the
best plan that there is, found among all of them by the event simulator with the true numbers (``best_plans.py``).

``--synthetic`` takes some minutes: estimators, planner and event simulator, no process; reports have noise, and the
event simulator times both plans. ``--paced`` trains for real, on Ray actors that take the time that the truth says
(``paced_adaptation.py``; some minutes), and its plans are timed likewise. ``--shaped`` runs a process for each machine,
in a network namespace whose rates the kernel limits (``shaped_adaptation.py``; ten minutes), and measures both: the
best few plans run on the same machines in the same run, and the fastest of them is what the rounds are held to.

    python benchmarks/adaptation.py --synthetic [--seeds 5] [--noise 0.02] [--out FILE]
    python benchmarks/adaptation.py --paced [--time-scale 0.1] [--out FILE]
    python benchmarks/adaptation.py --shaped [--stories TEXT ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from functools import partial
from pathlib import Path

from adapting_rounds import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--synthetic", action="store_true", help="estimators, planner and event simulator alone")
    what.add_argument("--paced", action="store_true", help="real rounds of devices that take the time that is true")
    what.add_argument("--shaped", action="store_true", help="machines in namespaces with limited rates; needs root")
    parser.add_argument("--time-scale", type=float, default=0.1, help="wall seconds of a virtual second, for --paced")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--noise", type=float, default=0.02, help="relative, of each median of a round, for --synthetic"
    )
    parser.add_argument("--stories", nargs="*", default=[""], help="those whose names hold one of these, for --shaped")
    parser.add_argument("--out", type=Path, help="file for all that was measured, round by round")
    arguments = parser.parse_args()
    say = partial(print, file=sys.stderr, flush=True)
    if arguments.paced:
        from paced_adaptation import paced_rows

        rows = paced_rows(arguments.time_scale, say)
    elif arguments.shaped:
        from shaped_adaptation import shaped_rows

        rows = shaped_rows(arguments.stories, say)
    else:
        from synthetic_adaptation import synthetic

        rows = synthetic(arguments.seeds, arguments.noise, say)
    began, measured = datetime.datetime.now(datetime.UTC), []
    for row in rows:
        measured.append(row)
        if arguments.out:
            # After each story: the next one may be the one that a person has no time for.
            minutes = (datetime.datetime.now(datetime.UTC) - began).total_seconds() / 60
            run = {
                "command": f"python benchmarks/adaptation.py {' '.join(sys.argv[1:])}",
                "date": f"{began:%Y-%m-%d}",
                "minutes": round(minutes, 1),
                "cores": os.cpu_count(),
                "rows": measured,
            }
            arguments.out.write_text(json.dumps(run, indent=1) + "\n")
    print(table(measured))


if __name__ == "__main__":
    main()
