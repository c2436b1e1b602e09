"""``collapipe profile``: a scenario of measured devices and links, for planning on existing hardware.

What was not measured, the uplinks to the server and the watts, keeps the values of Table II; the file says which.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from client_pipeline.counted import counted
from client_pipeline.documents import json_value
from client_pipeline.durable import check_not_input
from client_pipeline.families.families import max_length
from client_pipeline.families.registry import family_named
from client_pipeline.least_values import check_least
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.devices.measurement import (
    DeviceMeasurement,
    LinkMeasurement,
    Measurement,
    PassTimes,
    measure,
)
from client_pipeline.system.costs import model_costs, teb_costs
from client_pipeline.system.scenario import SCENARIO_FORMAT, Costs, load_scenario
from client_pipeline.system.units import GIGA, MEGA
from flower_app.verify import model_builder

UPLOAD_BITS = 19e6
"""Largest upload that fits Table II's uplinks and their energy budgets."""

_LINK_POWER_W = 0.1
_LINK_GAIN_DB = -30.0

_MOST_COUNT = 100_000
"""Examples of a batch, and devices, that a scenario may have."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """The command's options."""

    model: str
    """Folder or hub id; empty: the default run's Transformer."""
    length: int
    """T."""
    batch_size: int
    """b."""
    devices: int
    """Devices on each Ray node."""
    address: str
    """Address of a Ray cluster; empty: this machine."""
    certs: Path | None = None
    """Folder of a machine of a deployment's cluster, whose Ray is at ``address``."""
    measured: tuple[Path, ...] = ()
    """Files printed by the command with ``--json`` on each cluster; empty: this cluster is measured."""
    out: Path

    def __post_init__(self) -> None:
        check_least("--", self, length=1, batch_size=1, devices=1)
        for name in ("batch_size", "devices"):
            if (value := getattr(self, name)) > _MOST_COUNT:
                raise ValueError(
                    f"--{name.replace('_', '-')}: expected at most {_MOST_COUNT:,}, found {value}; lower it"
                )
        if self.measured and self.address:
            raise ValueError("--measured: nothing is measured with it; expected no --address beside it")
        if self.certs is not None and ":" not in self.address:
            raise ValueError(
                f"--certs: expected --address HOST:PORT of the cluster's Ray beside it, found {self.address!r}"
            )
        for path in self.measured:
            if not path.is_file():
                raise FileNotFoundError(f"--measured: no file {path}; collapipe profile --json prints one")
        if self.out.suffix != ".toml":
            raise ValueError(f"--out: expected a file that ends in .toml, as --scenario will, found {self.out}")
        if not self.out.absolute().parent.is_dir():
            raise FileNotFoundError(f"--out: no folder {self.out.absolute().parent}; create it first")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Result of a profile."""

    scenario: Path
    """The file that was written."""
    model: ModelSpec
    costs: Costs
    """Costs of the model."""
    measurements: tuple[Measurement, ...]
    """Measurements of each cluster."""

    def to_dict(self) -> dict[str, Any]:
        """The measured figures as JSON values, SI: ``devices`` and ``links``, or ``clusters`` of them."""
        flop = self.costs.o_f, self.costs.o_b
        clusters = [
            {
                "devices": [
                    asdict(d)
                    | {
                        "sample_s": d.sample_s,
                        "overhead_s": d.overhead_s,
                        "forward_flop_per_s": d.large.samples * flop[0] / d.large.forward_s,
                        "backward_flop_per_s": d.large.samples * flop[1] / d.large.backward_s,
                    }
                    for d in measured.devices
                ],
                "links": [asdict(link) for link in measured.links],
            }
            for measured in self.measurements
        ]
        return {
            "scenario": str(self.scenario),
            "family": self.model.family,
            "blocks": family_named(self.model.family).num_blocks(self.model),
            "forward_flop": flop[0],
            "backward_flop": flop[1],
            **(clusters[0] if len(clusters) == 1 else {"clusters": clusters}),
        }


def profile(request: ProfileRequest, say: Callable[[str], None] = lambda _: None) -> Profile:
    """Measure, or take what was measured, write the scenario, and return the figures.

    Raises
    ------
    ValueError, FileNotFoundError
        For options or a model that do not fit; nothing is measured then.
    MeasurementError
        If a device could not be measured; nothing is written then.
    """
    check_not_input("--out", request.out, *request.measured)
    spec = model_builder(request.model, seed=0)().spec
    longest = max_length(spec) or request.length
    if request.length > longest:
        raise ValueError(f"--length: expected at most the model's {longest} positions, found {request.length}")
    costliest = model_costs(spec, sequence_length=request.length, batch_size=request.batch_size)
    # Devices run the first TEB alone.
    first = teb_costs(spec, request.length)
    costs = replace(costliest, o_f=float(first.forward_flop), o_b=float(first.backward_flop))
    if request.measured:
        clusters = [_read_measured(path, costs, request.batch_size) for path in request.measured]
        measurements = tuple(measured for of_file in clusters for measured in of_file)
    else:
        measured = measure(
            spec,
            length=request.length,
            batch_size=request.batch_size,
            devices_per_node=request.devices,
            address=request.address,
            say=say,
        )
        measurements = (measured,)
    num_blocks = family_named(spec.family).num_blocks(spec)
    text = scenario_text(measurements, costs, costliest, blocks=num_blocks, batch_size=request.batch_size)
    # Not by client_pipeline.durable: load_scenario takes a name that ends in .toml alone for a file.
    partial = request.out.with_name(f".{request.out.stem}.{secrets.token_hex(8)}.toml")
    try:
        partial.write_text(text, encoding="utf-8")
        load_scenario(str(partial))
        os.replace(partial, request.out)
    finally:
        partial.unlink(missing_ok=True)
    return Profile(scenario=request.out, model=spec, costs=costs, measurements=measurements)


def _read_measured(path: Path, costs: Costs, batch_size: int) -> list[Measurement]:
    """Read what a cluster's devices were measured to take for the same work."""
    try:
        figures = json_value(path.read_text(encoding="utf-8"))
        clusters = [
            Measurement(
                devices=[
                    DeviceMeasurement(
                        **{item.name: raw[item.name] for item in fields(DeviceMeasurement)}
                        | {size: PassTimes(**raw[size]) for size in ("small", "large")}
                    )
                    for raw in cluster["devices"]
                ],
                links=[LinkMeasurement(**raw) for raw in cluster["links"]],
            )
            for cluster in figures.get("clusters") or [figures]
        ]
        work = figures["forward_flop"], figures["backward_flop"], clusters[0].devices[0].large.samples
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"--measured: {path}: expected what collapipe profile --json printed, {type(error).__name__}: {error}"
        ) from error
    expected = costs.o_f, costs.o_b, max(batch_size, 2)
    if work != expected:
        raise ValueError(
            f"--measured: {path}: expected {expected[0]:g} and {expected[1]:g} FLOP of a TEB's forward and backward, "
            f"micro-batches of {expected[2]}; found {work[0]:g}, {work[1]:g} and {work[2]}; measure all clusters with "
            "the --model, --length and --batch-size that are given here"
        )
    return clusters


def scenario_text(
    measurements: Sequence[Measurement], costs: Costs, costliest: Costs, *, blocks: int, batch_size: int
) -> str:
    """All measured devices as a scenario file, with comments; several clusters are ``[[cluster]]`` tables.

    Parameters
    ----------
    measurements : of each cluster
    costs : of the TEB that was measured
    costliest : of the TEB that costs most, which the scenario counts all TEBs as
    blocks, batch_size : L and b
    """
    all_devices = [device for measured in measurements for device in measured.devices]
    all_links = [link for measured in measurements for link in measured.links]
    # One number for all devices: what a slower one takes beyond it goes into its speed.
    overhead = _short(min(d.overhead_s for d in all_devices))
    latency = max((link.latency_s for link in all_links), default=0.0)
    activations = costs.upload_time_bits - costs.upload_energy_bits
    encoder = costs.upload_energy_bits
    upload = min(encoder, UPLOAD_BITS)
    one = len(measurements) == 1
    clusters = [_cluster(measured, costs, overhead) for measured in measurements]
    document: dict[str, Any] = {
        "format": SCENARIO_FORMAT,
        **({"clusters": 1, "devices": clusters[0]["devices"]} if one else {}),
        "channels": len(measurements),
        "device": {
            **(clusters[0]["device"] if one else {}),
            "speed-factor": {"min": 1.0, "max": 1.0},
            "kappa": 1e-27,
        },
        "block": {
            "memory-gb": _short(costs.block_memory / GIGA),
            "forward-gflop": _short(costliest.o_f / GIGA),
            "backward-gflop": _short(costliest.o_b / GIGA),
            "backward-per": "sample",
            "overhead-s": overhead,
            "activations-mbit": _short(costs.z_bits / MEGA),
            "gradient-mbit": _short(costs.g_bits / MEGA),
            "activations-per": "sample",
            "link-latency-s": _short(latency),
            "upload-mbit": _short((upload + activations) / MEGA),
            "upload-energy-mbit": _short(upload / MEGA),
        },
        "planner": {
            "blocks": blocks,
            "batch-size": batch_size,
            "max-micro-batches": batch_size,
            "latency": "flowshop",
            "energy": "none",
        },
    }
    if all_links:
        document["link"] = {
            **(clusters[0].get("link", {}) if one else {}),
            "power-w": _LINK_POWER_W,
            "gain-db": _LINK_GAIN_DB,
            "interference-w": _LINK_POWER_W * 10 ** (_LINK_GAIN_DB / 10),
        }
    if not one:
        document["cluster"] = clusters
    nodes = ", ".join(dict.fromkeys(d.node for d in all_devices))
    number = counted(len(all_devices), "device") + ("" if one else f" of {len(measurements)} clusters")
    of_cluster = "" if one else "cluster."
    remarks = {
        "format": f"{number}, measured by collapipe profile on {nodes}; micro-batches of "
        f"{all_devices[0].small.samples} and {all_devices[0].large.samples}.",
        f"{of_cluster}device.flop-per-cycle": "Forward and backward of one TEB, by its counted FLOP: only the product "
        "with the frequency was measured.",
        "device.speed-factor": "As measured in every round; a minimum below 1 makes slow rounds.",
        f"{of_cluster}device.memory-gb": "Free when measured, shared among the devices of a machine.",
        "device.kappa": "Not measured, as all energies: the default of Table II.",
        "block.memory-gb": "With gradients, AdamW's moments and the activations of a batch.",
        "block.overhead-s": "The least that any device takes for a micro-batch beside its samples.",
        "block.link-latency-s": "Measured, both directions together; the slowest link's.",
        "block.upload-mbit": "The encoder, and the activations of a batch for the decoder."
        if encoder <= UPLOAD_BITS
        else f"Not the whole encoder of {encoder / MEGA:,.0f} Mbit, which no uplink of Table II carries: an adapter or "
        "a quantised update, and the activations of a batch for the decoder.",
        "planner.energy": 'No energy was measured: no budget binds. Set kappa and energy-budget-j, then "exact".',
        f"{of_cluster}link.bandwidth-mhz": "Measured rates in Mbit/s. A rate is B log2(1 + p h / (I + B N0)); here "
        "p h = I and the noise is next to nothing, so it is B.",
    }
    return _commented(tomli_w.dumps(document), remarks) + (
        "\n# The uplinks to the server, [uplink] and [channel], were not measured: the defaults of Table II.\n"
    )


def _cluster(measured: Measurement, costs: Costs, overhead_s: float) -> dict[str, Any]:
    """Return the figures of one cluster."""
    devices = measured.devices
    # Phi f such that the large micro-batch takes as long as measured [FLOP/s].
    speeds = [d.large.samples * (costs.o_f + costs.o_b) / (d.large.seconds - overhead_s) for d in devices]
    cluster_entry: dict[str, Any] = {
        "devices": len(devices),
        "device": {
            "flop-per-cycle": [_short(speed / d.frequency_hz) for speed, d in zip(speeds, devices, strict=True)],
            "frequency-ghz": [_short(d.frequency_hz / GIGA) for d in devices],
            "memory-gb": [_short(d.memory_bytes / GIGA) for d in devices],
        },
    }
    if measured.links:
        cluster_entry["link"] = {"bandwidth-mhz": [_short(measured.rate_after(k) / MEGA) for k in range(len(devices))]}
    return cluster_entry


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _commented(text: str, remarks: dict[str, str]) -> str:
    """Put each remark once above its key or table; ``table.key``, or a key of the top."""
    table, lines, remarks = "", [], dict(remarks)
    for line in text.splitlines():
        if line.startswith("["):
            key = line.strip("[]")
            table = f"{key}."
        else:
            key = table + line.partition(" = ")[0]
        if key in remarks:
            lines.append(f"# {remarks.pop(key)}")
        lines.append(line)
    return "\n".join(lines) + "\n"
