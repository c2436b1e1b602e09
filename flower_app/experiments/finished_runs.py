"""Runs of an experiment that are kept one by one, so that it may be interrupted and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from client_pipeline import durable
from flower_app.config.run_config import RunConfig
from flower_app.experiments.experiment import Curve, Row


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
            found, expected = kept["settings"].get(key), settings.get(key)
            if found != expected:
                raise ValueError(f"{file}: was made with {key} = {found}, expected {expected}; remove the folder")
        rows: list[Row] = kept["rows"]
        return rows
    say(file.stem)
    rows = list(make())
    file.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(file, json.dumps({"settings": settings, "rows": rows}))
    return rows
