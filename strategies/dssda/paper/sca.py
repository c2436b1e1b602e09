"""The paper's power solver of one control unit: Dinkelbach and successive convex approximation, Algorithm 3.

Minimise V D_t / R(p) + wP p + wE E_up(p) + wG eps(p) under C6 and C8. It arrives at a stationary point; as there is
only one (:mod:`strategies.dssda.power`), that is the optimum which bisection finds at once. ``dssda-paper`` uses it to
follow the paper's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from strategies.dssda.answer import Infeasibility
from strategies.dssda.instance import Instance
from strategies.dssda.power import Uplinks, power_interval, uplink_of


class PowerSolution(NamedTuple):
    """Result of the iterations."""

    power_w: float
    objective: float
    """Its V t_up + wP p + wE E_up + wG eps."""
    iterations: int
    """Convex problems solved."""
    residual: float
    """Fall that the slope promises on the way to the last convex problem's optimum, as a share of the cost."""
    status: Literal["converged", "stopped", "failed"]
    """``stopped``: the limit of iterations came first; ``failed``: the convex solver gave up, at this power."""


def solve_power(
    instance: Instance,
    cluster: int,
    channel: int,
    *,
    latency_weight: float,
    m: int | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 100,
) -> PowerSolution | Infeasibility:
    """Power of one control unit on one channel by Algorithm 3.

    Parameters
    ----------
    latency_weight : cost of a second of upload time, V [1/s]
    m : micro-batches, where the bits of the upload depend on them
    tolerance : residual at which the power counts as stationary
    max_iterations : convex problems to solve at most
    """
    # C8 is an interval, found by bisection. (43) and (44) are called inner approximations of it, but are outer ones:
    # (43) broke C8 on its first step in every case tried.
    interval = power_interval(instance, cluster, channel)
    if isinstance(interval, Infeasibility):
        return interval
    low, high = interval
    uplink = uplink_of(instance, cluster, channel, m)

    def objective(power: float) -> float:
        x = np.asarray(np.log1p(power / uplink.noise_gain))
        return float((latency_weight * uplink.seconds(x) if latency_weight else 0.0) + uplink.cost(x))

    # Step 1: start from the largest power allowed.
    power, value, residual = high, objective(high), np.inf
    for iteration in range(1, max_iterations + 1):
        # Steps 2 and 3: the parameter of the ratio and the tangent of E_up at this power, then the convex problem.
        target = _convex_step(uplink, power, low, high, latency_weight)
        if target is None:
            return PowerSolution(power, value, iteration, residual, "failed")
        promise = max(_slope(uplink, power, latency_weight) * (power - target), 0.0)
        residual = promise / max(abs(value), 1e-12)
        # Step 4: stop at a stationary power.
        if residual <= tolerance:
            return PowerSolution(power, value, iteration, residual, "converged")
        # The paper takes the full step. -lambda R lies below V D / R, so a full step may overshoot and the powers swing
        # for ever: halve it until the cost falls by a share of what the slope promises.
        step = 1.0
        # Rounding must not take the power below its interval.
        while objective(trial := max(power + step * (target - power), low)) > value - 0.1 * step * promise:
            step /= 2
        power, value = trial, objective(trial)
    return PowerSolution(power, value, max_iterations, residual, "stopped")


def _slope(uplink: Uplinks, power: float, latency_weight: float) -> float:
    """Derivative of the whole cost by the power [1/W]."""
    x = np.asarray(np.log1p(power / uplink.noise_gain))
    dx_dp = 1.0 / (uplink.noise_gain + power)
    return float((uplink.slope(x) - _rate_weight(uplink, float(x), latency_weight)) * dx_dp)


def _rate_weight(uplink: Uplinks, x: float, latency_weight: float) -> float:
    """The weight lambda of the rate, in units of x [nat/s/Hz].

    Stationarity needs lambda = V D / R^2, where (42) leaves it undefined. With the value of the ratio itself, V D / R
    as Dinkelbach has it, the answer is always the largest power.
    """
    return latency_weight * float(uplink.k) / x**2 if latency_weight * uplink.k > 0 else 0.0


def _convex_step(uplink: Uplinks, power: float, low: float, high: float, latency_weight: float) -> float | None:
    """Optimum of the convex problem around a power: min -lambda R(p) + wP p + wE E_up'(p_i) p + wG eps(p).

    None if the solver gives up.
    """
    x = float(np.log1p(power / uplink.noise_gain))
    sinr = high / float(uplink.noise_gain)
    rate_weight = _rate_weight(uplink, x, latency_weight)
    # E_up is concave: its tangent lies above it, an inner approximation.
    per_watt = uplink.wP + uplink.wE * uplink.energy_slope(np.asarray(x)) / (uplink.noise_gain + power)
    total_power = float(uplink.alpha) * sinr + float(uplink.beta)
    distortion_weight = float(uplink.wG * uplink.scale) / total_power
    weights = np.array([rate_weight, float(per_watt) * high, distortion_weight])
    if not np.any(weights):
        return power
    weights /= np.max(weights)
    # A term without weight is made constant, for the solver wants every variable to matter.
    share = _convex_problem().solve(
        least=low / high,
        sinr=sinr if rate_weight else 0.0,
        rate_weight=weights[0] if rate_weight else 1.0,
        power_weight=weights[1],
        distortion_weight=weights[2] if distortion_weight else 1.0,
        signal=float(uplink.alpha) * sinr / total_power if distortion_weight else 0.0,
        interference=float(uplink.beta) / total_power if distortion_weight else 1.0,
    )
    return None if share is None else float(np.clip(share * high, low, high))


def solve_program(problem: Any, parameters: Mapping[str, Any], values: Mapping[str, Any], **options: Any) -> bool:
    """Set a compiled problem's parameters and solve it with Clarabel; False if the solver gives up."""
    import cvxpy as cp

    for name, value in values.items():
        parameters[name].value = value
    try:
        problem.solve(solver=cp.CLARABEL, **options)
    except cp.error.SolverError:
        return False
    return True


class _ConvexProblem:
    """The convex problem in y = p / (largest power), compiled once: its parameters keep the rules of DPP."""

    def __init__(self) -> None:
        import cvxpy as cp  # takes over a second

        names = ("least", "sinr", "rate_weight", "power_weight", "distortion_weight", "signal", "interference")
        p: dict[str, Any] = {name: cp.Parameter(nonneg=True) for name in names}
        y, rate, distortion = cp.Variable(), cp.Variable(), cp.Variable()
        self._parameters, self._share = p, y
        self._problem = cp.Problem(
            cp.Minimize(-p["rate_weight"] * rate + p["power_weight"] * y + p["distortion_weight"] * distortion),
            [
                rate <= cp.log1p(p["sinr"] * y),
                distortion >= cp.inv_pos(p["signal"] * y + p["interference"]),
                y >= p["least"],
                y <= 1.0,
            ],
        )

    def solve(self, **values: float) -> float | None:
        """The y of least cost; None if the solver gives up, once in thousands of problems."""
        solved = solve_program(self._problem, self._parameters, values)
        return float(self._share.value) if solved and self._share.value is not None else None


@cache
def _convex_problem() -> _ConvexProblem:
    return _ConvexProblem()
