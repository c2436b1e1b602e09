"""Radio formulas against values worked out by hand."""

import math

import numpy as np
import pytest

from client_pipeline.system.radio import (
    distortion_paper,
    distortion_sinr,
    least_upload_energy,
    shannon_rate,
    snr,
    upload_energy,
    upload_time,
)

NOISE = 1e-15  # W/Hz: 1 nW in 1 MHz


@pytest.mark.parametrize(("power_w", "rate"), [(0.0, 0.0), (4e-3, 1e6), (12e-3, 2e6), (28e-3, 3e6)])
def test_rate_of_an_uplink_is_eq_10(power_w, rate):
    # I + B N0 = 3 nW + 1 nW, h = 1e-6: signal to noise 0, 1, 3, 7.
    assert float(shannon_rate(1e6, power_w, 1e-6, 3e-9, NOISE)) == pytest.approx(rate, rel=1e-12)


def test_rate_of_a_link_between_devices_is_eq_13():
    # Table II: p h / I = 0.085 * 1e-3 / 5e-10 = 170000 beside a noise of 2e-15 W; log2(170001) = 17.3752.
    found = shannon_rate(0.5e6, 0.085, 1e-3, 5e-10, 10**-20.4)
    assert float(found) == pytest.approx(0.5e6 * 17.3752, rel=1e-5)


def test_without_bandwidth_or_signal_there_is_no_rate():
    assert float(shannon_rate(0.0, 0.5, 1.0, 0.1, NOISE)) == 0.0
    assert float(shannon_rate(1e6, 0.5, 0.0, 0.1, NOISE)) == 0.0
    assert float(snr(0.0, 0.0, 1.0, 0.0, 0.0)) == 0.0


def test_without_noise_a_signal_has_no_bound_and_silence_has_none():
    """Zero noise, the case that the formulas divide by."""
    assert float(snr(1e6, 0.5, 1.0, 0.0, 0.0)) == math.inf
    assert float(shannon_rate(1e6, 0.5, 1.0, 0.0, 0.0)) == math.inf
    assert snr(1e6, [0.0, 0.5, 0.5], [1.0, 1.0, 0.0], 0.0, 0.0).tolist() == [0.0, math.inf, 0.0]
    # Interference alone is noise enough.
    assert float(snr(1e6, 0.5, 1.0, 0.25, 0.0)) == 2.0
    assert float(upload_time(19e6, math.inf)) == 0.0
    assert float(upload_energy(19e6, 0.5, math.inf)) == 0.0
    assert float(distortion_sinr(1e6, 0.5, 1.0, 0.0, 0.0, 0.8)) == 0.0
    assert float(distortion_sinr(1e6, 0.0, 1.0, 0.0, 0.0, 0.8)) == 0.8


def test_upload_time_and_energy_are_eqs_11_and_12():
    assert float(upload_time(19e6, 1e6)) == 19.0
    assert float(upload_energy(19e6, 0.5, 1e6)) == 9.5


def test_at_zero_power_an_upload_never_ends_and_its_energy_is_not_zero():
    rate = shannon_rate(1e6, 0.0, 1e-6, 3e-9, NOISE)
    assert float(upload_time(19e6, rate)) == math.inf
    assert float(upload_energy(19e6, 0.0, rate)) == math.inf
    assert float(upload_time(0.0, rate)) == float(upload_energy(0.0, 0.0, 1e6)) == 0.0


def test_upload_energy_rises_with_the_power_from_its_limit_at_zero():
    # D ln 2 (I + B N0) / (B h) = 19e6 * 0.693147 * 4e-9 / (1e6 * 1e-6) = 0.0526792 J
    least = float(least_upload_energy(19e6, 1e6, 1e-6, 3e-9, NOISE))
    assert least == pytest.approx(0.0526792, rel=1e-5)
    power = np.geomspace(1e-9, 1.0, 50)
    energy = upload_energy(19e6, power, shannon_rate(1e6, power, 1e-6, 3e-9, NOISE))
    assert energy[0] == pytest.approx(least, rel=1e-6)
    assert np.all(np.diff(energy) > 0)


def test_distortion_as_printed_is_eq_25():
    # 0.2 / (0.5 * 0.97 + 0.07) = 0.2 / 0.555; at no power 0.2 / 0.07
    assert distortion_paper(np.array([0.5, 0.0]), 0.97, 0.07, 0.2) == pytest.approx([0.3603604, 2.8571429])


def test_distortion_by_the_sinr_is_its_scale_at_zero_power():
    power = np.array([0.0, 4e-3, 12e-3])
    assert distortion_sinr(1e6, power, 1e-6, 3e-9, NOISE, 0.8) == pytest.approx([0.8, 0.4, 0.2])


def test_interference_raises_the_distortion_by_the_sinr_and_lowers_the_printed_one():
    weak, strong = 0.06, 0.08
    assert distortion_sinr(1e6, 0.5, 1.0, strong, NOISE, 1.0) > distortion_sinr(1e6, 0.5, 1.0, weak, NOISE, 1.0)
    assert distortion_paper(0.5, 1.0, strong, 1.0) < distortion_paper(0.5, 1.0, weak, 1.0)
