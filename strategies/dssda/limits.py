"""Most TEBs on each device of a cluster, by memory (C7) and energy (C9), and their seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from client_pipeline.system.energy import block_energy, num_chunks
from client_pipeline.system.radio import Array
from strategies.dssda.evaluation import TOLERANCE, teb_and_link_seconds
from strategies.dssda.instance import Instance


@dataclass(frozen=True)
class Limits:
    """One cluster, for every m of ``m_set``: rows are m, columns devices."""

    cluster: int
    memory_cap: Array
    """(K,), TEBs that fit the memory, at most L."""
    teb_s: Array
    """(M, K), a_k [s]."""
    link_s: Array
    """(M, K), tau_k [s]."""
    cap: Array
    """(M, K), TEBs on a device that sends to the next one."""
    last_cap: Array
    """(M, K), TEBs on the last device; more than ``cap`` where its budget pays no link: under ``flowshop``, and with
    ``tail_energy = "none"``."""
    energy_cap: Array
    """(M, K), TEBs within the budget of a device that sends, which need not be whole (C9)."""
    last_energy_cap: Array
    """(M, K), of the last device."""

    @classmethod
    def of(cls, instance: Instance, cluster: int) -> Limits:
        """Collect the limits of a cluster."""
        d, m = instance.device_arrays(cluster), np.array(instance.m_set, dtype=np.float64)[:, None]
        work = instance.work(m)
        teb_s, link_s = teb_and_link_seconds(instance, cluster, m)
        memory = np.full(len(d.mem), float(instance.L))
        if instance.gamma0 > 0:
            memory = np.minimum(np.floor(d.mem / instance.gamma0 * (1 + TOLERANCE)), instance.L)
        per_block, chunks = block_energy(work, d.phi, d.f, d.kappa), num_chunks(instance.energy, m)

        def within(sending: Array) -> Array:
            if instance.energy == "none":
                return np.full(link_s.shape, np.inf)
            left = d.Emax / chunks - sending
            # Rounding must not break a budget that is met with equality.
            left = left + TOLERANCE * d.Emax / chunks
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(per_block > 0, left / per_block, np.where(left >= 0, np.inf, 0.0))

        energy_cap = within(d.p * link_s)
        last_energy_cap = within(np.zeros_like(link_s)) if instance.names_last else energy_cap
        cap = np.clip(np.floor(energy_cap), 0.0, memory)
        last_cap = np.clip(np.floor(last_energy_cap), 0.0, memory) if instance.names_last else cap
        return cls(
            cluster=cluster,
            memory_cap=memory,
            teb_s=teb_s,
            link_s=link_s,
            cap=cap,
            last_cap=last_cap,
            energy_cap=energy_cap,
            last_energy_cap=last_energy_cap,
        )

    @property
    def largest(self) -> Array:
        """(M, K), TEBs that a device may hold at most, in any place of the pipeline."""
        return np.maximum(self.cap, self.last_cap)

    def largest_caps(self) -> Iterator[Array]:
        """For each m, the TEBs of each device, one device at a time in the place of the last one, (K,)."""
        for cap, last in zip(self.cap, self.last_cap, strict=True):
            yield cap
            for k in np.flatnonzero(last > cap):
                yield np.where(np.arange(len(cap)) == k, last, cap)
