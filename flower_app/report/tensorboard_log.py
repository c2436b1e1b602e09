"""Scalars of each round for TensorBoard: ``tensorboard --logdir runs``."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flower_app.report.data import used_bytes

TENSORBOARD_FOLDER = "tensorboard"


def check_available() -> None:
    """Refuse to start where TensorBoard's package is not installed.

    Raises
    ------
    ValueError
        With the command that installs it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard: the package tensorboard is not installed; "
            "pip install 'collapipe[tensorboard]' or set tensorboard = false"
        )


class TensorBoardLog:
    """Writes the scalars of a run's rounds to ``<run>/tensorboard``, at step = round.

    Parameters
    ----------
    run_dir : the run directory
    start_round : the first round that will be written; what an interrupted process wrote from there on is dropped
    """

    def __init__(self, run_dir: Path, start_round: int) -> None:
        check_available()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / TENSORBOARD_FOLDER), purge_step=start_round)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of one round's record, and hand them to the disk: a run may be killed."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, int(record["round"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of one line of ``rounds.jsonl``; what is missing, null or not a number is left out."""
    for tag, value in _tagged(record):
        if isinstance(value, int | float) and math.isfinite(value):
            yield tag, float(value)


def _tagged(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "train/loss", record.get("train_loss")
    yield "train/lr", record.get("lr")
    for name, value in (record.get("metrics") or {}).items():
        yield f"validation/{name}", value
    for name in ("bytes_down", "bytes_up"):
        yield f"messages/{name}", record.get(name)
    for name in ("messages_s", "round_s", "wall_s"):
        yield f"wall/{name}", record.get(name)
    yield "round/failed", len(record.get("failed") or ())
    yield "round/left_out", len((record.get("plan") or {}).get("left_out") or ())
    control = (record.get("plan") or {}).get("power_control") or {}
    for name in ("iterations", "residual", "gap"):
        yield f"power_control/{name}", control.get(name)
    for report in record.get("clusters") or ():
        for device, spent in (report.get("devices") or {}).items():
            if math.isfinite(used := used_bytes(spent)):
                yield f"memory_bytes/cluster_{report.get('cluster')}_device_{device}", used
    virtual = record.get("virtual") or {}
    for name in ("latency_s", "latency_eq15_s", "latency_fused_s", "energy_j", "gamma_max"):
        yield f"virtual/{name}", virtual.get(name)
    for cluster in virtual.get("clusters") or ():
        n = cluster.get("cluster")
        for name in ("gamma", "queue", "energy_queue", "train_s", "uplink_s", "waiting_s", "uplink_energy_j"):
            yield f"{name}/cluster_{n}", cluster.get(name)
        for name in ("device_energy_j", "link_bytes"):
            if cluster.get(name):
                yield f"{name}/cluster_{n}", sum(value or 0.0 for value in cluster[name])
