"""Schedules and token slices that a cluster's pipeline may have, as a configuration or a command names them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from client_pipeline.partition.plan import MOST_TOKEN_SLICES, ClusterPlan
from client_pipeline.timetable.schedules import schedules_of

AUTO_SLICES = (1, 2, 4, 8)
"""Numbers of token slices that the event simulator chooses from."""


@dataclass(frozen=True)
class PipelineChoices:
    """Schedules and token slices to choose from."""

    schedules: tuple[str, ...] = ()
    """Empty: the plan's own."""
    token_slices: tuple[int, ...] = ()
    """Numbers of token slices; empty: the plan's own."""

    @classmethod
    def of(cls, schedule: str = "", token_slices: int = 1, table: str = "planner.") -> PipelineChoices:
        """Read ``schedule`` and ``token-slices`` of a table, or of options.

        Raises
        ------
        ValueError
            For an unknown schedule, or a number out of range.
        """
        if token_slices < 0 or token_slices > MOST_TOKEN_SLICES:
            raise ValueError(
                f"{table}token-slices: expected 0, for the event simulator's choice, to {MOST_TOKEN_SLICES}, found "
                f"{token_slices}"
            )
        numbers = AUTO_SLICES if token_slices == 0 else () if token_slices == 1 else (token_slices,)
        return cls(schedules_of(schedule, f"{table}schedule") if schedule else (), numbers)

    @property
    def any(self) -> bool:
        """True if there is anything to choose."""
        return bool(self.schedules or self.token_slices)

    @property
    def only_gpipe(self) -> bool:
        """True if a plan fits under these choices exactly when it fits under GPipe."""
        return set(self.schedules) <= {"gpipe"} and (not self.token_slices or 1 in self.token_slices)

    def plans(self, plan: ClusterPlan) -> list[ClusterPlan]:
        """Return a plan with every schedule and number of slices to choose from."""
        return [
            replace(plan, schedule=schedule, token_slices=slices)
            for slices in self.token_slices or (plan.token_slices,)
            for schedule in self.schedules or (plan.schedule,)
        ]
