"""A control unit's transmit power: allowed interval, and cheapest power; exact.

All of it is written in x = ln(1 + SINR), the spectral efficiency [nat/s/Hz], because every quantity has a closed
form in it, with SINR = p h / (I + B N0) = expm1(x)::

    upload time    t   = k / x                           k  = D_t ln 2 / B                         Eq. (11)
    power          p   = (I + B N0) / h  expm1(x)
    upload energy  E   = e0 expm1(x) / x                 e0 = least_upload_energy                  Eq. (12)
    distortion     eps = C / (alpha expm1(x) + beta)     alpha, beta = I + B N0, I; or 1, 1        Eq. (25)

**The energy queue leaves the problem easy.** E is concave in p, so q = wP p + wE E + wG eps is a difference of convex
functions of p, for which the paper's tool is successive convex approximation. Yet q, as a function of the upload time
t, is convex wherever it falls with t; so it has one minimum, and bisection finds it. For with A = wP p + wE E and
G = wG eps, as functions of x: A is a power series with no negative coefficient, so A' >= 0 and A'' >= 0. G' <= 0, and
G'' >= -G' since beta <= alpha. Where q' = A' + G' >= 0 we have -G' <= A', and so

    x q'' + 2 q' >= x A'' + 2 A' + (x - 2) (-G') >= x A'' + min(x, 2) A' >= 0,

and d2q/dt2 = x^3 (x q'' + 2 q') / k^2. At a zero of q' the same line says q'' >= 0: q falls, then rises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array, least_upload_energy
from strategies.dssda.answer import Infeasibility
from strategies.dssda.instance import Instance

LEAST_SHARE = 1e-30
"""Least power of a control unit that has something to send, as a share of Pmax. At 0 its upload never ends."""


@dataclass(frozen=True)
class Uplinks:
    """Control units on channels as columns of one shape: (N, J), or any selection of it."""

    k: Array
    """D_t ln 2 / B [s], upload time at x = 1."""
    per_bit: Array
    """ln 2 / B [s/bit]: what a bit more adds to k."""
    noise_gain: Array
    """(I + B N0) / h [W]: power at an SINR of 1."""
    e0: Array
    """Least upload energy [J], at any power."""
    alpha: Array
    beta: Array
    scale: Array
    """C."""
    wP: Array
    wE: Array
    wG: Array
    Pmax: Array
    """C6 [W]."""
    low: Array
    """Least x that eps_max allows."""
    high: Array
    """Largest x that C6 and C8 allow; 0 where C8 allows none."""

    @classmethod
    def of(cls, instance: Instance, micro_batches: Sequence[int | None] | None = None) -> Uplinks:
        """All clusters on all channels, (N, J).

        Parameters
        ----------
        micro_batches : (N,), m of each cluster, where the bits of its upload depend on it (Eq. (11)); without it these
            bits are left out

        Raises
        ------
        ValueError
            If a channel has neither noise nor interference: its rate is infinite.
        """
        clusters = instance.clusters
        gain, interference, bandwidth = (np.array([getattr(c, name) for c in clusters]) for name in "hIB")
        noise = interference + bandwidth * instance.N0
        if not np.all(noise > 0):
            n, j = (int(i) for i in np.argwhere(noise <= 0)[0])
            raise ValueError(
                f"clusters[{n}].I[{j}]: found 0 with N0 = 0, expected noise or interference on every channel; "
                "otherwise the rate is infinite"
            )

        def column(name: str, of: str = "up") -> Array:
            values = [getattr(c.up if of == "up" else c, name) for c in clusters]
            return np.broadcast_to(np.array(values, dtype=np.float64)[:, None], gain.shape)

        paper = np.array([[c.up.eps_mode == "paper"] for c in clusters])
        alpha, beta = np.where(paper, noise, 1.0), np.where(paper, interference, 1.0)
        e0 = least_upload_energy(column("e_bits"), bandwidth, gain, interference, instance.N0)
        Pmax, scale = column("Pmax"), column("C")  # noqa: N806
        eps_max = np.array([[np.inf if c.up.eps_max is None else c.up.eps_max] for c in clusters])
        bits = column("t_bits") + _activation_bits(instance, micro_batches)[:, None]
        sends = (bits > 0) | (column("e_bits") > 0) | (instance.z_enc_bits > 0)
        least = np.log1p(np.where(sends, LEAST_SHARE, 0.0) * Pmax * gain / noise)
        low = np.maximum(np.log1p(np.maximum(scale / eps_max - beta, 0.0) / alpha), least)
        return cls(
            k=bits * np.log(2.0) / bandwidth,
            per_bit=np.log(2.0) / bandwidth,
            noise_gain=noise / gain,
            e0=e0,
            alpha=alpha,
            beta=beta,
            scale=scale,
            wP=column("wP", "cluster"),
            wE=column("wE", "cluster") + instance.wJ,
            wG=column("wG", "cluster"),
            Pmax=Pmax,
            low=low,
            high=largest_within_budget(np.log1p(Pmax * gain / noise), e0, column("Emax")),
        )

    def select(self, *index: NDArray[np.intp] | NDArray[np.bool_] | int) -> Uplinks:
        """The columns at an index of their shape."""
        return Uplinks(**{f.name: np.asarray(getattr(self, f.name)[index]) for f in fields(self)})

    def flat(self) -> Uplinks:
        """The columns in one dimension."""
        return Uplinks(**{f.name: np.ravel(getattr(self, f.name)) for f in fields(self)})

    @property
    def capped(self) -> Array:
        """Efficiency x at Pmax."""
        return np.asarray(np.log1p(self.Pmax / self.noise_gain))

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """True where some power meets C6, C8 and eps_max."""
        return np.asarray(self.low <= self.high)

    def seconds(self, x: Array) -> Array:
        """Upload time [s], Eq. (11)."""
        return _over(self.k, x)

    def efficiency(self, seconds: Array) -> Array:
        """Least x that sends in this time; inf where none does. The inverse of :meth:`seconds`."""
        return np.where(seconds < 0, np.inf, _over(self.k, seconds))

    def power(self, x: Array) -> Array:
        """Transmit power [W], at most Pmax in spite of rounding."""
        return np.minimum(self.noise_gain * np.expm1(x), self.Pmax)

    def energy(self, x: Array) -> Array:
        """Upload energy [J], Eq. (12)."""
        return self.e0 * _expm1_over(x)

    def energy_slope(self, x: Array) -> Array:
        """dE/dx [J]."""
        return self.e0 * _expm1_over_slope(x)

    def distortion(self, x: Array) -> Array:
        """Distortion of the upload, Eq. (25) or its form with the SINR."""
        return _over(self.scale, self.alpha * np.expm1(x) + self.beta)

    def cost(self, x: Array) -> Array:
        """Cost q = wP p + wE E_up + wG eps; a term of weight 0 is 0, even if infinite."""
        growth = np.expm1(x)
        of_power = self.wP * self.noise_gain * growth + self.wE * self.e0 * _expm1_over(x, growth)
        return np.asarray(of_power + _over(self.wG * self.scale, self.alpha * growth + self.beta))

    def slope(self, x: Array) -> Array:
        """dq/dx."""
        growth = np.expm1(x)
        of_power = self.wP * self.noise_gain * (growth + 1.0) + self.wE * self.energy_slope(x)
        received = self.alpha * growth + self.beta
        return np.asarray(of_power - _over(self.wG * self.scale * self.alpha * (growth + 1.0), received**2))

    def slope_in_time(self, x: Array) -> Array:
        """dq/dt = -q' x^2 / k; 0 where nothing is sent and time buys nothing."""
        sends = self.k > 0
        return np.where(sends, -self.slope(x) * x**2 / np.where(sends, self.k, 1.0), 0.0)

    def cheapest(self, latency_weight: float = 0.0) -> Array:
        """The x of least ``latency_weight`` t + q between ``low`` and ``high``; the least such x if there are several.

        With the weight V it is the paper's power problem of one control unit. As a function of t the sum is convex
        wherever q falls with t, and rises elsewhere: the sign of its derivative changes once.

        Parameters
        ----------
        latency_weight : cost of a second of upload time [1/s]
        """
        if latency_weight == 0.0 and not np.any(self.wE):
            # q' = 0 is (alpha u + beta)^2 = wG C alpha (h / noise) / wP, with u the SINR.
            wanted, price = self.wG * self.scale * self.alpha, self.wP * self.noise_gain
            root = np.sqrt(_over(wanted, price))
            return np.clip(np.log1p(np.maximum(root - self.beta, 0.0) / self.alpha), self.low, self.high)

        def rises(x: Array) -> NDArray[np.bool_]:
            return np.asarray(self.slope(x) >= _over(latency_weight * self.k, x**2))

        return first_true(rises, self.low, np.maximum(self.high, self.low))


def _activation_bits(instance: Instance, micro_batches: Sequence[int | None] | None) -> Array:
    """The part of each cluster's upload that the local steps add, as far as it is known, (N,) [bit]."""
    if not instance.m_decides_upload:
        return np.full(instance.num_clusters, float(instance.activation_bits(1)))
    if micro_batches is None:
        return np.zeros(instance.num_clusters)
    return instance.activation_bits(np.array([m or 0 for m in micro_batches], dtype=np.float64))


def first_true(holds: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array) -> Array:
    """Bisection: where a condition that never fails again once it holds begins to hold, or ``high`` if it never does.

    Goes on until no number lies between the ends.
    """
    high = np.where(holds(low), low, high)
    for _ in range(200):
        middle = low + (high - low) / 2
        if ((middle <= low) | (middle >= high)).all():
            break
        true = holds(middle)
        high, low = np.where(true, middle, high), np.where(true, low, middle)
    return high


def first_true_number(holds: Callable[[Array], NDArray[np.bool_]], low: float, high: float, halvings: int = 1) -> float:
    """:func:`first_true` of one number, by the same halvings, some of them at once: that costs little more than one.

    Parameters
    ----------
    holds : of many numbers
    halvings : whose middles are tried at once, all that may come
    """
    done = 0
    while done < 200:
        ends = [low, high]
        for _ in range(halvings):
            middles = [a + (b - a) / 2 for a, b in pairwise(ends)]
            ends = [*chain.from_iterable(zip(ends, middles, strict=False)), high]
        numbers = ends[:-1] if done == 0 else ends[1:-1]
        true = dict(zip(numbers, holds(np.array(numbers)).tolist(), strict=True))
        if done == 0 and true[low]:
            return low
        for _ in range(halvings):
            middle = low + (high - low) / 2
            if middle <= low or middle >= high:
                return high
            low, high = (low, middle) if true[middle] else (middle, high)
            done += 1
    return high


def largest_within_budget(largest: Array, e0: Array, budget: Array) -> Array:
    """Largest x up to ``largest`` with e0 expm1(x) / x <= budget: C8 is an interval, because E_up rises with p.

    (43) and (44) of the paper, called inner approximations of C8, are outer ones and break it; no approximation is
    needed.
    """
    within = e0 * _expm1_over(largest) <= budget
    if within.all():
        return np.where(within, largest, 0.0)

    def exceeds(x: Array) -> NDArray[np.bool_]:
        return np.asarray(e0 * _expm1_over(x) > budget)

    first_beyond = first_true(exceeds, np.zeros_like(largest), largest)
    # The end found is the first number that breaks C8, or 0 where no power fits.
    return np.where(within, largest, np.nextafter(first_beyond, 0.0))


def _over(amount: Array, by: Array) -> Array:
    """Ratio; 0 where the amount is 0, inf where it is not and ``by`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(amount == 0, 0.0, amount / by)


def _expm1_over(x: Array, growth: Array | None = None) -> Array:
    """expm1(x) / x; 1 at 0. With ``growth`` where expm1(x) is known."""
    positive = x > 0
    y = np.where(positive, x, 1.0)
    return np.where(positive, (np.expm1(y) if growth is None else growth) / y, 1.0)


def _expm1_over_slope(x: Array) -> Array:
    """Derivative of expm1(x) / x: (x e^x - expm1(x)) / x^2, from its series where that would cancel."""
    small = x < 0.05
    if not small.any():
        return np.asarray((x * np.exp(x) - np.expm1(x)) / x**2)
    y = np.where(small, 1.0, x)
    series = 1 / 2 + x * (1 / 3 + x * (1 / 8 + x * (1 / 30 + x * (1 / 144 + x * (1 / 840 + x / 5760)))))
    return np.where(small, series, (y * np.exp(y) - np.expm1(y)) / y**2)


def uplink_of(instance: Instance, cluster: int, channel: int, m: int | None = None) -> Uplinks:
    """One control unit on one channel; ``m`` as in :meth:`Uplinks.of`."""
    return Uplinks.of(instance, [m] * instance.num_clusters).select(cluster, channel)


def power_interval(instance: Instance, cluster: int, channel: int) -> tuple[float, float] | Infeasibility:
    """Powers that C6, C8 and eps_max allow a cluster on a channel [W], or what cannot be met."""
    uplink = uplink_of(instance, cluster, channel)
    if not uplink.feasible:
        return _infeasibility(instance, uplink, cluster)
    return float(uplink.power(uplink.low)), float(uplink.power(uplink.high))


def uplink_infeasibility(instance: Instance, uplinks: Uplinks, cluster: int) -> Infeasibility | None:
    """Find why a cluster can use no channel, for the channel that comes nearest; None if it can use one.

    Parameters
    ----------
    uplinks : (N, J)
    """
    row = uplinks.select(cluster)
    if np.any(row.feasible):
        return None
    # A channel on which Pmax reaches eps_max lacks energy alone.
    missing = np.where(row.low <= row.capped, row.energy(row.low), np.inf)
    worst = row.distortion(row.capped)
    nearest = int(np.argmin(missing if np.any(np.isfinite(missing)) else worst))
    return _infeasibility(instance, row.select(nearest), cluster)


def _infeasibility(instance: Instance, uplink: Uplinks, cluster: int) -> Infeasibility:
    up = instance.clusters[cluster].up
    if up.eps_max is not None and uplink.low > uplink.capped:
        least = float(uplink.distortion(uplink.capped))
        power = float(uplink.noise_gain * np.expm1(uplink.low))
        remedy = f"allow a distortion of {least:.6g}, or a power of {power:.6g} W (Pmax is {up.Pmax:.6g} W)"
        return Infeasibility(cluster, "eps_max", least, up.eps_max, remedy)
    needs = float(uplink.energy(uplink.low))
    why = " at the power that eps_max requires" if needs > (1 + 1e-9) * uplink.e0 else ""
    remedy = (
        f"the largest upload that fits{why}: {up.e_bits * up.Emax / needs:.6g} bit, while it has {up.e_bits:.6g} bit; "
        "send adapters (model.trainable = lora) or compressed updates (compression.update), or raise the energy budget"
    )
    return Infeasibility(cluster, "C8", needs, up.Emax, remedy)
