"""Committing a run's rounds, and finding what it goes on from: checkpoint, rounds, model and files belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from client_pipeline.run_identity import RunIdentity, config_digest
from flower_app import saved_model
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_can_resume, check_same_run, fixed_keys
from flower_app.runs import run_directory
from flower_app.runs.run_inputs import check_inputs, input_digests
from strategies import checkpoint
from strategies.checkpoint import Checkpoint, DamagedCheckpoint


def new_identity(run_dir: Path, config: RunConfig) -> RunIdentity:
    """Draw the identity of a new run; its directory must not hold another one."""
    run_directory.check_unused(run_dir)
    return RunIdentity.fresh(config_digest(fixed_keys(config)))


def commit_round(run_dir: Path, round_state: Checkpoint, config: RunConfig, inputs: dict[str, str]) -> None:
    """Commit a round: its line in ``rounds.jsonl`` and its model are on the disk already."""
    state: dict[str, Any] = {**run_directory.rounds_mark(run_dir), "config": config.to_flat(), "inputs": inputs}
    checkpoint.commit(run_dir, round_state._replace(state=round_state.state | state))


def newest(run_dir: Path, config: RunConfig) -> Checkpoint:
    """Read what a run goes on from; changes nothing.

    Raises
    ------
    ValueError, FileNotFoundError
        If there is nothing to go on from, or the run would not go on as it began; the message names the file or key.
    """
    check_can_resume(config)

    def check(candidate: Checkpoint) -> None:
        try:
            run_directory.check_rounds(run_dir, candidate.state)
        except ValueError as error:
            raise DamagedCheckpoint(f"round {candidate.round}: {error}") from error

    newest_checkpoint = checkpoint.last_committed(run_dir, check)
    check_same_run(config, newest_checkpoint)
    check_inputs(newest_checkpoint.state["inputs"], input_digests(config))
    return newest_checkpoint


def keep_models(run_dir: Path) -> None:
    """Drop the versions of the model that no committed round needs."""
    saved_model.keep_versions(run_dir, checkpoint.committed_rounds(run_dir))


def reopened(run_dir: Path, config: RunConfig) -> Checkpoint:
    """Put the run directory back to its newest checkpoint, and return that; see :func:`newest`."""
    newest_checkpoint = newest(run_dir, config)
    checkpoint.go_back(run_dir, newest_checkpoint.round)
    saved_model.restore_version(run_dir, newest_checkpoint.round)
    run_directory.reopen(run_dir, int(newest_checkpoint.state["rounds-size"]))
    return newest_checkpoint
