"""Segments under Eq. (15) when the last device's energy budget (C9) pays no link: ``tail_energy = "none"``.

D is the same whichever device is the last one, and only that device may hold more TEBs within its budget. So the
least D is the least over the devices q that gain by it, with the caps that hold if q is the last one; and over nobody,
where the caps are those of devices that all send. Every choice within one of these caps is possible: if q is not busy,
any other device may be the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.closed_form_segments import closed_form_choices
from strategies.dssda.instance import Instance
from strategies.dssda.limits import Limits


def choices_with_last(instance: Instance, limits: Sequence[Limits]) -> list[dict[int, SegmentChoice]]:
    """Choices by S of several clusters, as :func:`~strategies.dssda.closed_form_segments.closed_form_choices`."""
    variants: list[Limits] = []
    places: list[tuple[int, int | None]] = []
    for i, limit in enumerate(limits):
        gains = [int(k) for k in np.flatnonzero(np.any(limit.last_cap > limit.cap, axis=0))]
        for q in [None, *gains]:
            variants.append(limit if q is None else replace(limit, cap=_with_last(limit, q)))
            places.append((i, q))
    best: list[dict[int, SegmentChoice]] = [{} for _ in limits]
    for (i, q), choices in zip(places, closed_form_choices(instance, variants), strict=True):
        for size, choice in choices.items():
            known = best[i].get(size)
            if known is None or choice.pipeline_s < known.pipeline_s:
                best[i][size] = replace(choice, last=_last(instance, limits[i].cluster, choice, q))
    return best


def _with_last(limit: Limits, q: int) -> Array:
    return np.where(np.arange(limit.cap.shape[1]) == q, limit.last_cap, limit.cap)


def _last(instance: Instance, cluster: int, choice: SegmentChoice, q: int | None) -> int:
    if q is not None and choice.delta[q] > 0:
        return q
    devices = instance.device_arrays(cluster)
    return choice.order(devices.phi * devices.f)[-1]
