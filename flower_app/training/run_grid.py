"""The grid of a run: Flower's own, with the layers that bound, hide and record its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import INFO
from pathlib import Path

from flwr.serverapp import Grid

from client_pipeline.link.update_codec import update_codec
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import write_waiting
from flower_app.training.network import clusters_at_once
from strategies.decoder.trainer import DecoderTrainer
from strategies.flower_names import log
from strategies.grid.handed_over import HandedOverOrders
from strategies.grid.intake import RoundBounds
from strategies.grid.recording import RecordingGrid
from strategies.grid.reply_timeouts import BoundedGrid
from strategies.grid.update_spool import UpdateSpool
from strategies.planned_strategy import PlannedStrategy
from strategies.registry import strategy_class

NODES_TIMEOUT_S = 60.0
"""Time that the server waits for its nodes [s]."""
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
    at_once: int | None = None,
    spool: UpdateSpool | None = None,
) -> RecordingGrid:
    """Lay around Flower's grid what a run needs.

    Parameters
    ----------
    flower_grid, config, run_dir : the run's
    decoder : where the server trains the decoder
    clusters : cluster index of each node id
    bounds : what an honest answer keeps to
    on_train : called with the round and its clusters before these are asked to train
    spool : that ``flower_grid`` puts large arrays into; None: one of this run alone
    at_once : client apps that run at the same time; with fewer than clusters that train, orders are handed over; None:
        all
    """
    # One that was killed has left the last words of its round.
    write_waiting(run_dir, {})
    num_trained = clusters_at_once(replace(config, num_clusters=len(clusters)))
    if at_once is not None and at_once < num_trained:
        log(INFO, "%d clusters train at once, on %d client apps", num_trained, at_once)
        # Flower's mods on the nodes clip an update against the order's weights.
        has_mod = config.privacy.update_mechanism.startswith("client-")
        flower_grid = HandedOverOrders(flower_grid, with_weights=has_mod)
    plans = issubclass(strategy_class(config.strategy), PlannedStrategy)
    bounded = BoundedGrid(
        flower_grid,
        clusters,
        decoder,
        reply_timeout_s=config.decoder.reply_timeout,
        on_wait=lambda missing: write_waiting(run_dir, {cluster: reason for cluster, reason in missing}),
    )
    return RecordingGrid(
        bounded,
        clusters,
        None if plans else NODES_TIMEOUT_S,
        codec=update_codec(config.compression),
        bounds=bounds,
        borne=_EMPTY_ROUNDS if decoder is not None else 0,
        count_bytes=config.traits.uploads,
        on_train=on_train,
        spool=spool if spool is not None else UpdateSpool(run_dir),
    )
