"""Power control of a planned round: Algorithm 3's convex programs, held against the certified optimum.

The certified planner finds the powers of a round by bisection. Here the programs of
``joint_power`` find them once more, on the planned channels and segments. The round uses theirs,
unless they cost more than the certificate allows: then it keeps the exact ones and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from strategies.dssda.answer import Answer
from strategies.dssda.evaluation import score
from strategies.dssda.instance import Instance
from strategies.dssda.paper.joint_power import solve_joint_powers

POWER_CONTROLS = ("sca", "exact")
MOST_GAP = 1e-6
"""Relative cost above the certified bound, of the plan and its powers together."""


def check_power_control(name: str, key: str = "power_control") -> None:
    """Refuse what is no way to find powers; ``key`` names the setting.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in POWER_CONTROLS:
        raise ValueError(f"{key}: expected one of {', '.join(POWER_CONTROLS)}, found {name!r}")


@dataclass(frozen=True, kw_only=True)
class ControlledPower:
    """One control unit's power, both ways."""

    cluster: int
    channel: int
    sca_w: float
    exact_w: float


@dataclass(frozen=True, kw_only=True)
class PowerControl:
    """Origin of a round's powers."""

    used: Literal["sca", "exact"]
    """Method whose powers the round uses."""
    iterations: int
    """Convex programs solved."""
    residual: float
    """See :class:`strategies.dssda.paper.joint_power.JointPowers`."""
    status: str
    """``converged``, ``stopped`` or ``failed``."""
    gap: float
    """The round's cost with the programs' powers above that with the exact ones, relative to it."""
    clusters: tuple[ControlledPower, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"clusters": [asdict(c) for c in self.clusters]}

    def text(self) -> str:
        """One line for people."""
        programs = f"{self.iterations} convex program{'s' if self.iterations != 1 else ''} ({self.status})"
        numbers = f"{programs}, residual {self.residual:.1e}, {self.gap:.1e} above the exact powers"
        return f"powers by SCA: {numbers}" if self.used == "sca" else f"exact powers instead of SCA's: {numbers}"


def control_power(instance: Instance, answer: Answer) -> tuple[Answer, PowerControl | None]:
    """Find the powers of a planned round by convex programs.

    Parameters
    ----------
    instance : the round's problem
    answer : its plan with exact powers; segments and channels stay

    Returns
    -------
    The answer with the powers that the round uses, and how they were found; None if no cluster is matched.
    """
    matches = [part.match for part in answer.clusters]
    if not any(matches) or answer.objective is None:
        return answer, None
    solution = solve_joint_powers(instance, matches)
    powers = iter(solution.power_w)
    changed = [None if match is None else replace(match, power_w=next(powers)) for match in matches]
    scored = score(instance, changed, answer.status)
    assert scored.objective is not None
    gap = (scored.objective - answer.objective) / max(abs(answer.objective), 1e-12)
    # The gap of a certified plan counts: both together stay within what such a plan may have.
    left = MOST_GAP - (answer.gap or 0.0) if answer.status == "optimal" else MOST_GAP
    within = gap <= max(left, 0.0)
    control = PowerControl(
        used="sca" if within else "exact",
        iterations=solution.iterations,
        residual=solution.residual,
        status=solution.status,
        gap=gap,
        clusters=tuple(
            ControlledPower(cluster=n, channel=exact.channel, sca_w=program.power_w, exact_w=exact.power_w)
            for n, (exact, program) in enumerate(zip(matches, changed, strict=True))
            if exact is not None and program is not None
        ),
    )
    if not within:
        return answer, control
    clusters = tuple(
        replace(new, band_hz=old.band_hz) if new.selected else old
        for new, old in zip(scored.clusters, answer.clusters, strict=True)
    )
    bound = answer.lower_bound if answer.lower_bound is None else min(answer.lower_bound, scored.objective)
    return replace(scored, clusters=clusters, lower_bound=bound, infeasible=answer.infeasible), control


def control_summary(controls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the uses of the convex programs' powers, under ``power_control``; empty without any such round.

    Parameters
    ----------
    controls : of each round, as JSON values
    """
    if not controls:
        return {}
    return {
        "power_control": {
            "rounds": len(controls),
            "sca": sum(control["used"] == "sca" for control in controls),
            "programs": sum(int(control["iterations"]) for control in controls),
            "largest_gap": max(float(control["gap"]) for control in controls),
            "largest_residual": max(float(control["residual"]) for control in controls),
        }
    }


def control_text(summary: Mapping[str, Any]) -> str:
    """One line for people of what :func:`control_summary` says."""
    return (
        f"powers by SCA in {summary['sca']} of {summary['rounds']} rounds, exact ones in the others: "
        f"{summary['programs']} convex programs, at most {summary['largest_gap']:.1e} above the exact powers"
    )
