"""The privacy audit, in short: no canary finds more than the accountant says, and what is broken is found out."""

import importlib.util

import pytest

from helpers.repository import ROOT
from strategies.aggregation.accountant import epsilon

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows():
    specification = importlib.util.spec_from_file_location("privacy_audit", ROOT / "benchmarks" / "privacy_audit.py")
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    return benchmark.rows_of(trials=1500)


def test_no_attack_finds_more_than_the_accountant_says(rows):
    sound = [row for row in rows if not row["broken"]]
    assert {row["mechanism"] for row in sound} == {"update", "mean of 3 clusters", "example of 12 tokens"}
    for row in sound:
        # The bounds hold with 95 %, so that one row in twenty may lie; by this much none does in a lifetime.
        assert max(row["measured_plain"], row["measured_gaussian"]) < 1.15 * row["accountant"], row
        assert row["exact"] <= row["accountant"]
        # And the attack is no straw man; with so few trials it has found 0.59 of what there is.
        assert row["measured_gaussian"] > 0.4 * row["exact"] and row["measured_plain"] > 0.05 * row["exact"], row


def test_noise_that_is_less_than_promised_is_found_out(rows):
    broken = [row for row in rows if row["broken"]]
    assert broken and all(row["measured_gaussian"] > 1.15 * row["accountant"] for row in broken), broken


def test_the_accountants_entry_is_that_of_the_canary(rows):
    row = next(row for row in rows if row["mechanism"] == "example of 12 tokens")
    assert row["accountant"] == epsilon(row["noise"] / 2 / (12 * row["releases"]) ** 0.5, 1e-5)
