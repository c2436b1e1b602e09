"""Runs of a series that were made before: one that has finished is taken, one that stopped goes on.

A run goes on from its last checkpoint, and begins again where it has none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import FREE_TO_CHANGE, check_can_resume
from flower_app.launch.single_run import claim, continued_run
from flower_app.runs.run_directory import CONFIG, FINISHED, read_run_config, read_summary
from flower_app.runs.run_lock import locked

_FILLED_IN = ("num-clusters", "decoder-sync", "name")
_MADE_FIRST = {"plans", "logs", ".lock"}
"""What a run directory holds before its configuration is written."""


def has_finished(config: RunConfig) -> bool:
    """Whether this run has finished in its ``run-dir``; one that stopped has not.

    Raises
    ------
    ValueError
        If the folder holds a run with another configuration, or something else.
    """
    run_dir = Path(config.run_dir)
    if not (run_dir / CONFIG).is_file():
        if run_dir.exists() and (not run_dir.is_dir() or {path.name for path in run_dir.iterdir()} - _MADE_FIRST):
            raise ValueError(f"{run_dir}: is not a run directory; move it away or choose another --out")
        return False
    past, wanted = read_run_config(run_dir).to_flat(), config.to_flat()
    for key in sorted(wanted):
        if past[key] != wanted[key] and not key.startswith((*FREE_TO_CHANGE, *_FILLED_IN)):
            raise ValueError(
                f"{run_dir}: was trained with {key} = {past[key]!r}, expected {wanted[key]!r}; remove the folder "
                "or choose another --out"
            )
    summary = read_summary(run_dir)
    return summary is not None and summary.get("status") == FINISHED


def _clear_unfinished(config: RunConfig, say: Callable[[str], None]) -> None:
    """Remove what a run left that stopped without a checkpoint, so that it begins again."""
    run_dir = Path(config.run_dir)
    if not (run_dir / CONFIG).is_file():
        return
    with locked(run_dir):
        say(f"{run_dir.name}: did not finish, and has no checkpoint; begins again")
        shutil.rmtree(run_dir)


def go_on(config: RunConfig, say: Callable[[str], None]) -> tuple[Path, RunConfig]:
    """Prepare a run that has not finished: from its checkpoint, or from the beginning.

    Returns
    -------
    Its directory, and its complete configuration.
    """
    run_dir = Path(config.run_dir)
    if (run_dir / CONFIG).is_file() and _is_resumable(config):
        try:
            run_dir, continued, _ = continued_run(str(run_dir))
        except FileNotFoundError:
            pass
        else:
            say(f"{run_dir.name}: goes on from its checkpoint")
            return run_dir, continued
    _clear_unfinished(config, say)
    return claim(config)


def _is_resumable(config: RunConfig) -> bool:
    try:
        check_can_resume(config)
    except ValueError:
        return False
    return True
