"""Power control of a planned round by successive convex approximation, where an energy queue makes it non-convex.

The certified planner finds each power on a line, globally. With an energy queue the cost Z E_up(p) is a difference of
convex functions, which the paper's Algorithm 3 meets by SCA (CVXPY). Here SCA runs on the planned channels, between the
least power that keeps the round's latency and the most that C6 and C8 allow; the gap says how far it ends from the
planner's power.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from strategies.dssda.answer import Answer, Infeasibility
from strategies.dssda.evaluation import Match, power_cost, score
from strategies.dssda.instance import Instance
from strategies.dssda.power import cheapest_power, least_power_for_time
from strategies.dssda.sca import solve_power


@dataclass(frozen=True, kw_only=True)
class PowerControl:
    """One control unit's power."""

    cluster: int
    channel: int
    power_w: float
    iterations: int
    """Convex problems solved."""
    residual: float
    """See :class:`strategies.dssda.sca.PowerSolution`."""
    status: str
    """``converged``, ``stopped`` or ``failed``."""
    optimum_w: float
    """Power of least cost by a global search on the line."""
    gap: float
    """Cost above that of ``optimum_w``, relative to it."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def control_power(instance: Instance, answer: Answer) -> tuple[Answer, list[PowerControl]]:
    """Find the powers of a planned round by SCA.

    Parameters
    ----------
    instance : the round's problem
    answer : its plan; segments, channels and the round's latency stay

    Returns
    -------
    The answer with these powers, never dearer than before; and how each was found.
    """
    matches: list[Match | None] = []
    controls: list[PowerControl] = []
    for n, part in enumerate(answer.clusters):
        c = part.choice
        if not part.selected or c is None or part.channel is None or part.power_w is None:
            matches.append(None)
            continue
        power = part.power_w
        solved = _solve(instance, answer, n, part.channel, c.pipeline_s, power)
        if solved is not None:
            controls.append(solved)
            costs = [power_cost(instance, n, part.channel, p) for p in (solved.power_w, power)]
            power = solved.power_w if solved.status != "failed" and costs[0] <= costs[1] * (1 + 1e-9) else power
        matches.append(Match(c, part.channel, power))
    if not controls:
        return answer, []
    scored = score(instance, matches, answer.status, float("-inf"))
    clusters = tuple(new if new.selected else old for new, old in zip(scored.clusters, answer.clusters, strict=True))
    bound = answer.lower_bound
    if bound is not None and scored.objective is not None:
        bound = min(bound, scored.objective)
    return replace(scored, clusters=clusters, lower_bound=bound, infeasible=answer.infeasible), controls


def _solve(
    instance: Instance, answer: Answer, n: int, channel: int, pipeline_s: float, planned_w: float
) -> PowerControl | None:
    assert answer.latency_s is not None
    # The latency is the round's and shared: a power below this one would make it longer. The planned one keeps it.
    seconds = answer.latency_s - instance.steps * pipeline_s
    least = min(least_power_for_time(instance, n, channel, seconds), planned_w)
    solution = solve_power(instance, n, channel, latency_weight=0.0)
    optimum = cheapest_power(instance, n, channel, latency_weight=0.0)
    if isinstance(solution, Infeasibility) or isinstance(optimum, Infeasibility):
        return None
    # The cost has one stationary point: cut off by the deadline, the nearest allowed power is the best one.
    power, optimum = max(solution.power_w, least), max(optimum, least)
    costs: Sequence[float] = [power_cost(instance, n, channel, p) for p in (power, optimum)]
    return PowerControl(
        cluster=n,
        channel=channel,
        power_w=power,
        iterations=solution.iterations,
        residual=float(solution.residual),
        status=solution.status,
        optimum_w=optimum,
        gap=(costs[0] - costs[1]) / max(abs(costs[1]), 1e-12),
    )
