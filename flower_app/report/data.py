"""A run's records as arrays, whatever of them is there; what is missing or null is NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class NoData(Exception):
    """A figure has nothing to show; the message says why."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Records of one run."""

    label: str
    """Its name in legends."""
    rounds: Sequence[Mapping[str, Any]]
    """Lines of ``rounds.jsonl``."""
    timeline: Mapping[str, Any] | None
    """``timeline.json``."""

    @cached_property
    def numbers(self) -> FloatArray:
        """Round numbers, (R,)."""
        return np.array([float(record["round"]) for record in self.rounds])

    @cached_property
    def virtual(self) -> list[dict[int, Mapping[str, Any]]]:
        """The system model's records of the clusters, by round."""
        return [
            {int(c["cluster"]): c for c in (record.get("virtual") or {}).get("clusters") or ()}
            for record in self.rounds
        ]

    @cached_property
    def cluster_numbers(self) -> list[int]:
        """Return the numbers of all clusters in any round."""
        numbers = {n for round_ in self.virtual for n in round_}
        for record in self.rounds:
            entries = [*(record.get("clusters") or ()), *(record.get("failed") or ()), *left_out(record)]
            numbers |= {int(entry["cluster"]) for entry in entries if entry.get("cluster") is not None}
        return sorted(numbers)

    @cached_property
    def names(self) -> dict[int, str]:
        """Sites of the clusters that have a name."""
        return {n: str(c["name"]) for round_ in self.virtual for n, c in round_.items() if c.get("name")}

    @cached_property
    def num_devices(self) -> dict[int, int]:
        """Devices of each cluster that has trained."""
        return {n: len(c["delta"]) for round_ in self.virtual for n, c in round_.items() if c.get("delta")}

    def cluster_label(self, n: int) -> str:
        """Number and site of a cluster."""
        return f"cluster {n} ({self.names[n]})" if n in self.names else f"cluster {n}"

    def metric(self) -> str | None:
        """Name of the task's metric; of the loss where nothing else was evaluated."""
        names = [name for record in self.rounds for name in record.get("metrics") or ()]
        return next((name for name in names if name != "loss"), names[0] if names else None)

    def series(self, *path: str) -> FloatArray:
        """One value a round, (R,): ``series("virtual", "latency_s")``."""
        values: list[Any] = list(self.rounds)
        for key in path:
            values = [value.get(key) if isinstance(value, Mapping) else None for value in values]
        return np.array([as_number(value) for value in values])

    def predictions(self) -> tuple[FloatArray, FloatArray]:
        """Predicted and measured seconds of the local steps of each round's slowest cluster, (R,) each."""
        values = []
        for record in self.rounds:
            compared = (record.get("plan") or {}).get("predictions") or ()
            no_cluster: Mapping[str, Any] = {}
            slowest = max(compared, key=lambda p: as_number(p.get("measured_train_s")), default=no_cluster)
            values.append([as_number(slowest.get(f"{kind}_train_s")) for kind in ("predicted", "measured")])
        predicted, measured = np.array(values, dtype=np.float64).reshape(-1, 2).T
        return predicted, measured

    def cluster_series(self, key: str) -> FloatArray:
        """One value a cluster and round of the system model, (N, R); the sum where it is a list."""
        return np.array(
            [[as_number(round_.get(n, {}).get(key)) for round_ in self.virtual] for n in self.cluster_numbers]
        ).reshape(len(self.cluster_numbers), len(self.rounds))

    def over_clusters(self, key: str, of: str) -> FloatArray:
        """``max`` or ``mean`` over the clusters that have a value, (R,)."""
        values = self.cluster_series(key)
        is_known = np.isfinite(values)
        if of == "mean":
            result = np.where(is_known, values, 0.0).sum(axis=0) / np.maximum(is_known.sum(axis=0), 1)
        else:
            result = np.where(is_known, values, -np.inf).max(axis=0, initial=-np.inf)
        return np.where(is_known.any(axis=0), result, np.nan)

    def slowest_parts(self) -> dict[str, FloatArray]:
        """Return the parts of the slowest cluster's time [s], (R,) each."""
        parts = {
            "pipeline of the slowest cluster": self.cluster_series("train_s"),
            "its upload": self.cluster_series("uplink_s"),
            "its wait for the channel": np.nan_to_num(self.cluster_series("uplink_wait_s")),
        }
        total = sum(parts.values(), np.zeros((len(self.cluster_numbers), len(self.rounds))))
        if not len(total):
            return {name: np.full(len(self.rounds), np.nan) for name in parts}
        slowest = np.where(np.isfinite(total), total, -np.inf).argmax(axis=0)
        is_unknown = ~np.isfinite(total).any(axis=0)
        columns = np.arange(len(self.rounds))
        return {name: np.where(is_unknown, np.nan, values[slowest, columns]) for name, values in parts.items()}

    def link_bytes(self) -> FloatArray:
        """Modelled bytes between the devices of all clusters, (R,)."""
        values = self.cluster_series("link_bytes")
        return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)

    def states(self) -> NDArray[np.str_]:
        """Return states by cluster and round, (N, R): ``selected``, ``not selected``, ``left out`` or ``failed``."""
        rows = {n: i for i, n in enumerate(self.cluster_numbers)}
        states = np.full((len(rows), len(self.rounds)), "not selected", dtype="<U12")
        for column, (record, virtual) in enumerate(zip(self.rounds, self.virtual, strict=True)):
            trained = {n for n, c in virtual.items() if c.get("selected")}
            trained |= {int(report["cluster"]) for report in record.get("clusters") or ()}
            for n in trained:
                states[rows[n], column] = "selected"
            for entries, state in ((left_out(record), "left out"), (record.get("failed") or (), "failed")):
                for entry in entries:
                    if entry.get("cluster") is not None:
                        states[rows[int(entry["cluster"])], column] = state
        return states

    def memory(self) -> dict[tuple[int, int], tuple[float, float]]:
        """The most that each device held, by cluster and device: modelled, and counted [byte]."""
        largest: dict[tuple[int, int], tuple[float, float]] = {}

        def see(n: int, k: int, modelled: float, measured: float) -> None:
            if max(np.nan_to_num([modelled, measured])) > 0:
                old = largest.get((n, k), (np.nan, np.nan))
                largest[n, k] = (float(np.fmax(old[0], modelled)), float(np.fmax(old[1], measured)))

        for record, virtual in zip(self.rounds, self.virtual, strict=True):
            for n, cluster in virtual.items():
                for k, value in enumerate(cluster.get("device_memory_bytes") or ()):
                    see(n, k, as_number(value), np.nan)
            for report in record.get("clusters") or ():
                for k, spent in (report.get("devices") or {}).items():
                    see(int(report["cluster"]), int(k), np.nan, used_bytes(spent))
        return largest

    def whole_model_bytes(self) -> float:
        """Modelled memory of the whole model on one device; NaN where it is not known."""
        values = self.cluster_series("whole_model_bytes")
        known = values[np.isfinite(values)]
        return float(known.max()) if len(known) else float("nan")


def used_bytes(spent: Mapping[str, Any]) -> float:
    """Return a device's peak memory from its entry in a cluster's report; NaN if unknown [byte].

    Runs of earlier releases know what its process had above idle.
    """
    if "held_bytes" in spent:
        return as_number(spent["held_bytes"])
    return as_number(spent.get("peak_bytes")) - as_number(spent.get("idle_bytes"))


def as_number(value: Any) -> float:
    """Return a number as it is, the sum of a list, and NaN for all else."""
    if isinstance(value, list):
        return float(np.nansum([as_number(item) for item in value])) if value else float("nan")
    return float(value) if isinstance(value, int | float) else float("nan")


def extremes(values: FloatArray, most: int) -> tuple[list[int], bool]:
    """Choose the values to show: all, or the largest and the smallest, in falling order.

    Parameters
    ----------
    values : (N,); NaN counts as the least
    most : that are shown

    Returns
    -------
    Their places, and whether some are left away.
    """
    if len(values) <= most:
        return list(range(len(values))), False
    falling = np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable").tolist()
    return falling[: most // 2] + falling[-(most // 2) :], True


def left_out(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Clusters that the plan could not use, with ``cluster`` and ``reason``."""
    return (record.get("plan") or {}).get("left_out") or ()


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
