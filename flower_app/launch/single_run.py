"""A run in simulation from the command line: its directory, its processes, and what it leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from flower_app.config.cautions import cautions
from flower_app.config.run_config import RunConfig, nested
from flower_app.config.sources import Sets, given_keys, load_config, read_sets
from flower_app.gguf_import import with_gguf_imported
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import Launcher, LaunchOrder, Outcome
from flower_app.launch.progress import RunProgress
from flower_app.launch.run_check import RunCheck
from flower_app.launch.run_events import resume_line
from flower_app.launch.simulation import SimulationLauncher
from flower_app.report.pictures import write_pictures
from flower_app.report.round_parts import local_steps_hint
from flower_app.runs.run_directory import (
    FINISHED,
    claim_run_directory,
    create_run_directory,
    find_run,
    point_latest,
    read_run_config,
    read_summary,
    write_config,
)
from flower_app.runs.run_lock import locked, remove_abandoned_nodes
from flower_app.training.network import training_scenario
from flower_app.training.simulated_actors import clusters_at_once, shared_actors, worker_imports

# What imports torch or the planner is imported where it is called: the command follows a run without them.


class NewRun(NamedTuple):
    """A run that is ready to be launched, but for what its check may say meanwhile."""

    run_dir: Path
    config: RunConfig
    """Complete: with the run directory and the number of clusters."""
    check: RunCheck | None = None
    """None: it has been checked."""


def new_run(
    config: str | None, sets: Sets = (), say: Callable[[str], None] = lambda text: None, *, simulated: bool = True
) -> NewRun:
    """Read a configuration, and make its run directory.

    It is checked when it is launched, or before its directory is made: where this process has imported torch, and where
    the user names the directory, which may hold what is not ours to remove again.

    Parameters
    ----------
    config : a TOML file, or the name of a packaged one; None: the default run
    sets : ``KEY=VALUE`` overrides, or keys with values
    say : told what runs, but hardly as it was meant, and which GGUF file is imported
    simulated : whether a simulation's programs can make the check; else it begins here

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is started; what the check finds is raised by :func:`launch_run` otherwise.
    """
    resolved = load_config(config, sets)
    for caution in cautions(resolved, given_keys(config, sets)):
        say(f"warning: {caution}")
    resolved = with_gguf_imported(resolved, say)
    _refuse_resume(resolved)
    if resolved.run_dir:
        RunCheck(resolved).wait()
        return NewRun(*claim(resolved))
    check = RunCheck(resolved)
    if not simulated:
        check.begin()
    try:
        complete = _completed(resolved)
        run_dir = create_run_directory(complete.runs_dir, complete.name, latest=False)
    except BaseException:
        check.give_up()
        raise
    return NewRun(run_dir, replace(complete, run_dir=str(run_dir)), check)


def claim(resolved: RunConfig) -> tuple[Path, RunConfig]:
    """Make the run directory of a checked configuration, which names it; returns the complete one, too."""
    run_dir = claim_run_directory(resolved.run_dir)
    return run_dir, replace(_completed(resolved), run_dir=str(run_dir))


def check_new_run(resolved: RunConfig) -> int:
    """Check a configuration; returns its number of clusters.

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Naming the key or file.
    """
    from flower_app.launch.preflight import check_run

    _refuse_resume(resolved)
    return check_run(resolved)


def _refuse_resume(resolved: RunConfig) -> None:
    if resolved.resume:
        raise ValueError("resume: use collapipe run --resume RUN")


def _completed(resolved: RunConfig) -> RunConfig:
    """Fill in the number of clusters, and how the decoder's steps go."""
    num_clusters = resolved.num_clusters or training_scenario(resolved).num_clusters
    # All clusters run at once here, so the decoder may wait for all of them in every step.
    sync = "step" if resolved.decoder_sync == "auto" else resolved.decoder_sync
    return replace(resolved, num_clusters=num_clusters, decoder_sync=sync)


def continued_run(run: str, sets: Sets = ()) -> NewRun:
    """Find a run that stopped, and check that it can go on.

    Parameters
    ----------
    run : its directory, its name in ``runs``, or ``latest``
    sets : ``num-rounds`` alone: more than the run has had, also where it has finished

    Raises
    ------
    ValueError, FileNotFoundError
        If it has finished all of its rounds, or has no checkpoint.
    """
    from flower_app.config.strategy_choice import check_can_resume
    from flower_app.launch.preflight import check_run
    from flower_app.runs import run_checkpoints

    run_dir = find_run(run)
    summary, past = read_summary(run_dir), read_run_config(run_dir)
    config = replace(past, run_dir=str(run_dir), resume=True, num_rounds=_extended(past, read_sets(sets)))
    if summary is not None and summary.get("status") == FINISHED and config.num_rounds == past.num_rounds:
        raise ValueError(
            f"--resume: {run_dir} has finished its {summary.get('rounds')} rounds; nothing is left to do: extend it "
            f"with --set num-rounds={2 * past.num_rounds}"
        )
    check_can_resume(config)
    # What looks left over belongs to a run that still goes on.
    with locked(run_dir):
        run_checkpoints.newest(run_dir, config)
    check_run(config)
    return NewRun(run_dir, config)


def _extended(past: RunConfig, sets: Mapping[str, Any]) -> int:
    """Rounds of a run that goes on; only more of them may be asked for."""
    if others := sorted(sets.keys() - {"num-rounds"}):
        raise ValueError(
            f"--resume: a run goes on as it began, found --set {others[0]}; only num-rounds may grow: leave it out, "
            "or start a new run"
        )
    rounds = sets.get("num-rounds", past.num_rounds)
    if not isinstance(rounds, int) or rounds < past.num_rounds:
        raise ValueError(f"--resume: num-rounds: expected at least the run's {past.num_rounds}, found {rounds!r}")
    return rounds


def superlink_of(launcher: Launcher | None) -> str:
    """Address of the SuperLink that a run was handed to; empty for a simulation."""
    return str(getattr(launcher, "address", ""))


def launch_run(
    run: NewRun,
    say: Callable[[str], None],
    launcher: Launcher | None = None,
    progress: RunProgress | None = None,
) -> Outcome:
    """Run to the end, whatever it is, and write the report.

    A simulation's programs start while the configuration is still being checked.

    Parameters
    ----------
    run : what is launched
    say : told where the run is, and what went wrong
    launcher : what the app is handed to; None: a simulation on this machine
    progress : follows the run; None: on standard error

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        What the check has found; nothing of the run is left.
    """
    run_dir, config, _ = run
    progress = progress or RunProgress(run_dir, config.num_rounds)
    reports: list[Path | None] = []

    def draw() -> None:
        # One that is interrupted is not begun again.
        reports.append(None)
        reports.append(write_pictures(run_dir))

    try:
        outcome = _launch(run, say, launcher, progress, draw)
    except _Unfit as unfit:
        # Nobody knows of it yet.
        shutil.rmtree(run_dir)
        raise unfit.reason from None
    finally:
        if run.check is not None:
            run.check.give_up()
    if outcome.status != FINISHED:
        say(f"error: {outcome.error}\nlogs: {run_dir / 'logs'}\n{resume_line(run_dir, superlink_of(launcher))}")
    else:
        progress.report(outcome.summary)
        # In a simulation messages cost what this machine has to do besides; on real machines they cost the round.
        if superlink_of(launcher) and (hint := local_steps_hint(progress.rounds, config.local_steps)):
            say(hint)
    # The run's own processes leave this to us.
    if not reports:
        draw()
    if report := reports[-1]:
        say(f"report: {report}")
    return outcome


class _Unfit(Exception):
    """The configuration cannot run."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _launch(
    run: NewRun,
    say: Callable[[str], None],
    launcher: Launcher | None,
    progress: RunProgress,
    finished: Callable[[], None],
) -> Outcome:
    """Launch a run and follow it; ``finished`` may be called before its programs have ended.

    Raises
    ------
    _Unfit
        Before the app has begun.
    """
    run_dir, config, check = run
    with locked(run_dir) as lock, ExitStack() as shown:

        def begin() -> None:
            if check is not None:
                try:
                    check.wait()
                except Exception as error:
                    raise _Unfit(error) from error
                point_latest(run_dir)
            say(f"run: {run_dir}")
            shown.enter_context(progress)

        # A run that goes on may have more rounds than it began with.
        write_config(run_dir, config)
        # One that failed before may have left its own.
        shutil.rmtree(run_dir / "flower", ignore_errors=True)
        folder = assemble_app(run_dir / "flower" / "app")
        config_file = run_dir / "flower" / "run.toml"
        config_file.write_text(tomli_w.dumps(nested(config.to_flat())), encoding="utf-8")
        if config.resume:
            # Whatever the last process wrote about its end is no longer true.
            (run_dir / "summary.json").unlink(missing_ok=True)
        # A simulation's programs make the check, and start beside it.
        begins_later = launcher is None and check is not None and not check.is_over
        if not begins_later:
            begin()
        order = LaunchOrder(
            run_dir=run_dir,
            app=folder,
            run_config=config_file,
            num_clusters=config.num_clusters,
            clusters_at_once=clusters_at_once(config),
            joins_ray=True,
            shared_actors=shared_actors(config),
            worker_imports=worker_imports(config),
            actor_idle_s=config.runtime.actor_idle,
            check=check if begins_later else None,
            begin=begin if begins_later else lambda: None,
            watch=progress.update,
            finished=finished,
            say=say,
            inherited_fds=[lock],
        )
        try:
            outcome = (launcher or SimulationLauncher()).launch(order)
        except KeyboardInterrupt:
            say(f"interrupted; {resume_line(run_dir, superlink_of(launcher))}")
            raise
        finally:
            # A server app that was killed could not.
            remove_abandoned_nodes()
        progress.update()
    return outcome
