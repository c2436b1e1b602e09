"""Live progress of a run, read from what the run writes. All of it goes to standard error."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from client_pipeline.counted import counted
from flower_app.launch.run_events import fault_line, what_happened
from flower_app.launch.terminal_view import TerminalView, clock_text
from flower_app.plain_console import PlainConsole
from flower_app.runs.followed_rounds import FollowedRounds, seconds_left
from flower_app.runs.live_faults import MissingSign, faults_of_round, missing_signs
from flower_app.runs.phases import LAUNCHING, TRAINING, phases_size, read_phases
from flower_app.runs.run_directory import Wait, read_waiting

_EVALUATIONS = 8
"""Evaluations that the closing table shows at most."""
_LONG_S = 5.0
"""Shortest wait whose end is shown [s]."""
_QUIET_S = 1.0
"""Least time between two lines that tell nothing but the loss [s]."""
_WORTH_TELLING_S = 0.05
"""Phases that are shorter are not shown [s]."""
_REMINDER_S = 30.0
"""Interval of reminders that a round still waits for a cluster [s]."""
TOLD_AFTER_S = 2.0
"""Silence of a device or cluster before the terminal shows it: busy machines pause for a moment [s]."""

_Place = tuple[int, int | None]


class RunProgress:
    """Progress of a run: start-up phases, a view on a terminal or else a line a round, faults and waits as they happen.

    Parameters
    ----------
    run_dir : the run directory
    num_rounds : of the whole run
    console : standard error if None
    quiet : show nothing
    on_round : called with each round's line
    """

    def __init__(
        self,
        run_dir: Path,
        num_rounds: int,
        console: Console | None = None,
        *,
        quiet: bool = False,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.num_rounds = num_rounds
        self.console = console or PlainConsole(stderr=True, quiet=quiet)
        self._on_round = on_round
        self._followed = FollowedRounds(run_dir)
        self.rounds = self._followed.read().lines
        """All so far. Those of an earlier process were shown then."""
        self._phases_offset = phases_size(run_dir)
        self._phase = LAUNCHING
        self._began = self._phase_began = time.time()
        self._start_up_s = 0.0
        """From the start to the first round [s]; 0 before it."""
        self._first_round = 0
        """First round of this process; 0 before it has ended."""
        self._spoke = -math.inf
        self._view = TerminalView(num_rounds, int(self.rounds[-1]["round"]) if self.rounds else 0)
        self._bar: Live | None = None
        """The lines that stay, on a terminal."""
        self._waits: dict[str, Wait] = {}
        """Waits by cluster, as they were shown last."""
        self._reminded: dict[str, float] = {}
        self._live = LiveLines()

    def __enter__(self) -> RunProgress:
        """Show the lines that stay, where there is a terminal."""
        if self.console.is_terminal:
            self._view.doing = self._phase
            self._bar = Live(self._view, console=self.console, transient=True)
            self._bar.start()
        else:
            self.console.print("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the lines that stay."""
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Read what was added since the last call, and show it."""
        self._show_phases()
        kept, new_records = self._followed.read()
        del self.rounds[kept:]
        for record in new_records:
            self.rounds.append(record)
            self._first_round = self._first_round or int(record["round"])
            self._show_faults(record)
            telling = record.get("metrics") or record.get("failed") or record["round"] in (1, self.num_rounds)
            if self._bar is None and (telling or time.monotonic() - self._spoke >= _QUIET_S):
                self._spoke = time.monotonic()
                self.console.print(f"round {record['round']}/{self.num_rounds}  {self.status()}", soft_wrap=True)
            if self._on_round is not None:
                self._on_round(record)
        if new_records:
            left_s = self.seconds_left()
            evaluated = next((record for record in reversed(self.rounds) if record.get("metrics")), None)
            self._view.show(self.rounds, self._scores_in_words(evaluated), clock_text(left_s) if left_s else "")
        self._show_waits()
        first = int(self.rounds[-1]["round"]) + 1 if self.rounds else 1
        for line in self._live.present(faults_of_round(self.run_dir, first), missing_signs(self.run_dir, first)):
            self._tell_fault(line)

    def _show_phases(self) -> None:
        """Report the phases of the start-up with their durations."""
        phases, self._phases_offset = read_phases(self.run_dir, self._phases_offset)
        for phase in phases:
            took_s = float(phase["began"]) - self._phase_began
            if not self._start_up_s and took_s >= _WORTH_TELLING_S:
                self._tell(f"start-up: {self._phase} {took_s:.1f} s")
            self._phase, self._phase_began = str(phase["phase"]), float(phase["began"])
            if self._phase == TRAINING and not self._start_up_s:
                self._start_up_s = max(self._phase_began - self._began, _WORTH_TELLING_S)
            self._view.doing = self._phase

    def _show_faults(self, record: Mapping[str, Any]) -> None:
        """Report the faults and the failed clusters of a round."""
        for line in self._live.of_round(record.get("faults") or ()):
            self._tell_fault(line)
        for failed in record.get("failed") or ():
            self._tell(f"round {record['round']}: cluster {failed.get('cluster')} failed: {failed.get('reason', '')}")
        if record.get("updated") is False:
            self._tell(f"round {record['round']}: no update counted; the model stays as it was")

    def _show_waits(self) -> None:
        """Report each wait of the round with its reason: when it changes, while it lasts, and at its end."""
        waits, now = read_waiting(self.run_dir), time.time()
        for cluster, wait in waits.items():
            if cluster not in self._waits or self._waits[cluster].reason != wait.reason:
                self._reminded[cluster] = now
                self._tell(f"waiting for cluster {cluster}: {wait.reason}")
            elif now - self._reminded[cluster] >= _REMINDER_S:
                self._reminded[cluster] = now
                self._tell(f"still waiting for cluster {cluster}, for {now - wait.since:.0f} s: {wait.reason}")
        for cluster in self._waits.keys() - waits.keys():
            waited_s = now - self._waits[cluster].since
            if waited_s >= _LONG_S:
                self._tell(f"no longer waiting for cluster {cluster}, after {waited_s:.0f} s")
        self._waits = waits

    def _tell_fault(self, line: str) -> None:
        self._view.newest_fault = line
        self._tell(line)

    def _tell(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def status(self) -> str:
        """Return the last round's loss, its metrics if it was evaluated, its failures, and the time left."""
        left_s = self.seconds_left()
        return self._scores_in_words(self.rounds[-1]) + (f"  {clock_text(left_s)} left" if left_s else "")

    def _scores_in_words(self, evaluated: Mapping[str, Any] | None) -> str:
        last_record = self.rounds[-1]
        words = [f"loss {_number(last_record.get('train_loss'))}"]
        if evaluated is not None and evaluated.get("metrics"):
            metrics = evaluated["metrics"]
            names = [name for name in metrics if name != "loss"] or list(metrics)
            words += [f"{name} {_number(metrics[name])}" for name in names]
            if evaluated is not last_record:
                words[-1] += f" (round {evaluated['round']})"
        if last_record.get("failed"):
            words.append(f"{counted(len(last_record['failed']), 'cluster')} failed")
        return "  ".join(words)

    def seconds_left(self) -> float:
        """Return the expected time to the end of the last round [s], from the recent rounds."""
        return seconds_left(self.rounds, self.num_rounds)

    def report(self, summary: Mapping[str, Any]) -> None:
        """Show the evaluations, the result, the duration and the run directory."""
        evaluated = [record for record in self.rounds if record.get("metrics")]
        if len(evaluated) > _EVALUATIONS:
            step = math.ceil(len(evaluated) / _EVALUATIONS)
            # Counted from the end, so that the last stays.
            evaluated = evaluated[::-1][::step][::-1]
        if evaluated:
            names = list(evaluated[-1]["metrics"])
            # Beside the loss of training.
            titles = ["validation loss" if name == "loss" else name for name in names]
            table = Table("round", "train loss", *titles, box=None, pad_edge=False)
            for record in evaluated:
                values = [_number(record["metrics"].get(name)) for name in names]
                table.add_row(str(record["round"]), _number(record.get("train_loss")), *values)
            self.console.print(table)
        scores = "  ".join(f"{name} {_number(value)}" for name, value in summary.get("metrics", {}).items())
        scored_round = summary.get("scored_round")
        mark = f" (model of round {scored_round})" if scores and scored_round else ""
        self._tell(f"test: {scores or 'not scored'}{mark}  ({clock_text(float(summary.get('wall_s') or 0.0))})")
        if self._start_up_s:
            all_s = time.time() - self._began
            self._tell(
                f"time: {clock_text(all_s)} in all: {clock_text(self._start_up_s)} until round "
                f"{self._first_round or 1}, {clock_text(all_s - self._start_up_s)} since"
            )
        self.console.print(f"run: {self.run_dir}", soft_wrap=True)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


class LiveLines:
    """Memory of the lines that were shown: a round's line has all of its faults, and repeats none."""

    def __init__(self) -> None:
        self._told: dict[tuple[Any, ...], bool] = {}
        """Faults that were shown, and whether their recovery was, too."""
        self._silent: dict[_Place, MissingSign] = {}

    def present(self, faults: Iterable[Mapping[str, Any]], signs: Iterable[MissingSign]) -> Iterator[str]:
        """Yield what is new in the round under way."""
        faults = list(faults)
        for key, fault in _numbered(faults):
            if key not in self._told:
                self._told[key] = bool(fault.get("recovered"))
                yield fault_line(fault) if fault.get("recovered") else what_happened(fault)
            elif fault.get("recovered") and not self._told[key]:
                self._told[key] = True
                yield fault_line(fault)
        signs = list(signs)
        missing = {(sign.cluster, sign.device): sign for sign in signs if sign.seconds >= TOLD_AFTER_S}
        for place, sign in missing.items():
            if place not in self._silent:
                self._silent[place] = sign
                yield str(sign)
        present = {(sign.cluster, sign.device) for sign in signs}
        lost = {(fault.get("cluster"), fault.get("device")) for fault in faults if not fault.get("recovered")}
        for place in self._silent.keys() - present:
            sign = self._silent.pop(place)
            # A cluster or device that was given up has a line of its own; so has its return.
            if place not in lost and sign.state == "silent":
                where = f"cluster {sign.cluster}" + ("" if sign.device is None else f", device {sign.device}")
                yield f"{where}: there again"

    def of_round(self, faults: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the faults of a round's line that were not shown while the round went on."""
        self._silent.clear()
        for key, fault in _numbered(faults):
            if self._told.pop(key, None) is not bool(fault.get("recovered")) or not fault.get("recovered"):
                yield fault_line(fault)


def _numbered(faults: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield faults with their keys; a key has a number, for one device may be lost twice in a step."""
    numbers: Counter[tuple[Any, ...]] = Counter()
    for fault in faults:
        key = tuple(fault.get(name) for name in ("round", "cluster", "device", "kind", "step"))
        numbers[key] += 1
        yield (*key, numbers[key]), fault
