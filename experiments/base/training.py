"""Shared code of the training experiments: it trains each curve once with each seed, and reads the run directories.

A finished run in the experiment's folder is used as it is. An interrupted experiment therefore goes on, and
``--only`` makes it in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.base.experiment import Curve, Row
from flower_app.compare.trained import seeded
from flower_app.config.run_config import RunConfig
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.runs.run_directory import read_rounds, read_summary

SCORES = {"bleu": "BLEU", "f1": "span F1 [%]", "accuracy": "accuracy [%]", "macro_f1": "macro-F1 [%]"}
"""Metrics as figures name them."""
_SHARES = ("f1", "accuracy", "macro_f1", "precision", "recall")
"""Metrics between 0 and 1; shown in per cent, as BLEU is."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of an experiment."""

    curve: Curve
    seed: int
    """Index of the seed among the curve's, from 0."""
    config: RunConfig
    """Run configuration with a ``run-dir`` of its own."""

    @property
    def run_dir(self) -> Path:
        """Return the directory of the run, which may not exist yet."""
        return Path(self.config.run_dir)


def trainings(curves: Sequence[Curve], folder: Path) -> list[Training]:
    """Every curve with every seed, all curves of the first seed first.

    Parameters
    ----------
    curves : of the experiment
    folder : of the experiment; the run directories go into its ``runs``
    """
    return [
        Training(curve=curve, seed=seed, config=placed(seeded(curve.config, seed), folder, f"{curve.name}-seed{seed}"))
        for seed in range(max(curve.seeds for curve in curves))
        for curve in curves
        if seed < curve.seeds
    ]


def placed(config: RunConfig, folder: Path, name: str) -> RunConfig:
    """Give a run a directory in the experiment's folder."""
    return replace(config, run_dir=str((folder / "runs" / name).resolve()), checkpoint_every=0)


def train_all(trainings: Sequence[Training], folder: Path, say: Callable[[str], None]) -> None:
    """Train what has not finished before.

    Parameters
    ----------
    trainings : the experiment's runs
    folder : of the experiment
    say : told what runs

    Raises
    ------
    ValueError, FileNotFoundError, InfeasibleRound
        Before anything is trained: for a configuration that cannot run, naming the curve; or for a run directory that
        holds a run with another configuration.
    RuntimeError
        If a run fails.
    """
    series = [SeriesRun(training.curve.name, training.config) for training in trainings]
    train_series(series, (folder / "session").resolve(), say)


def score_of(metrics: dict[str, float], name: str) -> float | None:
    """A metric as figures show it: BLEU, or per cent; None where it was not taken."""
    value = metrics.get(name)
    return None if value is None else (100 if name in _SHARES else 1) * value


def history(training: Training, *, every_round: bool = False) -> list[Row]:
    """One row for each round that was scored, the last one with the score on the test set.

    Parameters
    ----------
    training : a run that has finished; ``[figure]`` of its curve names the ``score``
    every_round : also rounds without a score
    """
    score = str(training.curve.figure["score"])
    rows: list[Row] = []
    losses: list[float] = []
    samples, virtual_s = 0, 0.0
    config = training.config
    for record in read_rounds(training.run_dir)[0]:
        virtual = record["virtual"]
        virtual_s += virtual["latency_s"] or 0.0
        trained = sum(cluster["selected"] for cluster in virtual["clusters"])
        samples += trained * config.local_steps * config.gradient_accumulation * config.batch_size
        losses.append(record["train_loss"])
        if not (record["metrics"] or every_round):
            continue
        rows.append(
            {
                "curve": training.curve.name,
                "label": training.curve.label,
                "metric": score,
                "seed": training.seed,
                "round": record["round"],
                "samples": samples,
                "virtual_h": virtual_s / 3600,
                "train_loss": float(np.mean(losses)),
                "loss": record["metrics"].get("loss"),
                "score": score_of(record["metrics"], score),
                "test_score": None,
            }
        )
        losses = []
    rows[-1]["test_score"] = score_of(_summary(training)["metrics"], score)
    return rows


def _summary(training: Training) -> dict[str, Any]:
    summary = read_summary(training.run_dir)
    assert summary is not None
    return summary
