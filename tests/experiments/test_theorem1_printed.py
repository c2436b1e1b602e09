"""(23) as printed, and how the bound without S scales, beside what is measured."""

import math

import pytest

from experiments.theorem1 import printed_gap_bound

PRINTED = {
    "first_loss": 1.4, "lowest": 1.0, "eta": 0.1, "beta": 0.2, "xi": 0.01, "phi_sq": 0.04, "epsilon": 0.0,
    "num_clusters": 3, "size": 4, "num_blocks": 12,
}  # fmt: skip


def test_the_printed_bound_is_the_papers_sum_term_by_term():
    values = PRINTED | {"epsilon": 0.03}
    sigma = 0.1 * 0.01 - 0.2 * 0.1**2 / 2 * (1 + 16 / 36)
    for rounds in (1, 2, 7):
        initial = math.prod([1 - 2 * sigma] * rounds) * 1.4 - 1.0
        added = sum(
            math.prod([1 - sigma] * (rounds - 1 - t)) * (0.2 * 0.01 * 0.04 / 3 * (16 / 12 + 1) + 0.1 / 3 * 0.03)
            for t in range(rounds)
        )
        assert printed_gap_bound(rounds, **values) == pytest.approx(initial + added)


def test_the_printed_bound_stands_inside_its_condition_alone():
    # eta < 4 xi N L / (beta (S^2 + L)) = 4 * 0.01 * 36 / (0.2 * 28).
    limit = 1.44 / 5.6
    assert printed_gap_bound(1, **PRINTED | {"eta": limit * 0.999}) is not None
    assert printed_gap_bound(1, **PRINTED | {"eta": limit}) is None
    assert printed_gap_bound(1, **PRINTED | {"xi": 0.0}) is None


def test_the_printed_bound_ends_below_zero_or_grows_without_end():
    assert printed_gap_bound(100_000, **PRINTED | {"eta": 0.05, "phi_sq": 0.0}) == pytest.approx(-1.0)
    assert printed_gap_bound(10_000, **PRINTED | {"eta": 0.25}) > 1e6
