"""The convergence bound Gamma that the planner trades against latency: Lemma 1, Theorem 1, Eqs. (25) and (28).

What the paper prints, and what we add
--------------------------------------
Printed are Gamma_n = g0 (phi^2 S_n^2 / L + epsilon_n + phi^2) with g0 = beta eta^2 / (2N), Eq. (28), and epsilon_n =
C / (p h + I), Eq. (25). The derivation below is ours; it ends in the printed bound and names what it assumes.

* **Lemma 1** (error of an aggregated gradient). Cluster n's contribution differs from its full gradient by
  independent errors of mean 0: of the S segments, phi^2 S / L each in mean square, phi^2 S^2 / L together; the
  distortion epsilon of the upload; and the sampling of the batch, phi^2. Their sum is :func:`gradient_error`.
* **Theorem 1**. If the loss F is beta-smooth and eta <= 1 / beta, one round w <- w - eta (grad F + e) gives
  E F(w') <= F(w) - eta / 2 |grad F|^2 + beta eta^2 / 2 E|e|^2. The mean of N independent errors has 1 / N of their
  mean square, so the last term is the mean of the Gamma_n. Summed over T rounds it is :func:`convergence_bound`.

What it assumes and training does not always do: plain SGD, one local step a round, every cluster in the mean with the
same weight. A cluster without a channel is out of the mean, which biases the gradient where data differ; its Gamma
charges it with the distortion of silence instead (:func:`gamma_unmatched`). Elsewhere Gamma is a cost, not a proof.

Differences. As printed, (25) lets interference lower the distortion; the consistent form is C / (1 + SINR)
(:func:`client_pipeline.system.radio.distortion_sinr`). The printed condition on Gamma holds in every round (C11); the
bound needs its mean only, which is what the virtual queue keeps (C10). The term in S^2 is a modelled cost: a
synchronous pipeline gives the same gradient for every S and m, as our tests of the runtime show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.radio import Array, Real


@dataclass(frozen=True, kw_only=True)
class BoundParameters:
    """Constants of the bound."""

    g0: float
    """beta eta^2 / (2N); see :func:`bound_scale`."""
    phi: float
    """phi: root mean square of a stochastic gradient's error."""


def bound_scale(smoothness: float, step_size: float, num_clusters: int) -> float:
    """Scale g0 = beta eta^2 / (2N) of Gamma, Eq. (28).

    Parameters
    ----------
    smoothness : beta
    step_size : eta
    num_clusters : N
    """
    return smoothness * step_size**2 / (2 * num_clusters)


def segment_error(num_segments: Real, num_blocks: int, phi: float) -> Array:
    """Mean square error sigma^2 = phi^2 S^2 / L that the cut into S segments is charged, Lemma 1."""
    return phi**2 * np.square(np.asarray(num_segments, dtype=np.float64)) / num_blocks


def gradient_error(num_segments: Real, num_blocks: int, distortion: Real, phi: float) -> Array:
    """Mean square error of one cluster's gradient as the server sees it, Lemma 1: sigma^2 + epsilon + phi^2.

    Parameters
    ----------
    num_segments : S_n
    num_blocks : L
    distortion : epsilon_n, Eq. (25)
    phi : root mean square of the sampling error
    """
    return segment_error(num_segments, num_blocks, phi) + np.asarray(distortion, dtype=np.float64) + phi**2


def gamma(num_segments: Real, num_blocks: int, distortion: Real, parameters: BoundParameters) -> Array:
    """Bound Gamma_n of a matched cluster, Eq. (28): g0 (phi^2 S_n^2 / L + epsilon_n + phi^2)."""
    return parameters.g0 * gradient_error(num_segments, num_blocks, distortion, parameters.phi)


def gamma_unmatched(silent_distortion: Real, parameters: BoundParameters) -> Array:
    """Bound of a cluster without a channel: g0 (phi^2 + epsilon(0)), with no segments and no power; ours.

    Parameters
    ----------
    silent_distortion : epsilon(0), the distortion at power 0
    """
    return parameters.g0 * (parameters.phi**2 + np.asarray(silent_distortion, dtype=np.float64))


def participation_gap(selected: NDArray[np.bool_], data_shares: Array) -> Array:
    """How much each cluster lacks, in a round, of its share of the updates, relative to it, (N,); ours.

    A round's update is the mean over the selected clusters, so that cluster n has the share p_n = 1 / |S| of it, or 0.
    The loss to minimise is sum_n w_n F_n with the clusters' shares w_n of the data. The gap is 1 - p_n / w_n, below 0
    for a cluster that has more than its share.

    * **Bias.** If each cluster's mean gap over T rounds is at most c, then p_n >= (1 - c) w_n on average. The update
      then differs from the gradient of the whole loss by sum_n (p_n - w_n) grad F_n, whose square is at most
      chi^2 sum_n w_n |grad F_n - grad F|^2 with chi^2 = sum_n (p_n - w_n)^2 / w_n, as Wang et al. have it
      (arXiv:2007.07481). With every gap at most c, chi^2 <= c^2 (1 - w) / w, w the least share.
    * **Staleness.** What counts is the mean over any window of rounds, as the model moves little within it (Wang and
      Ji, arXiv:2205.13648). A queue of Y bounds the sum of the gaps over a window of T rounds by Y + c T.

    Neither S nor the distortion of uploads is in it. For a round without updates all gaps are 1.

    Parameters
    ----------
    selected : clusters that train, (N,)
    data_shares : w_n, in any unit, (N,)
    """
    shares = np.asarray(data_shares, dtype=np.float64) / np.sum(data_shares)
    return 1.0 - selected / (max(int(np.sum(selected)), 1) * shares)


def check_step_size(step_size: float, smoothness: float) -> None:
    """Refuse a step size for which Theorem 1 does not hold.

    Raises
    ------
    ValueError
        Unless 0 < eta <= 1 / beta.
    """
    if not 0 < step_size <= 1 / smoothness:
        raise ValueError(
            f"step size {step_size:g}: expected 0 < eta <= 1 / beta = {1 / smoothness:g} (Theorem 1); lower it"
        )


def convergence_bound(initial_gap: float, step_size: float, smoothness: float, gammas: Array) -> float:
    """Bound of the mean of |grad F|^2 over T rounds, Theorem 1: 2 (F_0 - F*) / (eta T) + (2 / eta) mean Gamma.

    Parameters
    ----------
    initial_gap : F(w_0) - F*
    step_size : eta
    smoothness : beta
    gammas : (T, N), Gamma_n of every round; a round counts the sum over the clusters divided by N

    Raises
    ------
    ValueError
        For a step size outside Theorem 1's condition.
    """
    check_step_size(step_size, smoothness)
    num_rounds = len(gammas)
    return float(2 * initial_gap / (step_size * num_rounds) + 2 / step_size * np.mean(gammas))
