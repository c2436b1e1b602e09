"""Who chooses the plan of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from client_pipeline.partition.plan import ClusterPlan, read_plans, uniform_plan
from strategies.clusters import ClusterState

POLICIES = ("uniform", "fixed")


@dataclass(frozen=True, kw_only=True)
class RoundProblem:
    """What a policy decides on."""

    round: int
    num_blocks: int
    """L."""
    batch_size: int
    """b."""
    clusters: Sequence[ClusterState]
    """In the order of their indices."""


class Policy(Protocol):
    """Chooses each cluster's plan."""

    name: str

    def plan(self, problem: RoundProblem) -> list[ClusterPlan]:
        """Return one plan for each cluster of the problem, checked.

        Raises
        ------
        ValueError
            If a cluster has no plan; the message names the cluster and the constraint.
        """
        ...


class UniformPolicy:
    """Even segments on the fastest devices, m = min(8, b): CollaPipe without segment scheduling."""

    name = "uniform"

    def plan(self, problem: RoundProblem) -> list[ClusterPlan]:
        """Plan each cluster by :func:`client_pipeline.partition.plan.uniform_plan`."""
        return [
            uniform_plan(
                speed=state.speeds,
                memory=state.memories,
                block_memory=state.block_memory,
                num_blocks=problem.num_blocks,
                batch_size=problem.batch_size,
            )
            for state in problem.clusters
        ]


class FixedPolicy:
    """The plans of a plan file, every round."""

    name = "fixed"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plans = read_plans(path)

    def plan(self, problem: RoundProblem) -> list[ClusterPlan]:
        """Check the file's plans against the clusters and return them."""
        chosen = []
        for state in problem.clusters:
            if state.cluster >= len(self.plans):
                raise ValueError(
                    f"{self.path}: has plans for {len(self.plans)} clusters, expected one for cluster {state.cluster}"
                )
            plan = self.plans[state.cluster]
            plan.check(
                num_blocks=problem.num_blocks,
                batch_size=problem.batch_size,
                num_devices=len(state.devices),
                memory=state.memories,
                block_memory=state.block_memory,
                where=f"{self.path}: clusters[{state.cluster}]",
            )
            chosen.append(plan)
        return chosen


def make_policy(name: str, plan_file: str) -> Policy:
    """Return the policy of that name; a plan file always means ``fixed``.

    Raises
    ------
    ValueError, FileNotFoundError
        For an unknown name, or ``fixed`` without a plan file.
    """
    if plan_file:
        return FixedPolicy(Path(plan_file))
    if name == "uniform":
        return UniformPolicy()
    if name == "fixed":
        raise ValueError("policy: fixed needs a plan file; set plan to its path")
    raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, found {name!r}")
