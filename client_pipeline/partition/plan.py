"""A round's plan for one cluster, the plan file ``collapipe-plan/1``, and the ``uniform`` plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline import durable
from client_pipeline.documents import json_value

PLAN_FORMAT = "collapipe-plan/1"
SCHEDULE_NAMES = ("gpipe", "1f1b", "zb-h1")
MOST_TOKEN_SLICES = 64
"""Most slices of a micro-batch."""
FIT_TOLERANCE = 1e-9
"""Relative: a constraint that is met with equality may fail by rounding."""


def whole_blocks(memory: float, block_memory: float, most: int) -> int:
    """TEBs of ``block_memory`` byte that a device with ``memory`` byte holds (C7), ``most`` at most."""
    return most if block_memory <= 0 else int(min(most, memory / block_memory * (1 + FIT_TOLERANCE)))


class Segment(NamedTuple):
    """Consecutive TEBs ``first`` to ``last`` (inclusive) on one device."""

    device: int
    first: int
    last: int

    @property
    def blocks(self) -> range:
        """Indices of the TEBs."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """S, delta, order and m of one cluster, and its radio settings."""

    delta: tuple[int, ...]
    """delta_k: TEBs on each of the K devices; 0 is legal."""
    order: tuple[int, ...]
    """Devices in pipeline order; those with delta 0 are passed over."""
    m: int
    """Micro-batches."""
    schedule: str = "gpipe"
    token_slices: int = 1
    """Q: slices of each micro-batch along the sequence, for causal models; 1: whole."""
    selected: bool = True
    """True if the cluster trains in this round."""
    channel: int | None = None
    power_w: float | None = None
    """Transmit power of the control unit [W]."""

    def segments(self) -> list[Segment]:
        """The S segments in pipeline order."""
        segments, first = [], 0
        for device in self.order:
            if self.delta[device] > 0:
                segments.append(Segment(device, first, first + self.delta[device] - 1))
                first += self.delta[device]
        return segments

    @property
    def devices(self) -> list[int]:
        """Devices with a segment, in pipeline order."""
        return [device for device in self.order if self.delta[device] > 0]

    def check(
        self,
        *,
        num_blocks: int,
        batch_size: int,
        num_devices: int | None = None,
        memory: Sequence[float] | None = None,
        block_memory: float = 0.0,
        location: str = "plan",
    ) -> None:
        """Refuse a plan that does not fit the model, the batch or the devices (C1, C2, C7).

        Parameters
        ----------
        num_blocks : L
        batch_size : b
        num_devices : K; None skips the check
        memory : memory of each device [byte]; None skips the check
        block_memory : gamma_0, memory of one TEB [byte]
        location : names the plan in messages

        Raises
        ------
        ValueError
            Naming the key, what was found, what was expected and what to change.
        """
        if num_devices is not None and len(self.delta) != num_devices:
            raise ValueError(
                f"{location}: delta has {len(self.delta)} entries, expected one for each of the K = {num_devices} "
                "devices (0 for a device without a segment)"
            )
        if any(d < 0 for d in self.delta):
            raise ValueError(f"{location}: delta {list(self.delta)} has a negative entry; expected counts of TEBs")
        if sum(self.delta) != num_blocks:
            raise ValueError(
                f"{location}: delta {list(self.delta)} sums to {sum(self.delta)}, expected the model's "
                f"L = {num_blocks} TEBs; change delta or model.encoder-layers"
            )
        busy = {k for k, d in enumerate(self.delta) if d > 0}
        named = [k for k in self.order if 0 <= k < len(self.delta)]
        if len(named) != len(self.order) or len(set(named)) != len(named) or not busy <= set(named):
            raise ValueError(
                f"{location}: order {list(self.order)} must name each device with delta > 0, {sorted(busy)}, once, "
                f"as an index from 0 to {len(self.delta) - 1}"
            )
        if not 1 <= self.m <= batch_size:
            raise ValueError(
                f"{location}: m = {self.m} micro-batches, expected 1 <= m <= b = {batch_size}; change m or batch-size"
            )
        if self.schedule not in SCHEDULE_NAMES:
            raise ValueError(f"{location}: schedule {self.schedule!r}, expected one of {', '.join(SCHEDULE_NAMES)}")
        if not 1 <= self.token_slices <= MOST_TOKEN_SLICES:
            raise ValueError(
                f"{location}: token_slices = {self.token_slices}, expected 1, for whole micro-batches, to "
                f"{MOST_TOKEN_SLICES}"
            )
        for k, available in enumerate(memory or ()):
            if self.delta[k] > whole_blocks(available, block_memory, self.delta[k]):
                raise ValueError(
                    f"{location}: device {k} holds {self.delta[k]} TEBs of {block_memory / 1e9:.3g} GB = "
                    f"{self.delta[k] * block_memory / 1e9:.3g} GB, but has {available / 1e9:.3g} GB (C7); "
                    "give it fewer TEBs or use more devices"
                )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, keys as in a plan file."""
        return {
            "selected": self.selected,
            "delta": list(self.delta),
            "order": list(self.order),
            "m": self.m,
            "schedule": self.schedule,
            "token_slices": self.token_slices,
            "channel": self.channel,
            "power_w": self.power_w,
        }

    @classmethod
    def from_dict(cls, raw: Any, location: str = "plan") -> ClusterPlan:
        """Read :meth:`to_dict`'s form; but for ``delta`` and ``m`` keys may be absent.

        Raises
        ------
        ValueError
            Naming the key that is missing, unknown or of a wrong type.
        """
        if not isinstance(raw, dict):
            raise ValueError(f"{location}: expected an object with delta and m, found {type(raw).__name__}")
        known = {"selected", "delta", "order", "m", "schedule", "token_slices", "channel", "power_w"}
        if unknown := sorted(raw.keys() - known):
            raise ValueError(f"{location}: unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")
        delta = _integers(raw, "delta", location)
        order = _integers(raw, "order", location) if "order" in raw else tuple(k for k, d in enumerate(delta) if d > 0)
        m = raw.get("m")
        slices = raw.get("token_slices", 1)
        for key, value in (("m", m), ("token_slices", slices)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{location}: {key}: expected an integer, found {value!r}")
        selected, schedule = raw.get("selected", True), raw.get("schedule", "gpipe")
        channel, power = raw.get("channel"), raw.get("power_w")
        if not isinstance(selected, bool):
            raise ValueError(f"{location}: selected: expected true or false, found {selected!r}")
        if channel is not None and (not isinstance(channel, int) or isinstance(channel, bool)):
            raise ValueError(f"{location}: channel: expected an integer or null, found {channel!r}")
        if power is not None and (not isinstance(power, int | float) or not math.isfinite(power) or power < 0):
            raise ValueError(f"{location}: power_w: expected a number of watts of at least 0 or null, found {power!r}")
        return cls(
            delta=delta,
            order=order,
            m=m,  # type: ignore[arg-type]
            schedule=str(schedule),
            token_slices=slices,
            selected=selected,
            channel=channel,
            power_w=power,
        )


def micro_batch_sizes(batch_size: int, num_micro_batches: int) -> list[int]:
    """Sizes of m micro-batches of b examples: as equal as possible, larger ones first.

    >>> micro_batch_sizes(7, 3)
    [3, 2, 2]

    Raises
    ------
    ValueError
        If m < 1 or m > b.
    """
    if not 1 <= num_micro_batches <= batch_size:
        raise ValueError(
            f"m = {num_micro_batches} micro-batches do not fit a batch of b = {batch_size} examples; "
            f"expected 1 <= m <= {batch_size}: change the plan's m or batch-size"
        )
    return even_parts(batch_size, num_micro_batches)


def even_parts(total: int, num_parts: int) -> list[int]:
    """Return sizes that differ by at most one, larger first."""
    size, larger = divmod(total, num_parts)
    return [size + 1] * larger + [size] * (num_parts - larger)


def rounded_parts(quota: Sequence[float], caps: Sequence[int]) -> list[int]:
    """Round shares of TEBs to whole numbers from 1 to a cap each, by the largest remainder.

    Parameters
    ----------
    quota : shares, whole in sum
    caps : most of each, at least 1; in sum no less than the quota
    """
    parts = [min(max(math.floor(share), 1), cap) for share, cap in zip(quota, caps, strict=True)]
    # Bounds change the sum: add or remove one TEB at a time where the quota is missed most.
    while (missing := round(sum(quota)) - sum(parts)) != 0:
        step = 1 if missing > 0 else -1
        possible = [i for i, part in enumerate(parts) if (part < caps[i] if step > 0 else part > 1)]
        parts[max(possible, key=lambda i: (step * (quota[i] - parts[i]), -i))] += step  # noqa: B023
    return parts


def _integers(raw: dict[str, Any], key: str, location: str) -> tuple[int, ...]:
    value = raw.get(key)
    if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        raise ValueError(f"{location}: {key}: expected a list of integers, found {value!r}")
    return tuple(value)


def write_plans(path: Path, plans: Sequence[ClusterPlan]) -> None:
    """Write a plan file."""
    document = {"format": PLAN_FORMAT, "clusters": [plan.to_dict() for plan in plans]}
    durable.write_text(path, json.dumps(document, indent=1) + "\n")


def read_plans(path: Path) -> list[ClusterPlan]:
    """Read a plan file.

    Raises
    ------
    FileNotFoundError, ValueError
        Naming the file, and the cluster and key at fault.
    """
    if not path.is_file():
        raise FileNotFoundError(f"plan: no file {path}; create it, or leave plan empty to let the policy plan")
    try:
        document = json_value(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, {error}") from error
    if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
        found_format = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"{path}: format: expected {PLAN_FORMAT!r}, found {found_format!r}")
    clusters = document.get("clusters")
    if not isinstance(clusters, list) or not clusters:
        raise ValueError(f"{path}: clusters: expected a list with one plan for each cluster, found {clusters!r}")
    return [ClusterPlan.from_dict(raw, f"{path}: clusters[{n}]") for n, raw in enumerate(clusters)]


def uniform_plan(
    *, speed: Sequence[float], memory: Sequence[float], block_memory: float, num_blocks: int, batch_size: int
) -> ClusterPlan:
    """Even segments on the fastest devices, without any planner.

    S = min(K, L, ceil(L / cap) + 1) with cap = floor(memory / gamma_0), the smallest over the S fastest devices;
    parts differ by at most one, larger ones to faster devices; m = min(8, b).

    Parameters
    ----------
    speed : phi_k f_k of each device [FLOP/s]
    memory : of each device [byte]
    block_memory : gamma_0 [byte]
    num_blocks : L
    batch_size : b

    Raises
    ------
    ValueError
        If the L TEBs fit no number of devices.
    """
    num_devices = len(speed)
    fastest = sorted(range(num_devices), key=lambda k: (-speed[k], k))
    caps = [whole_blocks(memory[k], block_memory, num_blocks) for k in fastest]
    wanted = max(caps, default=0)
    start = min(num_devices, num_blocks, math.ceil(num_blocks / wanted) + 1) if wanted else num_devices + 1
    for num_segments in range(start, min(num_devices, num_blocks) + 1):
        parts = even_parts(num_blocks, num_segments)
        if all(part <= cap for part, cap in zip(parts, caps, strict=False)):
            delta = [0] * num_devices
            for device, part in zip(fastest, parts, strict=False):
                delta[device] = part
            order = tuple(fastest[:num_segments])
            return ClusterPlan(delta=tuple(delta), order=order, m=min(8, batch_size))
    raise ValueError(
        f"uniform plan: {num_blocks} TEBs of {block_memory / 1e9:.3g} GB do not fit {num_devices} devices that hold "
        f"{caps} TEBs, fastest first (C7); use more devices, more memory or a plan file"
    )
