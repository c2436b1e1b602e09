"""Segments for answers: tokens go through the devices one after the other, and several requests share them.

Ours; the paper plans training alone. A token of one request takes the sum of its devices' times and links. With several
requests at once a device works at one while its neighbours work at others, so the slowest device or link bounds the
tokens a second. TEBs cost the same, so the order of the devices does not matter, and both problems are solved exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from client_pipeline.partition.plan import whole_blocks
from client_pipeline.system.radio import shannon_rate
from strategies.dssda.instance import Cluster, Instance


@dataclass(frozen=True)
class TokenCosts:
    """Costs of one token of one request on each device."""

    teb_s: tuple[float, ...]
    """Time of a TEB [s]."""
    link_s: tuple[float, ...]
    """Time of the states on the link to the next device, or from the last one to the head [s]."""
    capacity: tuple[int, ...]
    """Most TEBs, with the keys and values of all requests."""

    def latency_s(self, delta: Sequence[int]) -> float:
        """Time from a token to the next one of a request alone [s]."""
        return sum(d * teb + link for d, teb, link in zip(delta, self.teb_s, self.link_s, strict=True) if d)

    def slowest_s(self, delta: Sequence[int]) -> float:
        """Time of the slowest device or link [s]."""
        return max(max(d * teb, link) for d, teb, link in zip(delta, self.teb_s, self.link_s, strict=True) if d)

    def tokens_per_s(self, delta: Sequence[int], requests: int) -> float:
        """Tokens a second over so many requests at once."""
        return requests / max(self.latency_s(delta), requests * self.slowest_s(delta))


def token_costs(
    instance: Instance, cluster: Cluster, *, length: int, teb_bytes: float, kept_bytes: float, kept_tokens: int
) -> TokenCosts:
    """Count the costs of a token from those of a training sample.

    Parameters
    ----------
    instance : has forward FLOP and activations of a sample
    cluster : its devices
    length : tokens of that sample
    teb_bytes : weights of a TEB [byte]
    kept_bytes : keys and values of a token in a TEB [byte]
    kept_tokens : tokens of all requests together
    """
    devices = cluster.devices
    bits = instance.z_bits / length
    return TokenCosts(
        teb_s=tuple(instance.o_f / length / (d.phi * d.f) + instance.t0 + d.t0 for d in devices),
        link_s=tuple(
            bits / float(shannon_rate(d.B, d.p, d.h, d.I, instance.N0)) + instance.lat + d.lat for d in devices
        ),
        capacity=tuple(whole_blocks(d.mem, teb_bytes + kept_bytes * kept_tokens, instance.L) for d in devices),
    )


def least_latency(costs: TokenCosts, num_blocks: int, capacity: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return delta of the least time per token of one request; None: the devices do not hold the TEBs.

    Parameters
    ----------
    costs : of the devices
    num_blocks : L
    capacity : most TEBs of each device; None: as ``costs`` say
    """
    room = costs.capacity if capacity is None else capacity
    # best[n]: least time of the devices so far with n TEBs, and how many each has.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(math.inf, ())] * num_blocks]
    for teb_s, link_s, most in zip(costs.teb_s, costs.link_s, room, strict=True):
        following = []
        for n in range(num_blocks + 1):
            options = (
                (best[n - d][0] + (d * teb_s + link_s if d else 0.0), (*best[n - d][1], d))
                for d in range(min(most, n) + 1)
                if best[n - d][0] < math.inf
            )
            following.append(min(options, default=(math.inf, ())))
        best = following
    time_s, delta = best[num_blocks]
    return delta if time_s < math.inf else None


def most_tokens(costs: TokenCosts, num_blocks: int, requests: int) -> tuple[int, ...] | None:
    """Return delta of the most tokens a second over so many requests at once; None as :func:`least_latency`."""
    slowest = {
        max(d * teb, link)
        for teb, link, most in zip(costs.teb_s, costs.link_s, costs.capacity, strict=True)
        for d in range(1, most + 1)
    }
    best: tuple[int, ...] | None = None
    for bound_s in sorted(slowest):
        if best is not None and requests * bound_s >= requests / costs.tokens_per_s(best, requests):
            # Slower devices gain nothing any more.
            break
        allowed = [
            max((d for d in range(most + 1) if max(d * teb, link) <= bound_s), default=0)
            for teb, link, most in zip(costs.teb_s, costs.link_s, costs.capacity, strict=True)
        ]
        delta = least_latency(costs, num_blocks, allowed)
        if delta and (best is None or costs.tokens_per_s(delta, requests) > costs.tokens_per_s(best, requests)):
            best = delta
    return best
