"""The queues that tie the rounds together."""

import json

import numpy as np
import pytest

from strategies.dssda.convergence import BoundParameters
from strategies.dssda.queues import Queues, drift_weights

PARAMETERS = BoundParameters(g0=0.5, phi=2.0)


def test_the_virtual_queue_grows_by_what_the_bound_exceeds_and_never_falls_below_zero():
    queues = Queues.empty(2).after_round(np.array([3.0, 1.0]), 2.0, np.zeros(2), None)
    assert queues.virtual.tolist() == [1.0, 0.0]
    assert queues.after_round(np.array([1.5, 2.5]), 2.0, np.zeros(2), None).virtual.tolist() == [0.5, 0.5]


def test_the_queue_bounds_by_how_much_the_mean_of_gamma_exceeds_the_threshold():
    """C10: mean Gamma <= Gamma_max + Y_T / T, whatever the rounds brought."""
    gammas, queues = np.random.default_rng(3).uniform(0.0, 4.0, (50, 3)), Queues.empty(3)
    for gamma in gammas:
        queues = queues.after_round(gamma, 1.9, np.zeros(3), None)
    assert queues.virtual.max() > 0
    assert np.all(gammas.mean(axis=0) <= 1.9 + queues.virtual / 50 + 1e-12)


def test_the_energy_queue_is_off_without_a_budget():
    spent = np.array([5.0, 1.0])
    assert Queues.empty(2).after_round(np.zeros(2), 1.0, spent, None).energy.tolist() == [0.0, 0.0]
    assert Queues.empty(2).after_round(np.zeros(2), 1.0, spent, np.full(2, 2.0)).energy.tolist() == [3.0, 0.0]


def test_queues_survive_json_exactly():
    queues = Queues(np.array([0.1 + 0.2, 1e-17]), np.array([1 / 3, 0.0]))
    read = Queues.from_dict(json.loads(json.dumps(queues.to_dict())))
    assert read.virtual.tolist() == queues.virtual.tolist()
    assert read.energy.tolist() == queues.energy.tolist()


def test_the_true_drift_weighs_the_bound_and_the_printed_one_the_power():
    queues, silent = Queues(np.array([2.0]), np.array([3.0])), np.array([0.7])
    true = drift_weights(queues, PARAMETERS, 4, silent)
    assert [float(w[0]) for w in true] == [0.0, 2 * 0.5 * 4 / 4, 2 * 0.5, 0.0, 3.0, 2 * 0.5 * 0.7]
    # Eq. (32): Y (S + p), and nothing else.
    printed = drift_weights(queues, PARAMETERS, 4, silent, "printed")
    assert [float(w[0]) for w in printed] == [2.0, 0.0, 0.0, 2.0, 3.0, 0.0]
    mixed = drift_weights(queues, PARAMETERS, 4, silent, "mixed")
    assert [float(w[0]) for w in mixed] == [0.0, 1.0, 0.0, 2.0, 3.0, 0.7]
    with pytest.raises(ValueError, match="drift: expected one of true, printed, mixed, found 'other'"):
        drift_weights(queues, PARAMETERS, 4, silent, "other")


@pytest.mark.parametrize("drift", ["true", "printed"])
def test_the_printed_drift_lowers_the_power_of_a_long_queue_and_diverges(drift):
    """One control unit over a fading channel that chooses its power alone, by a fine grid."""
    v, gamma_max, scale, interference = 0.01, 1.7, 0.2, 0.07
    power, gains = np.linspace(1e-3, 0.5, 2000), 0.2 + 0.8 * np.random.default_rng(0).exponential(1.0, 120)
    parameters, queues, lengths = BoundParameters(g0=1.0, phi=1.0), Queues.empty(1), []
    for gain in gains:
        seconds = 19e6 / (0.5e6 * np.log2(1 + power * gain / interference))
        weights = drift_weights(queues, parameters, 12, np.array([scale / interference]), drift)
        distortion = scale / (power * gain + interference)
        best = np.argmin(v * seconds + weights.wP[0] * power + weights.wG[0] * distortion)
        queues = queues.after_round(np.array([1 + distortion[best]]), gamma_max, np.zeros(1), None)
        lengths.append(float(queues.virtual[0]))
    if drift == "true":
        assert max(lengths) < 5
    else:
        assert lengths[-1] > 50 and lengths[-1] - lengths[59] > 20
