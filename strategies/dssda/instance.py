"""One round's planning problem as data, in SI units: the format ``collapipe-instance/1``."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from client_pipeline.system.energy import EnergyMode
from client_pipeline.system.latency import Scaling, Tail, micro_batch_work
from client_pipeline.system.radio import Array, distortion_paper, distortion_sinr, shannon_rate

INSTANCE_FORMAT = "collapipe-instance/1"
Latency = Literal["eq15", "flowshop"]
DistortionMode = Literal["paper", "sinr"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a cluster, and its link to the next one."""

    phi: float
    """phi_k [FLOP/cycle]."""
    f: float
    """f_k, of this round [cycle/s]."""
    kappa: float
    """Effective switched capacitance [J/(cycle Hz^2)]."""
    p: float
    """Transmit power of the link p_k [W]."""
    B: float
    """Bandwidth of the link [Hz]."""
    h: float
    """Gain of the link, linear."""
    I: float  # noqa: E741
    """Interference of the link [W]."""
    mem: float
    """Memory [byte]."""
    Emax: float
    """Energy budget [J]."""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """What a control unit sends to the server in a round."""

    t_bits: float
    """D_t: bits that count for the upload time, Eq. (11)."""
    e_bits: float
    """D_e: bits that count for the upload energy, Eq. (12)."""
    Pmax: float
    """C6 [W]."""
    Emax: float
    """C8 [J]."""
    eps_mode: DistortionMode
    """``paper``: C / (p h + I), Eq. (25); ``sinr``: C / (1 + SINR)."""
    C: float
    """Scale of the distortion."""
    eps_max: float | None
    """Largest distortion allowed; None: any."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One cluster's part of the problem."""

    wS: float
    """Cost of a segment."""
    wS2: float
    """Cost of S^2."""
    wP: float
    """Cost of transmit power [1/W]."""
    wE: float
    """Cost of upload energy [1/J]: the energy queue."""
    wG: float
    """Cost of distortion."""
    skip: float
    """Cost when no channel is matched."""
    devices: tuple[Device, ...]
    up: Uplink
    h: tuple[float, ...]
    """Gain of each channel, linear, (J,)."""
    I: tuple[float, ...]  # noqa: E741
    """Interference on each channel [W], (J,)."""
    B: tuple[float, ...]
    """Bandwidth of each channel [Hz], (J,)."""

    def size_cost(self, num_segments: int) -> float:
        """Cost of S segments: wS S + wS2 S^2."""
        return self.wS * num_segments + self.wS2 * num_segments**2


@dataclass(frozen=True, kw_only=True)
class Instance:
    """The problem of one round.

    Minimise V max_n (steps D_n + t_up,n) + sum of the matched clusters' segment and power costs + sum of the others'
    ``skip``, over the segments, micro-batches, channels and powers, under C1 to C9.
    """

    L: int
    """TEBs."""
    b: int
    """Batch size."""
    m_set: tuple[int, ...]
    """Allowed numbers of micro-batches, ascending."""
    S_min: int
    S_max: int | None
    """None: K."""
    V: float
    """Weight of the latency against the queues [1/s]."""
    steps: int
    """Local steps of a round."""
    latency: Latency
    tail: Tail
    """eq15 alone: ``last`` subtracts the largest link time among the selected devices."""
    energy: EnergyMode
    o_f: float
    """Forward FLOP of one TEB for one sample."""
    o_b: float
    """Backward FLOP of one TEB: for one micro-batch, or for one sample."""
    o_b_scaling: Scaling
    t0: float
    """Seconds of one TEB for one micro-batch beside its FLOP."""
    z_bits: float
    """Activations on a link [bit]: of a micro-batch, or of a sample."""
    g_bits: float
    """Their gradient, likewise."""
    act_scaling: Scaling
    lat: float
    """Seconds of one micro-batch on a link beside its bits."""
    gamma0: float
    """gamma_0: memory of one TEB on a device [byte]."""
    N0: float
    """Noise power spectral density [W/Hz]."""
    clusters: tuple[Cluster, ...]

    @property
    def num_clusters(self) -> int:
        """N."""
        return len(self.clusters)

    @property
    def num_channels(self) -> int:
        """J."""
        return len(self.clusters[0].B)

    @property
    def num_matched(self) -> int:
        """min(N, J): the clusters that get a channel."""
        return min(self.num_clusters, self.num_channels)

    def segment_range(self, cluster: int) -> range:
        """Possible S of a cluster: from S_min to min(K, L, S_max)."""
        largest = min(len(self.clusters[cluster].devices), self.L)
        if self.S_max is not None:
            largest = min(largest, self.S_max)
        return range(max(self.S_min, 1), largest + 1)

    def work(self, m: int | Array) -> Array:
        """FLOP of one TEB for one micro-batch when the batch is cut into m, of m's shape."""
        return micro_batch_work(self.o_f, self.o_b, self.b / np.asarray(m, dtype=np.float64), self.o_b_scaling)

    def link_bits(self, m: int | Array) -> Array:
        """Bits z + g of one micro-batch [bit], of m's shape."""
        samples = self.b / np.asarray(m, dtype=np.float64)
        per_unit = self.z_bits + self.g_bits
        return per_unit * samples if self.act_scaling == "sample" else np.full_like(samples, per_unit)

    def device_arrays(self, cluster: int) -> DeviceArrays:
        """Per-device columns of a cluster, (K,) each; made once."""
        return self._device_arrays[cluster]

    @cached_property
    def _device_arrays(self) -> tuple[DeviceArrays, ...]:
        return tuple(DeviceArrays.of(cluster.devices, self.N0) for cluster in self.clusters)

    def uplink_rate(self, cluster: int, power_w: float | Array, channel: int | None = None) -> Array:
        """Uplink rate of a cluster's control unit, Eq. (10) [bit/s].

        Parameters
        ----------
        cluster : n
        power_w : p [W]
        channel : j; None: all channels, along the last axis
        """
        h, i, b = self._channel_columns(cluster, channel)
        return shannon_rate(b, power_w, h, i, self.N0)

    def distortion(self, cluster: int, power_w: float | Array, channel: int | None = None) -> Array:
        """Distortion epsilon of a cluster's upload, Eq. (25) or its form with the SINR; see :meth:`uplink_rate`."""
        h, i, b = self._channel_columns(cluster, channel)
        up = self.clusters[cluster].up
        if up.eps_mode == "paper":
            return distortion_paper(power_w, h, i, up.C)
        return distortion_sinr(b, power_w, h, i, self.N0, up.C)

    def _channel_columns(self, cluster: int, channel: int | None) -> tuple[Array, Array, Array]:
        c = self.clusters[cluster]
        columns = np.array([c.h, c.I, c.B], dtype=np.float64)
        picked = columns if channel is None else columns[:, channel]
        return picked[0], picked[1], picked[2]


@dataclass(frozen=True)
class DeviceArrays:
    """The devices of a cluster as columns, (K,) each."""

    phi: Array
    f: Array
    kappa: Array
    p: Array
    rate: Array
    """Link rate r_k, Eq. (13) [bit/s]."""
    mem: Array
    Emax: Array

    @classmethod
    def of(cls, devices: Sequence[Device], noise_psd: float) -> DeviceArrays:
        """Collect the columns; ``noise_psd`` is N0 [W/Hz]."""

        def column(name: str) -> Array:
            return np.array([getattr(d, name) for d in devices], dtype=np.float64)

        rate = shannon_rate(column("B"), column("p"), column("h"), column("I"), noise_psd)
        return cls(column("phi"), column("f"), column("kappa"), column("p"), rate, column("mem"), column("Emax"))


def read_instance(text: str, where: str) -> Instance:
    """Read an instance from JSON text; ``where`` names the file in messages.

    Raises
    ------
    ValueError
        Naming the file and the key at fault.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: expected JSON, {error}") from error
    return parse_instance(raw, where)


_TOP = {"format", "L", "b", "m_set", "S_min", "S_max", "V", "steps", "latency", "tail", "energy", "work", "act"}
_TOP |= {"gamma0", "N0", "clusters"}
_OPTIONAL_TOP = {"steps", "S_min", "S_max", "tail"}


def parse_instance(raw: Any, where: str) -> Instance:
    """Check :func:`read_instance`'s object."""
    top = _Table(raw, where, _TOP, _OPTIONAL_TOP)
    if raw["format"] != INSTANCE_FORMAT:
        raise ValueError(f"{where}: format: expected {INSTANCE_FORMAT!r}, found {raw['format']!r}")
    work = _Table(raw["work"], f"{where}: work", {"o_f", "o_b", "o_b_scaling", "t0"}, {"t0"})
    act = _Table(raw["act"], f"{where}: act", {"z_bits", "g_bits", "scaling", "lat"}, {"lat"})
    m_set = raw["m_set"]
    if not isinstance(m_set, list) or not m_set or not all(_is_count(m) for m in m_set):
        raise ValueError(f"{where}: m_set: expected a list of integers of at least 1, found {m_set!r}")
    s_max = top.get("S_max")
    clusters = raw["clusters"]
    if not isinstance(clusters, list) or not clusters:
        raise ValueError(f"{where}: clusters: expected a list of at least one cluster, found {clusters!r}")
    parsed = tuple(_parse_cluster(c, f"{where}: clusters[{n}]") for n, c in enumerate(clusters))
    for n, cluster in enumerate(parsed):
        if len(cluster.B) != len(parsed[0].B):
            raise ValueError(
                f"{where}: clusters[{n}].B: has {len(cluster.B)} channels, clusters[0] has {len(parsed[0].B)}; "
                "expected one value for each of the J channels in every cluster"
            )
    return Instance(
        L=top.count("L"),
        b=top.count("b"),
        m_set=tuple(sorted(set(m_set))),
        S_min=top.count("S_min") if "S_min" in raw else 1,
        S_max=None if s_max is None else top.count("S_max"),
        V=top.number("V"),
        steps=top.count("steps") if "steps" in raw else 1,
        latency=top.choice("latency", get_args(Latency)),
        tail=top.choice("tail", get_args(Tail)) if "tail" in raw else "none",
        energy=top.choice("energy", get_args(EnergyMode)),
        o_f=work.number("o_f", positive=True),
        o_b=work.number("o_b"),
        o_b_scaling=work.choice("o_b_scaling", get_args(Scaling)),
        t0=work.number("t0") if "t0" in raw["work"] else 0.0,
        z_bits=act.number("z_bits"),
        g_bits=act.number("g_bits"),
        act_scaling=act.choice("scaling", get_args(Scaling)),
        lat=act.number("lat") if "lat" in raw["act"] else 0.0,
        gamma0=top.number("gamma0"),
        N0=top.number("N0"),
        clusters=parsed,
    )


def _parse_cluster(raw: Any, where: str) -> Cluster:
    weights = {"wS", "wS2", "wP", "wE", "wG", "skip"}
    table = _Table(raw, where, weights | {"devices", "up", "h", "I", "B"}, weights)
    devices = raw["devices"]
    if not isinstance(devices, list) or not devices:
        raise ValueError(f"{where}.devices: expected a list of at least one device, found {devices!r}")
    up = _Table(raw["up"], f"{where}.up", set(Uplink.__dataclass_fields__), {"eps_max"})
    return Cluster(
        **{name: table.number(name, any_sign=name in ("wS", "wS2", "skip")) for name in weights & raw.keys()},
        **{name: 0.0 for name in weights - raw.keys()},
        devices=tuple(_parse_device(d, f"{where}.devices[{k}]") for k, d in enumerate(devices)),
        up=Uplink(
            t_bits=up.number("t_bits"),
            e_bits=up.number("e_bits"),
            Pmax=up.number("Pmax", positive=True),
            Emax=up.number("Emax"),
            eps_mode=up.choice("eps_mode", get_args(DistortionMode)),
            C=up.number("C"),
            eps_max=None if up.get("eps_max") is None else up.number("eps_max", positive=True),
        ),
        h=table.column("h", positive=True),
        I=table.column("I"),
        B=table.column("B", positive=True),
    )


def _parse_device(raw: Any, where: str) -> Device:
    table = _Table(raw, where, set(Device.__dataclass_fields__), set())
    positive = ("phi", "f", "p", "B", "h")
    return Device(**{name: table.number(name, positive=name in positive) for name in Device.__dataclass_fields__})


class _Table:
    """A JSON object whose keys are known, with messages that name file and key."""

    def __init__(self, raw: Any, where: str, known: set[str], optional: set[str]) -> None:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{where}: expected an object, found {raw!r}")
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(sorted(known))}"
                raise ValueError(f"{where}: unknown key {key!r}; {hint}")
        if missing := sorted(known - optional - raw.keys()):
            raise ValueError(f"{where}: missing key {missing[0]!r}")
        self._raw, self._where = raw, where

    def get(self, key: str) -> Any:
        return self._raw.get(key)

    def number(self, key: str, *, positive: bool = False, any_sign: bool = False) -> float:
        return _number(self._raw.get(key), f"{self._where}: {key}", positive, any_sign)

    def column(self, key: str, *, positive: bool = False) -> tuple[float, ...]:
        values = self._raw[key]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{self._where}: {key}: expected a list, one number a channel, found {values!r}")
        if len(values) != len(self._raw["B"]):
            raise ValueError(
                f"{self._where}: {key}: has {len(values)} values, B has {len(self._raw['B'])}; "
                "expected one for each channel"
            )
        return tuple(_number(v, f"{self._where}: {key}[{j}]", positive, False) for j, v in enumerate(values))

    def count(self, key: str) -> int:
        value = self._raw[key]
        if not _is_count(value):
            raise ValueError(f"{self._where}: {key}: expected an integer of at least 1, found {value!r}")
        return int(value)

    def choice(self, key: str, names: Sequence[str]) -> Any:
        value = self._raw[key]
        if value not in names:
            raise ValueError(f"{self._where}: {key}: expected one of {', '.join(names)}, found {value!r}")
        return value


def _number(value: Any, where: str, positive: bool, any_sign: bool) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, found {value!r}")
    if positive and value <= 0:
        raise ValueError(f"{where}: expected a number above 0, found {value!r}")
    if not any_sign and value < 0:
        raise ValueError(f"{where}: expected a number of at least 0, found {value!r}")
    return float(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def instance_to_dict(instance: Instance) -> dict[str, Any]:
    """The instance as JSON values, as :func:`parse_instance` reads them."""
    top = {
        name: getattr(instance, name)
        for name in ("L", "b", "S_min", "S_max", "V", "steps", "latency", "tail", "energy", "gamma0", "N0")
    }
    return {
        "format": INSTANCE_FORMAT,
        **top,
        "m_set": list(instance.m_set),
        "work": {name: getattr(instance, name) for name in ("o_f", "o_b", "o_b_scaling", "t0")},
        "act": {
            "z_bits": instance.z_bits,
            "g_bits": instance.g_bits,
            "scaling": instance.act_scaling,
            "lat": instance.lat,
        },
        "clusters": [
            {
                **{name: getattr(c, name) for name in ("wS", "wS2", "wP", "wE", "wG", "skip")},
                "devices": [dict(vars(d)) for d in c.devices],
                "up": dict(vars(c.up)),
                "h": list(c.h),
                "I": list(c.I),
                "B": list(c.B),
            }
            for c in instance.clusters
        ],
    }
