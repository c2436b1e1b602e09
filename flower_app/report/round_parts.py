"""Parts of a round's wall time, with a hint to more local steps where messages take most of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flower_app.report.data import as_number

_SLOTS = ("prepare_s", "train_s", "collect_s")
"""Keys of a cluster's report: weights to the devices, local steps, weights back."""
_MOST = 10
"""Times as many local steps as there were: more are never named."""


class RoundParts(NamedTuple):
    """Wall seconds of a round by what they went to; NaN where its line does not say."""

    local_steps: float
    """Local steps of the slowest cluster: the clusters work at the same time."""
    weights: float
    """To and from its devices."""
    messages: float
    """Messages, the start of their processes, and waiting for others."""
    server: float
    """Planning, averaging, scoring and the checkpoint."""


def round_parts(record: Mapping[str, Any]) -> RoundParts:
    """Split the wall seconds of a round, of its line of ``rounds.jsonl``."""
    slots = [[as_number(report.get(slot)) for slot in _SLOTS] for report in record.get("clusters") or ()]
    whole, exchange = as_number(record.get("round_s")), as_number(record.get("messages_s"))
    server = max(whole - exchange, 0.0)
    if not slots:
        return RoundParts(np.nan, np.nan, exchange, server)
    prepare, train, collect = max(slots, key=lambda times: float(np.nansum(times)))
    weights = float(np.nansum([prepare, collect]))
    return RoundParts(train, weights, max(exchange - train - weights, 0.0), server)


def local_steps_hint(rounds: Sequence[Mapping[str, Any]], local_steps: int) -> str:
    """Name the local steps with which training would take as long as messages; empty where it does already.

    Parameters
    ----------
    rounds : lines of ``rounds.jsonl``; the first, in which all is set up, does not count
    local_steps : ``local-steps`` of the run
    """
    parts = [part for record in rounds[1:] if math.isfinite(sum(part := round_parts(record)))]
    if not parts:
        return ""
    train, _, messages, _ = (statistics.median(seconds) for seconds in zip(*parts, strict=True))
    whole = statistics.median(sum(part) for part in parts)
    if messages <= whole / 2 or train <= 0:
        return ""
    more = min(math.ceil(local_steps * messages / train), _MOST * local_steps)
    return (
        f"rounds: {whole:.1f} s each (median): messages and waiting {messages:.1f} s, local-steps = {local_steps} took "
        f"{train:.1f} s; with local-steps = {more} the same messages carry more training, averaged less often"
    )
