"""Energy of the devices against values worked out by hand."""

import numpy as np
import pytest

from client_pipeline.system.energy import block_energy, chunk_energy, num_chunks

# 18 GFLOP at 18 FLOP/cycle are 1e9 cycles; at 0.5 GHz each takes 1e-27 * 0.25e18 J.
BLOCK = dict(work_flop=18e9, flop_per_cycle=18.0, frequency_hz=0.5e9, kappa=1e-27)


def test_a_chunk_is_c9_prime():
    assert float(block_energy(**BLOCK)) == pytest.approx(0.25, rel=1e-12)
    # Three TEBs, and 0.1 W for half a second.
    assert float(chunk_energy(3, **BLOCK, power_w=0.1, link_s=0.5)) == pytest.approx(0.75 + 0.05, rel=1e-12)


def test_a_device_without_tebs_and_link_takes_nothing():
    assert float(chunk_energy(0, **BLOCK, power_w=0.1, link_s=0.0)) == 0.0


def test_energy_grows_with_the_square_of_the_frequency_but_not_with_time():
    slow, fast = (float(block_energy(**BLOCK | {"frequency_hz": f})) for f in (0.4e9, 0.8e9))
    assert fast == pytest.approx(4 * slow, rel=1e-12)
    wide = float(block_energy(**BLOCK | {"flop_per_cycle": 36.0}))
    assert wide == pytest.approx(0.125, rel=1e-12)


def test_devices_broadcast():
    found = chunk_energy(np.array([1, 0, 2]), **BLOCK, power_w=0.1, link_s=np.array([0.5, 0.0, 0.0]))
    assert found == pytest.approx([0.30, 0.0, 0.5])


@pytest.mark.parametrize(("mode", "chunks"), [("none", 0.0), ("c9p", 1.0), ("c9", 16.0), ("exact", 8.0)])
def test_modes_cover_none_one_2m_or_m_micro_batches(mode, chunks):
    assert float(num_chunks(mode, 8)) == chunks
    assert num_chunks(mode, np.array([8, 8])).tolist() == [chunks, chunks]
