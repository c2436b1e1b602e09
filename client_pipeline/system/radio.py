"""Radio links: rates, upload time and energy, and the distortion of an upload.

All functions broadcast over NumPy arrays. Gains are linear power gains, not dB.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Real = float | Array
DistortionForm = Literal["paper", "sinr"]


def shannon_rate(bandwidth_hz: Real, power_w: Real, gain: Real, interference_w: Real, noise_psd: float) -> Array:
    """Rate of a link in the presence of noise and interference, Eqs. (10) and (13).

        R = B log2(1 + p h / (I + B N0))

    Eq. (10) is this rate for a control unit on an uplink channel, Eq. (13) for a device to the next device.

    Parameters
    ----------
    bandwidth_hz : bandwidth B [Hz]
    power_w : transmit power p [W]
    gain : linear power gain h
    interference_w : interference I at the receiver [W]
    noise_psd : noise power spectral density N0 [W/Hz]

    Returns
    -------
    Rate [bit/s], of the broadcast shape; 0 where no bandwidth is allocated.
    """
    bandwidth = np.asarray(bandwidth_hz, dtype=np.float64)
    return bandwidth * np.log1p(snr(bandwidth, power_w, gain, interference_w, noise_psd)) / np.log(2.0)


def snr(bandwidth_hz: Real, power_w: Real, gain: Real, interference_w: Real, noise_psd: float) -> Array:
    """Signal to interference plus noise: p h / (I + B N0), linear; 0 where neither signal nor noise is.

    Parameters are those of :func:`shannon_rate`.
    """
    noise = np.asarray(interference_w, dtype=np.float64) + np.asarray(bandwidth_hz, dtype=np.float64) * noise_psd
    signal = np.asarray(power_w, dtype=np.float64) * np.asarray(gain, dtype=np.float64)
    signal, noise = np.broadcast_arrays(signal, noise)
    return np.divide(signal, noise, out=np.where(signal > 0, np.inf, 0.0), where=noise > 0)


def upload_time(bits: Real, rate: Real) -> Array:
    """Seconds of an upload, Eq. (11): t = D / R.

    Parameters
    ----------
    bits : upload D_t [bit]: activations of all local steps and the encoder
    rate : [bit/s]

    Returns
    -------
    [s]; infinite where the rate is 0, 0 where nothing is sent.
    """
    bits_, rate_ = np.broadcast_arrays(np.asarray(bits, dtype=np.float64), np.asarray(rate, dtype=np.float64))
    return np.divide(bits_, rate_, out=np.where(bits_ > 0, np.inf, 0.0), where=rate_ > 0)


def upload_energy(bits: Real, power_w: Real, rate: Real) -> Array:
    """Energy of an upload, Eq. (12): E = p D / R.

    It rises with the power. As the power falls to 0 it tends to :func:`least_upload_energy`, not to 0.

    Parameters
    ----------
    bits : upload D_e [bit]: the encoder
    power_w : transmit power p [W]
    rate : [bit/s]

    Returns
    -------
    [J]; infinite where the rate is 0 and something is sent.
    """
    power, seconds = np.broadcast_arrays(np.asarray(power_w, dtype=np.float64), upload_time(bits, rate))
    # At no power an upload never ends: no energy by the formula's 0 * inf, which is no number.
    return np.multiply(power, seconds, out=np.full(seconds.shape, np.inf), where=np.isfinite(seconds))


def least_upload_energy(bits: Real, bandwidth_hz: Real, gain: Real, interference_w: Real, noise_psd: float) -> Array:
    """Limit of :func:`upload_energy` as the power falls to 0: D ln 2 (I + B N0) / (B h) [J].

    No upload of that many bits takes less, at any power.
    """
    bandwidth = np.asarray(bandwidth_hz, dtype=np.float64)
    noise = np.asarray(interference_w, dtype=np.float64) + bandwidth * noise_psd
    return np.asarray(bits, dtype=np.float64) * np.log(2.0) * noise / (bandwidth * np.asarray(gain, dtype=np.float64))


def distortion_paper(power_w: Real, gain: Real, interference_w: Real, scale: float) -> Array:
    """Distortion of an upload as printed, Eq. (25): epsilon = C / (p h + I).

    As printed, interference lowers the distortion; :func:`distortion_sinr` is the form that does not.

    Parameters
    ----------
    power_w : transmit power p [W]
    gain : linear power gain h
    interference_w : I [W]
    scale : C [W]
    """
    received = np.asarray(power_w, dtype=np.float64) * np.asarray(gain, dtype=np.float64)
    return scale / (received + np.asarray(interference_w, dtype=np.float64))


def distortion_sinr(
    bandwidth_hz: Real, power_w: Real, gain: Real, interference_w: Real, noise_psd: float, scale: float
) -> Array:
    """Distortion that falls with the signal to interference and noise ratio: epsilon = C / (1 + SINR).

    Ours, in place of Eq. (25). Parameters are those of :func:`shannon_rate`; ``scale`` is C, without a unit.
    """
    return scale / (1.0 + snr(bandwidth_hz, power_w, gain, interference_w, noise_psd))
