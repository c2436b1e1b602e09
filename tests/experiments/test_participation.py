"""The experiment on unequal participation: which curves are compared, and what their rows say."""

import math

import pytest

from experiments import participation
from experiments.base.results import read_rows
from experiments.reproduce import ReproduceOptions, reproduce


def rows_of(curves, seeds=(4, 13, 21)):
    """Rows of curves, each with its seconds a round and the loss that it ends with."""
    return [
        {
            "curve": name,
            "label": name,
            "panel": "Dirichlet 0.1, 1 ε",
            "seed": seed,
            "round": number,
            "virtual_h": hours * number + seed / 1000,
            "loss": 2.0 - (2.0 - last) * number / 10,
            "accuracy": 50.0,
            "worst_accuracy": 40.0,
            "least_selected": 0.3,
        }
        for name, (hours, last) in curves.items()
        for seed in seeds
        for number in (5, 10)
    ]


CURVES = {
    "gamma-v0.1": (1.0, 1.0),
    "gamma-v1": (0.5, 1.2),
    "participation-v0.1": (0.6, 1.0),
    "participation-v1": (0.8, 1.0),
    "delay-only": (0.4, 1.4),
}


def test_the_time_to_a_loss_lies_between_two_scores():
    run = [row for row in rows_of({"gamma-v1": (1.0, 1.0)}, (0,))]
    assert participation.hours_until(run, 1.25) == pytest.approx(7.5)
    assert participation.hours_until(run, 1.9) == 5.0 and participation.hours_until(run, 0.9) == math.inf


def test_the_first_seed_chooses_each_bounds_v():
    rows = rows_of(CURVES)
    # At a loss of 1.2, which all V of a bound reach: 8 h against 5 h, and 4.8 h against 6.4 h.
    assert participation.chosen(rows) == ["participation-v0.1", "gamma-v1", "delay-only"]


def test_findings_are_of_the_other_seeds_and_say_who_never_gets_there():
    told = {finding.what: finding for finding in participation.findings(rows_of(CURVES))}
    assert told["participation-v0.1: virtual hours to the worst method's last loss"].ours == "3.62 ± 0.01"
    ours = told["participation-v0.1: virtual hours to the printed bound's last loss"]
    # 4.8 h against 5 h, with a seed's own shift in both.
    assert ours.ours == "4.82 ± 0.01" and ours.why.startswith("-0.20 h against the printed bound, -0.20 to -0.20")
    assert told["delay-only: virtual hours to the printed bound's last loss"].ours == "never"
    assert told["delay-only: last loss"].ours.startswith("1.400 ± 0.000 nat")
    assert participation.draw(rows_of(CURVES)).axes


@pytest.mark.slow
def test_it_is_told_again_from_its_rows(tmp_path):
    options = ReproduceOptions(out=tmp_path, smoke=True, only="v0.1")
    result = reproduce("participation", options, lambda text: None)["participation"]
    rows = read_rows(tmp_path / "participation")
    assert {row["curve"] for row in rows} == {"gamma-v0.1", "participation-v0.1"}
    assert {row["seed"] for row in rows} == {0, 1} and "gamma_segments" not in rows[0]
    assert len(result) == 6
