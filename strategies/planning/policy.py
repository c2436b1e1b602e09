"""Interface of a policy, which gets a round's problem and answers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from client_pipeline.partition.plan import ClusterPlan, whole_blocks
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility, SegmentChoice, Status
from strategies.dssda.instance import Instance
from strategies.dssda.per_round_bound import PerRoundBound
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import SegmentTable
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.planning.segment_rules import cluster_plans


@dataclass(frozen=True, kw_only=True)
class Round:
    """Problem that a policy decides."""

    number: int
    """Round number, from 1."""
    instance: Instance
    losses: Sequence[float]
    """Last known training loss of each cluster, (N,); infinite before its first."""
    per_round: PerRoundBound | None = None
    """C11 in the terms of this round's network; None where no scenario says what Gamma is."""
    indices: Sequence[int] = field(default=())
    """Number in the run of each cluster of the instance; all clusters if not given."""
    num_all: int = 0
    """Clusters of the run; the instance's if not given."""
    choices: PipelineChoices = PipelineChoices()
    """Schedules and token slices to choose from, for a policy with plans of its own."""

    def __post_init__(self) -> None:
        """Fill in what was not given."""
        if not self.indices:
            object.__setattr__(self, "indices", tuple(range(self.instance.num_clusters)))
        object.__setattr__(self, "num_all", self.num_all or self.instance.num_clusters)


class RoundPolicy(ABC):
    """Base class of policies, which decide a round.

    A decision must depend on the round and the policy's seed alone, because a resumed run makes a new policy.
    """

    name: str
    controls_power: bool = False
    """True if convex programs find the round's powers after the plan (``planner.power-control = "sca"``)."""

    tells_tebs_apart: bool = False
    """True if it can plan TEBs that cost differently: segments come with their order, and times from
    :meth:`Instance.loads`. For others each TEB costs as much as the costliest."""

    seeks_least_time: bool = False
    """True if its segments are those of least time: where times are measured, the event simulator may then improve
    them."""

    @classmethod
    def of_run(cls, seed: int) -> RoundPolicy:
        """Make the policy of a run with this seed, where ``policy`` names the class."""
        del seed
        return cls()

    @abstractmethod
    def plan(self, round_: Round) -> Answer:
        """Answer the round's problem.

        Raises
        ------
        ValueError
            For a plan file that does not fit the round.
        """

    def plans(self, round_: Round, answer: Answer) -> list[ClusterPlan]:
        """Return an answer as the plans that the clusters run, one for each cluster of the round."""
        return cluster_plans(round_.instance, answer)


def answer_for_all(
    instance: Instance, answer: Answer, planned_clusters: Sequence[int], status_of_others: Status
) -> Answer:
    """Return the answer of some clusters as one of all; the others pay for being skipped, in the bound as well.

    Parameters
    ----------
    instance : of all clusters
    answer : of the kept ones
    planned_clusters : their numbers in the instance, in order
    status_of_others : of the clusters that were not planned
    """
    others = [n for n in range(instance.num_clusters) if n not in planned_clusters]
    skipped = sum(instance.clusters[n].skip for n in others)
    parts = {n: ClusterAnswer(status_of_others, False, cost=instance.clusters[n].skip) for n in others}
    parts |= dict(zip(planned_clusters, answer.clusters, strict=True))
    return replace(
        answer,
        clusters=tuple(parts[n] for n in range(instance.num_clusters)),
        objective=None if answer.objective is None else answer.objective + skipped,
        lower_bound=None if answer.lower_bound is None else answer.lower_bound + skipped,
        infeasible=tuple(
            replace(i, cluster=None if i.cluster is None else planned_clusters[i.cluster]) for i in answer.infeasible
        ),
    )


def plan_with(instance: Instance, choices: Sequence[SegmentChoice | None]) -> Answer:
    """Plan channels and powers as ``dssda`` for given segments; the bound holds for these segments alone."""
    tables = [
        SegmentTable({c.num_segments: c} if c else {}, None if c else _does_not_fit(instance, n))
        for n, c in enumerate(choices)
    ]
    answer = plan_round(instance, tables=tables)
    return Answer(
        "feasible" if answer.status == "optimal" else answer.status,
        answer.clusters,
        answer.objective,
        None,
        answer.latency_s,
        answer.infeasible,
    )


def _does_not_fit(instance: Instance, n: int) -> Infeasibility:
    fits = sum(whole_blocks(memory, instance.gamma0, instance.L) for memory in instance.device_arrays(n).mem)
    return Infeasibility(n, "C7", instance.L, fits, "even segments do not fit; use more devices or more memory")
