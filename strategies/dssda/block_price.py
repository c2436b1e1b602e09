"""A price per TEB: a lower bound of what S stages take together, without their dynamic programme.

A(T) is the least sum t_1 + ... + t_S over S devices that hold 1 to c_k(T) TEBs each and L together, the last one
without its link. Pay every device lambda for each TEB and let it hold as many as it likes, whatever the others do:

    A(T) >= lambda L + the least sum of S - 1 terms  min over d of  d (a_k - lambda) + tau_k,  d = 1 or c_k(T),
                                     and one         min over d of  d (a_k - lambda),          d = 1 or its cap as last.

The terms separate, so that one sort of the devices serves every S; and all but one of the devices hold 1 or c_k(T) at
the optimum anyway, so that the best price leaves little to the programme.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.bottleneck import ROUNDING, Index
from strategies.dssda.limits import Limits

_PRICES = 12
"""Values of lambda that are tried."""
_BATCH = 2**19
"""Terms that are computed together: they fill the processor's cache, not the memory."""


@dataclass(frozen=True)
class StageSums:
    """The devices of one cluster at several pairs of an m and a bottleneck T, (P, K) each."""

    teb_s: Array
    """a_k [s]."""
    link_s: Array
    """tau_k [s]."""
    middle: Array
    """c_k(T), most TEBs on a device that sends to the next one."""
    end: Array
    """Most TEBs on the last device."""
    num_blocks: int
    """L."""

    @classmethod
    def of(cls, limits: Limits, row: Index, bottleneck: Array, num_blocks: int) -> StageSums:
        """Collect the caps.

        Parameters
        ----------
        row : (P,), rows of the limits, one for each m
        bottleneck : (P,), T [s]
        """
        teb, link = limits.teb_s[row], limits.link_s[row]
        # A T that is a stage time itself must admit that stage in spite of rounding.
        room = bottleneck[:, None] * (1 + ROUNDING)
        middle = np.minimum(np.floor((room - link) / teb), limits.cap[row]).clip(0.0)
        end = np.minimum(np.floor(room / teb), limits.last_cap[row]).clip(0.0)
        return cls(teb, link, middle, end, num_blocks)

    def at(self, points: Index) -> StageSums:
        """Some of the pairs."""
        return StageSums(
            self.teb_s[points], self.link_s[points], self.middle[points], self.end[points], self.num_blocks
        )

    def bounds(self, max_size: int) -> Array:
        """Lower bounds of A(T) for S = 1 to ``max_size``, (P, S); inf exactly where no S devices hold the L TEBs."""
        step = max(1, _BATCH // (_PRICES * self.teb_s.shape[1]))
        points = np.arange(len(self.teb_s))
        parts = [self.at(points[i : i + step])._bounds(max_size) for i in range(0, len(points), step)]
        return np.vstack(parts) if parts else np.empty((0, max_size))

    def _bounds(self, max_size: int) -> Array:
        held = -_cheapest_crews(
            np.where(self.middle >= 1, -self.middle, np.inf), np.where(self.end >= 1, -self.end, np.inf)
        )
        # The slope of the bound in lambda changes where a device takes its cap instead of one TEB: at its a_k.
        price = np.quantile(self.teb_s, np.linspace(0.0, 1.0, _PRICES), axis=1).T[:, :, None]
        saving = self.teb_s[:, None, :] - price
        middle, end = self.middle[:, None, :], self.end[:, None, :]
        inner = np.where(middle >= 1, self.link_s[:, None, :] + np.minimum(saving, middle * saving), np.inf)
        outer = np.where(end >= 1, np.minimum(saving, end * saving), np.inf)
        sums = np.max(price * self.num_blocks + _cheapest_crews(inner, outer), axis=1)
        return np.where(held >= self.num_blocks, sums, np.inf)[:, :max_size]


def _cheapest_crews(inner: Array, outer: Array) -> Array:
    """Least sum of S - 1 devices' inner terms and another device's outer term, for S = 1 to K, (..., K).

    Parameters
    ----------
    inner, outer : (..., K); inf where a device cannot be there
    """
    order = np.argsort(inner, axis=-1)
    inner, outer = np.take_along_axis(inner, order, axis=-1), np.take_along_axis(outer, order, axis=-1)
    cheapest = np.cumsum(inner, axis=-1)
    # The last device is one of the S that are cheapest inside, or none of the first S - 1.
    possible = np.isfinite(inner)
    change = np.where(possible, outer - np.where(possible, inner, 0.0), np.inf)
    beyond = np.minimum.accumulate(outer[..., ::-1], axis=-1)[..., ::-1]
    fewer = np.concatenate([np.zeros_like(cheapest[..., :1]), cheapest[..., :-1]], axis=-1)
    return np.minimum(cheapest + np.minimum.accumulate(change, axis=-1), fewer + beyond)
