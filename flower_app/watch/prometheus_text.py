"""Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


def exposition(samples: Iterable[Sample], kinds: Mapping[str, tuple[str, str]], labels: Mapping[str, str]) -> str:
    """Write samples down.

    Parameters
    ----------
    samples : in any order
    kinds : kind (``gauge`` or ``counter``) and meaning of each metric, by name
    labels : of all samples
    """
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, values in by_name.items():
        kind, meaning = kinds[name]
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels({**labels, **s.labels})} {_value(s.value)}" for s in values]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
