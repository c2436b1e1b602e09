"""Algorithm 3's powers for all matched control units of a round at once, by convex programs (CVXPY).

Channels and segments are given. What is left of the round's problem is

    minimise  V T + sum_n (wP p_n + wE E_up(p_n) + wG eps(p_n))
    subject to  steps D_n + t_up,n(p_n) <= T,  C6, C8, eps_max.

Three departures from Algorithm 3. The ratio D_t / R(p) is convex in p, so the program carries it as it is and needs no
parameter of Dinkelbach, whose value (42) leaves undefined. One deadline T joins the clusters, as Eq. (26) has it,
instead of a maximum over the uploads alone. C8 is an interval of p (:mod:`strategies.dssda.power`), where its
linearisation (43) is an outer one. What is left to successive convex approximation is E_up, which is concave: its
tangent lies above it, so every program bounds the cost from above, and the cost falls from one to the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from client_pipeline.system.radio import Array
from strategies.dssda.answer import Match
from strategies.dssda.instance import Instance
from strategies.dssda.paper.sca import solve_program
from strategies.dssda.power import Uplinks

_NEARLY_NOTHING = 1e-12
"""Bits of an upload without any, as a share: the solver wants every variable to matter."""
_ACCURACY = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
"""Tolerances of Clarabel; where rounding allows no more, it takes its own reduced ones."""


class JointPowers(NamedTuple):
    """Result of the iterations."""

    power_w: tuple[float, ...]
    """Power of each matched cluster, in the order of their numbers [W]."""
    iterations: int
    """Convex programs solved."""
    residual: float
    """Between the last program's value and the true cost of its powers, as a share of the cost: the error of the
    tangents and of the solver; 1 before the first."""
    status: Literal["converged", "stopped", "failed"]
    """``stopped``: the limit of iterations came first; ``failed``: the convex solver gave up, at these powers."""


def solve_joint_powers(
    instance: Instance, matches: Sequence[Match | None], *, tolerance: float = 1e-9, max_iterations: int = 60
) -> JointPowers:
    """Powers of all matched clusters by successive convex programs.

    Parameters
    ----------
    matches : (N,), the decision, one cluster matched at least; its powers are not read
    tolerance : residual at which the powers count as stationary
    max_iterations : convex programs to solve at most

    Raises
    ------
    ValueError
        If a cluster is matched to a channel on which no power meets C6, C8 and eps_max.
    """
    uplinks = _MatchedUplinks(instance, matches)
    # From the largest powers allowed, as Algorithm 3.
    power, residual = uplinks.high, 1.0
    program = _joint_program(len(power))
    for iteration in range(1, max_iterations + 1):
        solution = program.solve(**uplinks.parameters(power))
        if solution is None:
            return JointPowers(tuple(power.tolist()), iteration, float(residual), "failed")
        tangents, power = uplinks.tangents(power), np.clip(solution.share * uplinks.high, uplinks.low, uplinks.high)
        residual = uplinks.residual(power, solution.deadline, tangents)
        # Without an energy term no tangent stands for anything: the first program is the problem itself.
        if residual <= tolerance or not np.any(uplinks.columns.wE):
            return JointPowers(tuple(uplinks.least_of_equal(power).tolist()), iteration, residual, "converged")
    return JointPowers(tuple(uplinks.least_of_equal(power).tolist()), max_iterations, residual, "stopped")


class _Tangents(NamedTuple):
    """Tangents of wE E_up at some powers, (M,) each."""

    value: Array
    slope: Array
    """[1/W]."""
    at_w: Array

    def __call__(self, power_w: Array) -> Array:
        return self.value + self.slope * (power_w - self.at_w)


class _MatchedUplinks:
    """The M matched control units on their channels."""

    def __init__(self, instance: Instance, matches: Sequence[Match | None]) -> None:
        matched = [(n, match) for n, match in enumerate(matches) if match is not None]
        rows = np.array([n for n, _ in matched], dtype=np.intp)
        channels = np.array([match.channel for _, match in matched], dtype=np.intp)
        micro_batches = [None if match is None else match.choice.m for match in matches]
        self.columns = Uplinks.of(instance, micro_batches).select(rows, channels)
        if not np.all(self.columns.feasible):
            n = int(rows[np.argmin(self.columns.feasible)])
            raise ValueError(
                f"cluster {n}: expected a channel on which some power meets C6, C8 and eps_max, found none"
            )
        self.low, self.high = self.columns.power(self.columns.low), self.columns.power(self.columns.high)
        self._weight = instance.V
        self._pipeline_s = instance.steps * np.array([match.choice.pipeline_s for _, match in matched])
        self._sinr = self.high / self.columns.noise_gain
        self._latest = self._latency(self.high)
        """Unit of the programs' time: the latency at the largest powers [s]."""
        terms = np.abs(self.columns.cost(self._x(self.high)))
        self._scale = max(self._weight * self._latest + float(np.sum(terms)), 1e-300)
        """Unit of the programs' cost."""

    def tangents(self, power_w: Array) -> _Tangents:
        """Return the tangents of the energy's cost at these powers."""
        u, x = self.columns, self._x(power_w)
        return _Tangents(u.wE * u.energy(x), u.wE * u.energy_slope(x) / (u.noise_gain + power_w), power_w)

    def least_of_equal(self, power_w: Array) -> Array:
        """The powers, but the least that keeps the latency where power costs nothing: a program may give any."""
        u = self.columns
        left = self._latency(power_w) - self._pipeline_s
        least = np.clip(u.power(np.clip(u.efficiency(left), u.low, u.high)), self.low, power_w)
        return np.where((u.wP == 0) & (u.wE == 0) & (u.wG * u.scale == 0), least, power_w)

    def residual(self, power_w: Array, deadline: float, tangents: _Tangents) -> float:
        """See :class:`JointPowers`; ``deadline`` is the program's, in its unit."""
        u, x = self.columns, self._x(power_w)
        late = self._weight * (deadline * self._latest - self._latency(power_w))
        above = float(np.sum(tangents(power_w) - u.wE * u.energy(x)))
        cost = self._weight * self._latency(power_w) + float(np.sum(u.cost(x)))
        return (abs(late) + abs(above)) / max(abs(cost), 1e-12)

    def parameters(self, power_w: Array) -> dict[str, Any]:
        """Return the parameters of the program around these powers, in its units."""
        u, count = self.columns, len(power_w)
        timed = self._weight > 0
        prices = (u.wP + self.tangents(power_w).slope) * self.high / self._scale
        total_power = u.alpha * self._sinr + u.beta
        distortion = np.where(u.wG * u.scale > 0, u.wG * u.scale / total_power / self._scale, 0.0)
        weighs = distortion > 0
        return {
            "deadline_weight": self._weight * self._latest / self._scale if timed else 1.0,
            "pipeline": self._pipeline_s / self._latest if timed else np.zeros(count),
            "upload": np.maximum(u.k / self._latest, _NEARLY_NOTHING) if timed else np.full(count, _NEARLY_NOTHING),
            "sinr": self._sinr,
            "least": self.low / self.high,
            "power_weights": prices,
            # A term without weight is made constant, for the solver wants every variable to matter.
            "distortion_weights": np.where(weighs, distortion, 1.0 / count),
            "signal": np.where(weighs, u.alpha * self._sinr / total_power, 0.0),
            "interference": np.where(weighs, u.beta / total_power, 1.0),
        }

    def _x(self, power_w: Array) -> Array:
        """Spectral efficiency [nat/s/Hz]."""
        return np.asarray(np.log1p(power_w / self.columns.noise_gain))

    def _latency(self, power_w: Array) -> float:
        return float(np.max(self._pipeline_s + self.columns.seconds(self._x(power_w))))


class _Optimum(NamedTuple):
    share: Array
    """Powers as shares of the largest, (M,)."""
    deadline: float


class _JointProgram:
    """The convex program of M control units, compiled once: its parameters keep the rules of DPP.

    In y_n = p_n / (largest power), x_n <= ln(1 + SINR_n), the distortion d_n and the deadline T.
    """

    def __init__(self, count: int) -> None:
        import cvxpy as cp  # takes over a second

        names = ("pipeline", "upload", "sinr", "least", "power_weights", "distortion_weights", "signal", "interference")
        p: dict[str, Any] = {name: cp.Parameter(count, nonneg=True) for name in names}
        p["deadline_weight"] = cp.Parameter(nonneg=True)
        y, x, d, deadline = cp.Variable(count), cp.Variable(count), cp.Variable(count), cp.Variable()
        self._parameters, self._share, self._deadline = p, y, deadline
        self._problem = cp.Problem(
            cp.Minimize(p["deadline_weight"] * deadline + p["power_weights"] @ y + p["distortion_weights"] @ d),
            [
                p["pipeline"] + cp.multiply(p["upload"], cp.inv_pos(x)) <= deadline,
                x <= cp.log1p(cp.multiply(p["sinr"], y)),
                d >= cp.inv_pos(cp.multiply(p["signal"], y) + p["interference"]),
                y >= p["least"],
                y <= 1.0,
            ],
        )

    def solve(self, **values: Any) -> _Optimum | None:
        """The optimum; None if the solver gives up."""
        with warnings.catch_warnings():
            # Of an accuracy that rounding does not allow; the residual tells it.
            warnings.simplefilter("ignore", UserWarning)
            # A warm start would make a round's powers depend on the rounds before it in this process.
            solved = solve_program(self._problem, self._parameters, values, warm_start=False, **_ACCURACY)
        if not solved or self._share.value is None or self._deadline.value is None:
            return None
        return _Optimum(np.asarray(self._share.value, dtype=np.float64), float(self._deadline.value))


@cache
def _joint_program(count: int) -> _JointProgram:
    return _JointProgram(count)
