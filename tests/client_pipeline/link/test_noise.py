"""Source of protecting randomness: seeds that only look different, a search for the seed, and the tails."""

import hashlib
import math
import secrets

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from client_pipeline.link import privacy
from client_pipeline.link.privacy import NoiseSource, private_activations, private_update
from client_pipeline.link.privacy_config import PrivacyConfig

UNKNOWN_BITS = 12
"""Bits of the seed that the search below goes through; torch's generator on the CPU keeps 32, a matter of minutes."""


def digest(place):
    return hashlib.sha256(f"0/{place}".encode()).digest()


def test_places_whose_digests_agree_modulo_2_to_the_32_have_other_noise():
    """torch's generator on the CPU keeps 32 bits of its seed, so that these two repeated each other."""
    one, other = 32687, 111342
    low = [(int.from_bytes(digest(place)[:8], "little") >> 1) % 2**32 for place in (one, other)]
    assert low[0] == low[1] and digest(one) != digest(other)
    zeros = torch.zeros(64)
    source = NoiseSource(0)
    assert not torch.equal(source.like(zeros, one), source.like(zeros, other))


@pytest.mark.parametrize("seed", [5 + 2**31, 5 + 2**32, 5 + 2**63, 5 + 2**64])
def test_seeds_that_agree_in_their_low_bits_have_other_noise(seed):
    zeros = torch.zeros(64)
    assert not torch.equal(NoiseSource(seed).like(zeros, 1), NoiseSource(5).like(zeros, 1))


def found_seed(received, clip, noise):
    """Search as the server can: whose noise, taken off what was received, leaves a vector within the clip?"""
    for candidate in range(2**UNKNOWN_BITS):
        drawn = torch.randn(received.shape, generator=torch.Generator().manual_seed(candidate))
        if float((received - noise * clip * drawn).norm()) < 2 * clip:
            return candidate
    return None


def test_a_search_for_the_seed_takes_no_noise_off(monkeypatch):
    """The search broke the first generator in minutes; here the attacker knows most of the seed's other parts."""
    truly_random = secrets.randbits
    # All but the bits that torch's generator keeps are secret; of those the attacker lacks 12 alone.
    monkeypatch.setattr(
        privacy.secrets, "randbits", lambda n: (truly_random(n) >> 32 << 32) | truly_random(UNKNOWN_BITS)
    )
    config = PrivacyConfig(update_clip=1.0, update_noise=8.0)
    secret = torch.full((400,), 0.05)
    start = {"w": torch.zeros(400)}
    received = private_update(start, {"w": secret}, config, NoiseSource())["w"]
    assert float((received - secret).norm()) > 100.0
    assert found_seed(received, config.update_clip, config.update_noise) is None
    # The attack itself works: it finds what such a generator hides.
    weak = torch.Generator().manual_seed((truly_random(31) << 32) | 2717)
    broken = secret + 8.0 * torch.randn(400, generator=weak)
    assert found_seed(broken, config.update_clip, config.update_noise) == 2717


def test_noise_is_normal_in_body_and_tails():
    number = 4_000_000
    values = NoiseSource().like(torch.zeros(number)).numpy()
    assert kstest(values[: number // 4], "norm").pvalue > 1e-6
    # Finer than any sum can show: of numbers with 24 random bits each fifth came twice.
    assert len(np.unique(values)) == number
    # Counts beyond k sigma, within five of their own standard deviations.
    for k in (1, 2, 3, 4, 4.5):
        for beyond in (int((values > k).sum()), int((values < -k).sum())):
            expected = number * norm.sf(k)
            assert abs(beyond - expected) < 5 * math.sqrt(expected) + 1, k
    # Neighbours in a stream have nothing to do with each other, in size or in sign.
    for one, other in ((values[:-1], values[1:]), (np.square(values[:-1]), np.square(values[1:]))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(number)


def words(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


@pytest.mark.parametrize(("quarter", "cosine", "sine"), [(0, 1, 0), (1, 0, 1), (2, -1, 0), (3, 0, -1)])
def test_the_angle_of_a_pair_goes_once_round_the_circle(quarter, cosine, sine):
    """Box and Muller: the first word is the radius, the second a part of the circle."""
    radius = math.sqrt(2 * math.log(2))
    found = privacy.gaussian(words(1 << 63, quarter << 62))
    np.testing.assert_allclose(found, [radius * cosine, radius * sine], atol=1e-9)


def test_noise_is_nobodys_to_repeat_unless_somebody_says_so():
    """A default that is a seed would take all noise off for who reads these lines."""
    one, other = (NoiseSource(PrivacyConfig().seed).like(torch.zeros(8), "a") for _ in range(2))
    assert not torch.equal(one, other)


def test_the_rarest_value_lies_beyond_nine_sigma():
    """``torch.randn`` of float32 ends at 5.8, as its 24 bits do."""
    noise = [privacy.gaussian(bytes(16 * 8)), privacy.gaussian(b"\xff" * 16 * 8)]
    assert all(np.isfinite(values).all() for values in noise)
    assert 9.0 < np.abs(noise[0]).max() < 10.0


def test_sums_are_made_in_double_precision():
    """The noise is drawn and added with 53 bits, and rounded once, with the sum."""
    config = PrivacyConfig(update_clip=1.0, update_noise=1.0, seed=3)
    start = {"w": torch.full((1000,), 100.0)}
    sent = private_update(start, start, config, NoiseSource(3), "a")["w"]
    drawn = NoiseSource(3).like(start["w"], "a", "w")
    assert drawn.dtype == torch.float64 and sent.dtype == torch.float32
    assert torch.equal(sent, (start["w"].double() + drawn).float())
    half = private_update({"w": start["w"].half()}, {"w": start["w"].half()}, config, NoiseSource(3), "a")["w"]
    assert half.dtype == torch.float16 and torch.equal(half, (start["w"].double() + drawn).half())


class NoNoise(NoiseSource):
    """Fails when it is asked."""

    def like(self, tensor, *place):
        raise AssertionError(f"noise was drawn for {place}")


def test_without_noise_what_is_sent_is_clipped_and_nothing_is_drawn():
    config = PrivacyConfig(update_clip=2.0, activation_clip=3.0)
    start = {"w": torch.zeros(4), "v": torch.tensor(1.0)}
    trained = {"w": torch.tensor([3.0, 0.0, 0.0, 4.0]), "v": torch.tensor(1.0)}
    sent = private_update(start, trained, config, NoNoise())
    assert sent["w"].tolist() == pytest.approx([1.2, 0.0, 0.0, 1.6]) and float(sent["v"]) == 1.0
    hidden = torch.tensor([[[6.0, 0.0], [0.0, 1.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    rows = private_activations(hidden, mask, config, NoNoise())
    assert rows.tolist() == [[[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]]
    # An update of nothing is nothing, and is not divided by its norm.
    assert torch.equal(private_update(start, start, config, NoNoise())["w"], start["w"])
