"""Types of an experiment: it makes rows from curves, and a picture and findings from the rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_app.config.run_config import RunConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
"""Scalars by column: one line of ``results.jsonl`` and ``results.csv``."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One TOML of ``configs/paper``: a run configuration, how often it is repeated, and what the figure varies."""

    name: str
    """Name of its file, without suffix."""
    label: str
    """Text in the legend."""
    config: RunConfig
    seeds: int
    """Networks, models and data orders, from the configuration's own on."""
    figure: Mapping[str, Any]
    """The figure's own settings: its grid."""


@dataclass(frozen=True, kw_only=True)
class PaperFinding:
    """One published figure beside ours."""

    what: str
    paper: str
    ours: str
    why: str
    """Reason for a difference, or the part that is not comparable."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or table of the paper."""

    name: str
    shows: str
    """Content of the figure or table, in a line."""
    run: Callable[[Sequence[Curve], Path, Callable[[str], None]], Iterator[Row]]
    """Yield rows from the curves, a folder for runs, and a callback for progress."""
    draw: Callable[[Sequence[Row]], Figure]
    findings: Callable[[Sequence[Row]], list[PaperFinding]]
    trains: bool = False
    """True if it trains models; the others only plan."""
    compact: Callable[[Sequence[Row]], list[Row]] | None = None
    """Reduction of many rows to a short table that gives the same findings; None where the rows are few."""


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distinct(rows: Sequence[Row], column: str) -> list[Any]:
    """Values of a column, each once, in their order."""
    return list(dict.fromkeys(row[column] for row in rows))
