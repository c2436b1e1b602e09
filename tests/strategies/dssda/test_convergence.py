"""The convergence bound: its formulas, and that it holds on a problem whose gradients are known."""

import numpy as np
import pytest

from strategies.dssda.convergence import (
    BoundParameters,
    bound_scale,
    check_step_size,
    convergence_bound,
    gamma,
    gamma_unmatched,
    gradient_error,
    segment_error,
)


def test_gamma_is_the_printed_sum():
    parameters = BoundParameters(g0=0.5, phi=2.0)
    assert float(gamma(3, 12, 0.4, parameters)) == pytest.approx(0.5 * (4 * 9 / 12 + 0.4 + 4))
    assert float(gamma_unmatched(2.5, parameters)) == pytest.approx(0.5 * (4 + 2.5))
    assert segment_error(np.array([1, 2, 4]), 4, 1.0).tolist() == [0.25, 1.0, 4.0]
    assert bound_scale(4.0, 0.1, 5) == pytest.approx(4 * 0.01 / 10)


def test_a_step_size_outside_theorem_1_is_refused():
    check_step_size(0.5, 2.0)
    with pytest.raises(ValueError, match=r"step size 0.6: expected 0 < eta <= 1 / beta = 0.5"):
        check_step_size(0.6, 2.0)
    with pytest.raises(ValueError, match="step size 0"):
        check_step_size(0.0, 2.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_bound_holds_for_noisy_descent_on_a_random_quadratic(share):
    generator = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(generator.normal(size=(4, 4)))
    hessian = rotation @ np.diag([*generator.uniform(0.1, 2.0, 3), 2.0]) @ rotation.T
    smoothness, num_clusters, num_rounds, phi, distortion = 2.0, 3, 50, 0.6, 0.3
    step_size = share / smoothness
    sizes = generator.integers(1, 5, (num_rounds, num_clusters))
    error = gradient_error(sizes, 6, distortion, phi)
    parameters = BoundParameters(g0=bound_scale(smoothness, step_size, num_clusters), phi=phi)
    runs, start = 400, np.full(4, 2.0)
    w, squares = np.tile(start, (runs, 1)), []
    for number in range(num_rounds):
        gradient = w @ hessian
        squares.append(np.mean(np.sum(gradient**2, axis=1)))
        # Each cluster's error spends all of its allowance.
        noise = generator.normal(size=(runs, num_clusters, 4)) * np.sqrt(error[number] / 4)[:, None]
        w = w - step_size * (gradient + noise.mean(axis=1))
    initial = 0.5 * float(start @ hessian @ start)
    assert np.mean(squares) <= convergence_bound(
        initial, step_size, smoothness, gamma(sizes, 6, distortion, parameters)
    )
