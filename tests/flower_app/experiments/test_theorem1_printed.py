"""(23) as printed, and how the bound without S scales, beside what is measured."""

import math

import pytest

from flower_app.experiments import theorem1
from flower_app.experiments.theorem1 import printed_gap_bound

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


def rows_with(gaps_by_curve, bounds_by_curve, printed=None):
    row = {"problem": "convex", "seed": 0, "gradient_sq": 1.0, "mean_gradient_sq": 1.0, "bound": 2.0}
    row |= {"bound_printed": 3.0, "eta": 1.0, "beta": 1.0, "phi_sq": 1.0, "epsilon": 0.0, "mu": 0.1, "eta_beta": 1.0}
    row |= {"broken_rounds": 0, "gap_broken_rounds": 0}
    return [
        row | {"curve": name, "label": name, "round": t, "gap": gap, "gap_bound": bounds_by_curve[name]}
        | ({"gap_printed": printed} if printed is not None and name != "a" else {})
        for name, gaps in gaps_by_curve.items()
        for t, gap in enumerate(gaps, 1)
    ]  # fmt: skip


def test_findings_hold_the_late_gap_against_that_of_the_first_curve():
    rows = rows_with({"a": [9.0, 9.0, 2.0, 2.0], "b": [9.0, 9.0, 0.5, 0.5]}, {"a": 4.0, "b": 1.2})
    [scaling] = [f for f in theorem1.findings(rows) if "multiple" in f.what]
    assert scaling.ours == "0.25 measured, 0.30 by the bound without S"


def test_findings_say_from_which_round_the_printed_bound_is_below_what_is_measured():
    rows = rows_with({"a": [3.0, 2.0], "b": [3.0, 2.0, 1.0]}, {"a": 4.0, "b": 4.0}, printed=2.5)
    [told] = [f for f in theorem1.findings(rows) if "(23)" in f.what]
    assert told.ours == "2.5 nat, 1 measured: below the measured gap from round 1 on"
    theorem1.draw(rows)
    rows = rows_with({"a": [3.0], "b": [3.0]}, {"a": 4.0, "b": 4.0}, printed=3.5)
    assert any("above the measured gap" in finding.ours for finding in theorem1.findings(rows))
