"""Seconds of TEBs, links, stages, pipelines and rounds.

All functions broadcast over NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from client_pipeline.system.radio import Array, Real

LatencyForm = Literal["eq15", "flowshop"]
Scaling = Literal["microbatch", "sample"]
Tail = Literal["none", "last"]


def micro_batch_work(forward_flop: float, backward_flop: float, samples: Real, scaling: Scaling) -> Array:
    """FLOP of one TEB for one micro-batch, inside Eq. (15).

    ``microbatch`` is the paper's b̂ o_f + o_b: the backward pass costs the same for any micro-batch. ``sample`` is
    b̂ (o_f + o_b). Eqs. (33) to (39) print ``S o_l`` where Eq. (15) has ``b o_l``; we follow Eq. (15).

    Parameters
    ----------
    forward_flop : o_f, per sample [FLOP]
    backward_flop : o_b, per micro-batch or per sample [FLOP]
    samples : b̂ = b / m, samples of a micro-batch
    scaling : what o_b counts
    """
    b = np.asarray(samples, dtype=np.float64)
    return b * forward_flop + (backward_flop if scaling == "microbatch" else b * backward_flop)


def teb_time(work_flop: Real, flop_per_cycle: Real, frequency_hz: Real, overhead_s: Real = 0.0) -> Array:
    """Seconds of one TEB for one micro-batch: a_k = work / (phi_k f_k), inside Eq. (15), plus a fixed overhead.

    Parameters
    ----------
    work_flop : see :func:`micro_batch_work` [FLOP]
    flop_per_cycle : phi_k [FLOP/cycle]
    frequency_hz : f_k [cycle/s]
    overhead_s : t0 [s]
    """
    speed = np.asarray(flop_per_cycle, dtype=np.float64) * np.asarray(frequency_hz, dtype=np.float64)
    return np.asarray(work_flop, dtype=np.float64) / speed + overhead_s


def link_time(bits: Real, rate: Real, latency_s: Real = 0.0) -> Array:
    """Seconds that one micro-batch spends on a link: tau_k = (z + g) / r_k, plus a fixed latency.

    Parameters
    ----------
    bits : z + g: activations and their gradient [bit]
    rate : r_k, Eq. (13) [bit/s]
    latency_s : [s]
    """
    return np.asarray(bits, dtype=np.float64) / np.asarray(rate, dtype=np.float64) + latency_s


def stage_time(num_blocks: Real, teb_s: Real, link_s: Real) -> Array:
    """Seconds of one stage for one micro-batch: t_k = delta_k a_k + tau_k, inside Eq. (15)."""
    return np.asarray(num_blocks, dtype=np.float64) * np.asarray(teb_s) + np.asarray(link_s)


def pipeline_latency_paper(
    stage_s: Sequence[float], link_s: Sequence[float], num_micro_batches: int, tail: Tail = "last"
) -> float:
    """Seconds of one step of the pipeline, Eq. (15): D = (S + m - 1) max t_k - max tau_k.

    Every stage is charged as the slowest one: an upper bound of the makespan of fused chunks.

    Parameters
    ----------
    stage_s : (S,), t_k of the selected devices [s]
    link_s : (S,), tau_k of the selected devices [s]
    num_micro_batches : m
    tail : ``last`` subtracts the largest tau_k, as printed; ``none`` does not
    """
    saved = max(link_s) if tail == "last" else 0.0
    return (len(stage_s) + num_micro_batches - 1) * max(stage_s) - saved


def flow_shop_latency(stage_s: Sequence[float], num_micro_batches: int) -> float:
    """Makespan of m equal micro-batches through S stages, each a fused forward and backward chunk.

        D = sum t_k + (m - 1) max t_k

    Ours, in place of Eq. (15): the makespan of a permutation flow shop with equal jobs.

    Parameters
    ----------
    stage_s : (S,), t_k in pipeline order, the last one without its link [s]
    num_micro_batches : m
    """
    return sum(stage_s) + (num_micro_batches - 1) * max(stage_s)


def round_latency(step_s: Sequence[float], upload_s: Sequence[float], local_steps: int) -> float:
    """Seconds of a round, Eq. (26): the slowest selected cluster's local steps and upload.

    Parameters
    ----------
    step_s : D_n of each selected cluster [s]
    upload_s : t_up,n of each selected cluster [s]
    local_steps : steps of each cluster in a round
    """
    return max((local_steps * d + t for d, t in zip(step_s, upload_s, strict=True)), default=0.0)
