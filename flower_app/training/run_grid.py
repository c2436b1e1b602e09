"""The grid of a run: Flower's own, with the layers that bound, hide and record its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.serverapp import Grid

from client_pipeline.link.update_codec import update_codec
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import write_waiting
from flower_app.training.releases import most_examples
from strategies.aggregation.secagg import SecureGrid
from strategies.decoder.trainer import DecoderTrainer
from strategies.grid.bounded import BoundedGrid
from strategies.grid.intake import RoundBounds
from strategies.grid.recording import RecordingGrid
from strategies.grid.update_spool import UpdateSpool
from strategies.planned_strategy import PlannedStrategy
from strategies.registry import strategy_class

NODES_TIMEOUT_S = 60.0
"""How long the server waits for its nodes."""
_EMPTY_ROUNDS = 2
"""Rounds in a row that may pass without any cluster: a fault, and its control units on their way back."""


def run_grid(
    flower_grid: Grid,
    config: RunConfig,
    run_dir: Path,
    decoder: DecoderTrainer | None,
    clusters: Mapping[int, int],
    bounds: RoundBounds,
    on_train: Callable[[int, list[int]], None] | None,
    spool: UpdateSpool | None = None,
) -> RecordingGrid:
    """Lay around Flower's grid what a run needs.

    Parameters
    ----------
    flower_grid : Flower's own
    config, run_dir : the run's
    decoder : where the server trains the decoder
    clusters : cluster index of each node id
    bounds : what an honest answer keeps to
    on_train : called with the round and its clusters before these are asked to train
    spool : that ``flower_grid`` puts large arrays into; None: one of this run alone
    """
    # One that was killed has left the last words of its round.
    write_waiting(run_dir, {})
    plans = issubclass(strategy_class(config.strategy), PlannedStrategy)
    grid: Grid = BoundedGrid(
        flower_grid,
        clusters,
        decoder,
        reply_timeout_s=config.decoder.reply_timeout,
        on_wait=lambda missing: write_waiting(run_dir, {cluster: reason for cluster, reason in missing}),
    )
    if config.privacy.secure_aggregation:
        grid = SecureGrid(grid, max_weight=float(most_examples(config) * config.data.max_length))
    return RecordingGrid(
        grid,
        clusters,
        None if plans else NODES_TIMEOUT_S,
        codec=update_codec(config.compression),
        bounds=bounds,
        borne=_EMPTY_ROUNDS if decoder is not None else 0,
        count_bytes=config.traits.uploads,
        on_train=on_train,
        spool=spool if spool is not None else UpdateSpool(run_dir),
    )
