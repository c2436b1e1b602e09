"""One round's planning problem as data, in SI units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from client_pipeline.system.latency import micro_batch_work
from client_pipeline.system.radio import Array, DistortionForm, distortion_paper, distortion_sinr, shannon_rate
from client_pipeline.system.step_costs import PlanForms, StepCosts


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
    t0: float = 0.0
    """Seconds of one TEB for one micro-batch beyond the instance's own t0, where this was measured."""
    lat: float = 0.0
    """Seconds of one micro-batch on the link beyond the instance's own lat, likewise."""


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """Upload of a control unit to the server in a round."""

    t_bits: float
    """D_t: bits that count for the upload time, Eq. (11), beside the instance's ``z_enc_bits``."""
    e_bits: float
    """D_e: bits that count for the upload energy, Eq. (12)."""
    Pmax: float
    """C6 [W]."""
    Emax: float
    """C8 [J]."""
    eps_mode: DistortionForm
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
class Instance(StepCosts, PlanForms):
    """The problem of one round.

    Minimise V max_n (steps D_n + t_up,n) + sum of the matched clusters' segment and power costs and joules times wJ +
    sum of the others' ``skip``, over the segments, micro-batches, channels and powers, under C1 to C9.
    """

    L: int
    """TEBs."""
    b: int
    """Batch size."""
    m_set: tuple[int, ...]
    """Allowed numbers of micro-batches, ascending."""
    S_min: int
    S_max: int | None
    """Most segments; None: K."""
    V: float
    """Weight of the latency against the queues [1/s]."""
    steps: int
    """Local steps of a round."""
    wJ: float = 0.0  # noqa: N815
    """Price of a joule of the devices and uploads of the round's clusters [1/J]; ours."""
    z_enc_bits: float = 0.0
    """z_enc: activations that go up from a micro-batch, or a sample, in every step, Eq. (11) [bit]."""
    gamma0: float
    """gamma_0: memory of one TEB on a device [byte]."""
    gamma_act: float = 0.0
    """Part of gamma_0 that is activations of a whole batch, as GPipe keeps them [byte]; other schedules keep less;
    ours."""
    N0: float
    """Noise power spectral density [W/Hz]."""
    band_hz: float | None = None
    """Band that the matched clusters divide among them [Hz]; then B is what a policy that does not divide takes. None:
    each channel has the band B."""
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

    def work(self, m: float | Array) -> Array:
        """FLOP of one TEB for one micro-batch when the batch is cut into m, of m's shape."""
        return micro_batch_work(self.o_f, self.o_b, self.b / np.asarray(m, dtype=np.float64), self.o_b_scaling)

    def loads(self, delta: Sequence[int], order: Sequence[int]) -> Sequence[float]:
        """Return the work of each device, (K,), in TEBs of o_f and o_b.

        Parameters
        ----------
        delta : (K,), TEBs of each device
        order : busy devices in pipeline order
        """
        if not self.teb_shares:
            return delta
        loads, first = [0.0] * len(delta), 0
        for k in order:
            loads[k] = sum(self.teb_shares[first : first + delta[k]])
            first += delta[k]
        return loads

    def link_bits(self, m: float | Array) -> Array:
        """Bits z + g of one micro-batch [bit], of m's shape."""
        samples = self.b / np.asarray(m, dtype=np.float64)
        per_unit = self.z_bits + self.g_bits
        return per_unit * samples if self.act_scaling == "sample" else np.full_like(samples, per_unit)

    def activation_bits(self, m: int | Array) -> Array:
        """Activations that the local steps send up, Eq. (11): steps m z_enc, or steps b z_enc [bit], of m's shape."""
        micro_batches = np.asarray(m, dtype=np.float64)
        units = np.full_like(micro_batches, self.b) if self.act_scaling == "sample" else micro_batches
        return self.steps * self.z_enc_bits * units

    def upload_bits(self, cluster: int, m: int) -> float:
        """Bits that count for a cluster's upload time, Eq. (11): activations and encoder [bit]."""
        return self.clusters[cluster].up.t_bits + float(self.activation_bits(m))

    @property
    def m_decides_upload(self) -> bool:
        """True if the bits of an upload depend on the number of micro-batches."""
        return self.z_enc_bits > 0 and self.act_scaling == "microbatch"

    @property
    def recomputes(self) -> bool:
        """True if devices compute activations again: their memory then depends on m under every schedule."""
        return self.memory is not None and self.memory.recompute

    @property
    def names_last(self) -> bool:
        """True if it matters which device is the last one of a pipeline."""
        return self.latency == "flowshop" or self.tail_energy == "none"

    def device_arrays(self, cluster: int) -> DeviceArrays:
        """Per-device columns of a cluster, (K,) each; made once."""
        if cluster not in self._device_arrays:
            self._device_arrays[cluster] = DeviceArrays.of(self.clusters[cluster].devices, self.N0)
        return self._device_arrays[cluster]

    @cached_property
    def _device_arrays(self) -> dict[int, DeviceArrays]:
        """Columns of the clusters that were asked for so far; a copy of an instance begins without any."""
        return {}

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
    t0: Array
    lat: Array

    @classmethod
    def of(cls, devices: Sequence[Device], noise_psd: float) -> DeviceArrays:
        """Collect the columns; ``noise_psd`` is N0 [W/Hz]."""
        names = ("phi", "f", "kappa", "p", "mem", "Emax", "t0", "lat", "B", "h", "I")
        values = np.array([*map(attrgetter(*names), devices)], dtype=np.float64).reshape(-1, len(names))
        columns = dict(zip(names, np.ascontiguousarray(values.T), strict=True))
        B, h, I = (columns.pop(name) for name in "BhI")  # noqa: E741, N806
        return cls(**columns, rate=shannon_rate(B, columns["p"], h, I, noise_psd))
