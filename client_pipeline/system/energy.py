"""Joules of the devices of a pipeline."""

from __future__ import annotations

from typing import Literal

import numpy as np

from client_pipeline.system.radio import Array, Real

EnergyMode = Literal["none", "c9p", "c9", "exact"]
TailEnergy = Literal["link", "none"]
"""Charge of a pipeline's last device for sending within the cluster: a ``link``, as printed, or ``none``."""


def chunk_energy(
    num_blocks: int | Array,
    work_flop: Real,
    flop_per_cycle: Real,
    frequency_hz: Real,
    kappa: Real,
    power_w: Real,
    link_s: Real,
) -> Array:
    """Energy of a device for one micro-batch, constraint C9': kappa delta_k work / phi_k f_k^2 + p_k tau_k [J].

    Parameters
    ----------
    num_blocks : delta_k
    work_flop : work of one TEB for one micro-batch [FLOP]
    flop_per_cycle : phi_k [FLOP/cycle]
    frequency_hz : f_k [cycle/s]
    kappa : effective switched capacitance [J/(cycle Hz^2)]
    power_w : transmit power p_k [W]
    link_s : tau_k [s]; 0 for a device that sends nothing
    """
    per_block = block_energy(work_flop, flop_per_cycle, frequency_hz, kappa)
    return np.asarray(num_blocks, dtype=np.float64) * per_block + np.asarray(power_w) * np.asarray(link_s)


def block_energy(work_flop: Real, flop_per_cycle: Real, frequency_hz: Real, kappa: Real) -> Array:
    """Energy of one TEB for one micro-batch, inside C9': kappa work / phi_k f_k^2 [J]."""
    cycles = np.asarray(work_flop, dtype=np.float64) / np.asarray(flop_per_cycle, dtype=np.float64)
    return np.asarray(kappa) * cycles * np.square(np.asarray(frequency_hz, dtype=np.float64))


def num_chunks(mode: EnergyMode, num_micro_batches: int | Array) -> Array:
    """Return the number of micro-batches that a device's energy budget covers.

    ``c9p`` is the paper's C9', one; ``c9`` its Eq. (16), 2m; ``exact`` m, what one step really takes.
    C9' drops the 2m of Eq. (16), and the 2 counts forward and backward twice, for the work already holds both.
    ``none`` has no budget: 0.
    """
    m = np.asarray(num_micro_batches, dtype=np.float64)
    factor = {"none": 0.0, "c9": 2.0, "exact": 1.0}
    return np.ones_like(m) if mode == "c9p" else factor[mode] * m
