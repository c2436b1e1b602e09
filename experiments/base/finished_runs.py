"""Runs of an experiment that are kept one by one, so that it may be interrupted and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from client_pipeline import durable
from experiments.base.experiment import Curve, Row
from flower_app.compare.trained import seeded
from flower_app.config.run_config import RunConfig


def rows_seed_by_seed(
    curves: Sequence[Curve],
    folder: Path,
    make: Callable[[Curve, RunConfig, int], Iterator[Row]],
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Return the rows of all curves and their seeds, each run made once and kept.

    Parameters
    ----------
    curves : with ``[figure]`` ``seeds``
    folder : of the experiment
    make : makes the rows of a curve, its configuration and a seed
    say : told of each run that begins
    """
    rows: list[Row] = []
    # All curves of the first seed first: whoever stops early has whole seeds.
    for seed in dict.fromkeys(seed for curve in curves for seed in curve.figure["seeds"]):
        for curve in curves:
            if seed in curve.figure["seeds"]:
                config = seeded(curve.config, seed)
                file = folder / "runs" / f"{curve.name}-seed{seed}.json"
                rows += finished_rows(file, curve, config, partial(make, curve, config, seed), say)
    yield from rows


def finished_rows(
    file: Path, curve: Curve, config: RunConfig, make: Callable[[], Iterator[Row]], say: Callable[[str], None]
) -> list[Row]:
    """Return a run's rows: as they are kept, or made now and kept.

    Parameters
    ----------
    file : where they are, or will be
    curve : of the run
    config : the run's own, with its seed
    make : makes the rows
    say : told that the run begins

    Raises
    ------
    ValueError
        If the file is of another configuration.
    """
    # Other seeds may come later.
    figure = {f"figure.{key}": value for key, value in curve.figure.items() if key != "seeds"}
    settings = config.to_flat() | figure
    # As JSON has them: a tuple has become a list.
    settings = json.loads(json.dumps(settings))
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        for key in settings.keys() | kept["settings"].keys():
            kept_value, expected = kept["settings"].get(key), settings.get(key)
            if kept_value != expected:
                raise ValueError(f"{file}: was made with {key} = {kept_value}, expected {expected}; remove the folder")
        rows: list[Row] = kept["rows"]
        return rows
    say(file.stem)
    rows = list(make())
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(file, json.dumps({"settings": settings, "rows": rows}))
    return rows
