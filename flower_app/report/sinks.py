"""Trackers of a run's scalars (``report-to``), as users of a Trainer know them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

from client_pipeline import durable
from flower_app.report.data import scalars
from strategies.flower_names import log

SINKS = ("tensorboard", "mlflow", "wandb")
_RUN_ID = "mlflow-run"
"""File in the run directory with the id of its run at MLflow: a run that goes on goes on there, too."""
_PROJECT = "collapipe"
_MOST_CHARACTERS = 500
"""Longest parameter value at MLflow."""


class RoundSink(Protocol):
    """Takes each round's line."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one line."""

    def close(self) -> None:
        """End."""


def sink_names(report_to: str, tensorboard: bool = False) -> list[str]:
    """Read ``report-to``: names with commas; ``tensorboard = true`` adds its own.

    Raises
    ------
    ValueError
        For an unknown name, or a package that is not installed, with the command that installs it.
    """
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SINKS]:
        raise ValueError(f"report-to: expected some of {', '.join(SINKS)} with commas, found {unknown[0]!r}")
    if tensorboard:
        names.append("tensorboard")
    for name in (names := list(dict.fromkeys(names))):
        if importlib.util.find_spec(name) is None:
            key = "report-to" if name in report_to else "tensorboard"
            raise ValueError(
                f"{key}: the package {name} is not installed; pip install 'collapipe[{name}]', or leave {name} out"
            )
    return names


def open_sinks(
    report_to: str, tensorboard: bool, run_dir: Path, start_round: int, settings: Mapping[str, Any]
) -> RoundSinks | None:
    """Open the sinks that ``report-to`` names, from a first round on; None where it names nothing."""
    made: dict[str, RoundSink] = {}
    for name in sink_names(report_to, tensorboard):
        if name == "tensorboard":
            made[name] = TensorBoardLog(run_dir, start_round)
        else:
            made[name] = (MlflowSink if name == "mlflow" else WandbSink)(run_dir, settings)
    return RoundSinks(made) if made else None


class TensorBoardLog:
    """Writes the scalars of a run's rounds to ``<run>/tensorboard``, at step = round.

    Parameters
    ----------
    run_dir : the run directory
    start_round : the first round that will be written; what an interrupted process wrote from there on is dropped
    """

    def __init__(self, run_dir: Path, start_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_round)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of one round's record, and hand them to the disk: a run may be killed."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, int(record["round"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class RoundSinks:
    """Several sinks as one; a training goes on where one of them fails, which is logged once for each."""

    def __init__(self, sinks: Mapping[str, RoundSink]) -> None:
        self._sinks = sinks
        self._failed: set[str] = set()

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a round's line to each."""
        for name, sink in self._sinks.items():
            self._tried(name, partial(sink.write, record))

    def close(self) -> None:
        """Close each."""
        for name, sink in self._sinks.items():
            self._tried(name, sink.close)

    def _tried(self, name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            if name not in self._failed:
                log(WARNING, "report-to: %s failed, the training goes on: %s: %s", name, type(error).__name__, error)
            self._failed.add(name)


class MlflowSink:
    """Writes to the store that ``MLFLOW_TRACKING_URI`` names, or to ``mlflow.db`` beside the run directories."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=store)
        file = run_dir / _RUN_ID
        if file.is_file():
            self.run_id = file.read_text(encoding="utf-8").strip()
            self._client.set_terminated(self.run_id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(_PROJECT)
        number = self._client.create_experiment(_PROJECT) if experiment is None else experiment.experiment_id
        self.run_id = str(self._client.create_run(number, run_name=run_dir.name).info.run_id)
        durable.write_text(file, self.run_id + "\n", lasting=False)
        for key, value in settings.items():
            self._client.log_param(self.run_id, key, str(value)[:_MOST_CHARACTERS])

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of one round's record."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [
            Metric(re.sub(r"[^A-Za-z0-9_\-. /]", "_", tag), value, now, int(record["round"]))
            for tag, value in scalars(record)
        ]
        # Its stores take at most a thousand at once.
        for first in range(0, len(values), 1000):
            self._client.log_batch(self.run_id, metrics=values[first : first + 1000])

    def close(self) -> None:
        """Note that the run has ended."""
        self._client.set_terminated(self.run_id)


class WandbSink:
    """Writes to Weights & Biases, as ``wandb login`` and its variables (``WANDB_MODE``, ``WANDB_PROJECT``) say.

    Parameters
    ----------
    run_dir : the run directory; its name is the run's id, so that a run that goes on goes on there, too
    settings : the run's parameters
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run_dir.name),
            name=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the scalars of one round's record."""
        self._run.log({tag: value for tag, value in scalars(record) if math.isfinite(value)}, step=int(record["round"]))

    def close(self) -> None:
        """End the run there."""
        self._run.finish()
