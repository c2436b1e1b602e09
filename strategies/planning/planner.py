"""Planning round after round: the network changes, the policy decides, the queues remember."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.channels import NetworkState, NetworkTrace
from client_pipeline.system.devices import DeviceProfile
from client_pipeline.system.radio import Array, upload_energy, upload_time
from client_pipeline.system.scenario import Scenario
from strategies.dssda.answer import Answer, ClusterAnswer, Infeasibility
from strategies.dssda.instance import Instance
from strategies.dssda.paper.power_control import PowerControl, check_power_control, control_power
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import per_round_bound, round_bound, round_instance
from strategies.dssda.split_band import divided
from strategies.dssda.unequal_tebs import counted_tebs
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.planning.adaptation import Adaptation, SettledPolicy
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.planning.policy import Round, RoundPolicy, answer_for_all
from strategies.planning.schedule_choice import ScheduledPolicy, scheduled_plans, simulated_seconds

_OF_DEVICES = ("C1", "C2", "C7", "C9")
"""Constraints that more devices may meet."""


class InfeasibleRound(RuntimeError):
    """Failure of a round in which no cluster has a plan; the message gives each one's reason."""

    def __init__(self, number: int, left_out: Mapping[int, str]) -> None:
        reasons = "; ".join(f"cluster {n}: {reason}" for n, reason in sorted(left_out.items()))
        super().__init__(f"round {number}: no cluster can train: {reasons or 'the plan selects none'}")
        self.number, self.left_out = number, dict(left_out)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Plan of a round, with the data that it was made from."""

    number: int
    """Round number, from 1."""
    network: NetworkState
    instance: Instance
    declared: Instance
    """The same problem as the scenario declares it; ``instance`` itself where nothing is measured."""
    answer: Answer
    plans: list[ClusterPlan]
    """Plans of all clusters, (N,)."""
    queues: Queues
    """Queues that the plan was made with."""
    left_out: dict[int, str]
    """Reasons of the clusters that could not be planned."""
    power_control: PowerControl | None
    """Result of the convex programs for the powers; None where the policy's own powers stand."""
    teb_costs: str = ""
    """How the plan counts TEBs that cost differently, in words; empty: they cost the same."""

    def declared_upload_s(self, cluster: int) -> float | None:
        """Return the time of a cluster's upload as the scenario declares it; None if it has no channel [s]."""
        part = self.answer.clusters[cluster]
        if part.channel is None or part.power_w is None:
            return None
        rate = self.declared.uplink_rate(cluster, part.power_w, part.channel)
        return float(upload_time(self.declared.upload_bits(cluster, self.plans[cluster].m), rate))

    def as_declared(self) -> Decision:
        """Return the same decision with the time and energy of uploads as the scenario declares them."""
        if self.declared is self.instance:
            return self
        parts = list(self.answer.clusters)
        for n, part in enumerate(parts):
            if part.channel is not None and part.power_w is not None:
                rate = self.declared.uplink_rate(n, part.power_w, part.channel)
                energy_j = float(upload_energy(self.declared.clusters[n].up.e_bits, part.power_w, rate))
                parts[n] = replace(part, uplink_s=self.declared_upload_s(n), uplink_energy_j=energy_j)
        return replace(self, instance=self.declared, answer=replace(self.answer, clusters=tuple(parts)))

    @property
    def selected(self) -> list[bool]:
        """True for clusters that train, (N,)."""
        return [c.selected for c in self.answer.clusters]


class RoundPlanner:
    """Planner of a run's rounds, one after the other.

    Parameters
    ----------
    scenario : the network; its seed gives every policy the same rounds
    policy : decides
    drift : ``true``; or ``printed``, for ``dssda-paper`` alone
    power_control : ``sca``: convex programs find the powers, where a policy ``controls_power``; ``exact``: its own
    adaptation : the measured times that it plans by; None: it plans by the scenario
    schedule : of the clusters' pipelines; ``auto``: the event simulator's choice, cluster by cluster; empty: as the
        policy's plans say
    token_slices : of each micro-batch; 0: the event simulator's choice, likewise; 1: as the policy's plans say

    Raises
    ------
    ValueError
        For token slices where the costs are measured.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: RoundPolicy,
        *,
        drift: str = "true",
        power_control: str = "sca",
        adaptation: Adaptation | None = None,
        schedule: str = "",
        token_slices: int = 1,
    ) -> None:
        check_power_control(power_control)
        self.scenario, self.policy, self.drift = scenario, policy, drift
        self._by_programs = power_control == "sca" and policy.controls_power
        self.adaptation = adaptation
        self._choices = PipelineChoices.of(schedule, token_slices)
        if token_slices != 1 and adaptation is not None:
            raise ValueError(
                f"planner.token-slices = {token_slices}: expected costs of scenario or model, found measured ones, "
                "which tell nothing of slices; set costs, or leave it at 1"
            )
        self.queues = Queues.empty(scenario.num_clusters)
        # A cluster without such a budget among others with one never fills its queue.
        budgets = [math.inf if u.mean_energy_j is None else u.mean_energy_j for u in scenario.uplinks]
        self._mean_energy = np.array(budgets) if min(budgets) < math.inf else None

    def observe(self, devices: Sequence[tuple[DeviceProfile, ...]]) -> None:
        """Take the clusters' devices as their control units report them."""
        if tuple(devices) != self.scenario.clusters:
            self.scenario = replace(self.scenario, clusters=tuple(devices))

    def plan(self, number: int, losses: Sequence[float], absent: Mapping[int, str] | None = None) -> Decision:
        """Decide round ``number``.

        Parameters
        ----------
        number : from 1
        losses : last training loss of each cluster, infinite before its first, (N,)
        absent : clusters that cannot take part, with the reason

        Raises
        ------
        ValueError
            For a plan file that does not fit.
        """
        network = NetworkTrace(self.scenario).round(number)
        absent = absent or {}
        policy: RoundPolicy = self.policy
        memory = self.scenario.costs.memory
        if self.adaptation is None and (self._choices.any or (memory is not None and memory.recompute)):
            policy = ScheduledPolicy(policy, self._choices)
        declared = round_instance(self.scenario, network, self.queues, drift=self.drift)
        instance, teb_costs = counted_tebs(declared, self._equal_tebs_reason())
        round_ = Round(number=number, instance=instance, losses=losses, per_round=per_round_bound(self.scenario))
        if self.adaptation is not None:
            round_ = _measured(round_, self.adaptation.network, policy, absent)
            instance, policy = round_.instance, SettledPolicy(policy, self.adaptation)
        answer, left_out = plan_whom_it_fits(policy, round_, absent)
        is_declared, instance = instance is declared, divided(instance, answer)
        declared = instance if is_declared else divided(declared, answer)
        controlled: PowerControl | None = None
        if self._by_programs:
            answer, controlled = control_power(instance, answer)
        plans = self.policy.plans(round_, answer)
        if self.adaptation is not None:
            settled = self.adaptation.settled_plans
            plans = [
                replace(plan, order=settled[n].order) if n in settled and settled[n].delta == plan.delta else plan
                for n, plan in enumerate(plans)
            ]
        plans = self._scheduled(instance, answer, plans)
        if self.adaptation is not None:
            selected = {n: plans[n] for n, part in enumerate(answer.clusters) if part.selected}
            self.adaptation.predict(instance, selected)
        return Decision(
            number=number,
            network=network,
            instance=instance,
            declared=declared,
            answer=answer,
            plans=plans,
            queues=self.queues,
            left_out=left_out,
            power_control=controlled,
            teb_costs=teb_costs,
        )

    def _equal_tebs_reason(self) -> str:
        """Return why the planner counts each TEB as the costliest; empty: it need not."""
        if self.adaptation is not None:
            return "times are measured by devices, not by TEBs"
        return "" if self.policy.tells_tebs_apart else f"policy {self.policy.name} needs equal TEBs"

    def _scheduled(self, instance: Instance, answer: Answer, plans: list[ClusterPlan]) -> list[ClusterPlan]:
        """Decide schedules and token slices of the selected clusters."""
        if not self._choices.any:
            return plans
        seconds = simulated_seconds(instance)
        if (adaptation := self.adaptation) is not None:
            network = adaptation.network

            def seconds(n: int, plan: ClusterPlan) -> float:
                return network.predict(instance, n, plan).pipeline_s

        return scheduled_plans(instance, answer, plans, self._choices, seconds)

    def settle(self, decision: Decision, trained: Collection[int] | None = None) -> Array:
        """Update the queues once, with the round's actual bound and energy, Eq. (29).

        Parameters
        ----------
        decision : the round's
        trained : clusters that did train; all that were selected if None. One that failed counts as unmatched.

        Returns
        -------
        Gamma_n of each cluster, Eq. (28), (N,).
        """
        declared = decision.as_declared()
        parts = [
            c if trained is None or n in trained else ClusterAnswer(c.status, False)
            for n, c in enumerate(declared.answer.clusters)
        ]
        happened = replace(declared.answer, clusters=tuple(parts))
        gamma = round_bound(self.scenario, decision.network, declared.instance, happened)
        spent = np.array([(c.uplink_energy_j or 0.0) if c.selected else 0.0 for c in parts])
        self.queues = decision.queues.after_round(gamma, self.scenario.planner.threshold, spent, self._mean_energy)
        return gamma

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values.

        The network and the policies draw by round and seed alone, so they have no state.
        """
        adaptation = {} if self.adaptation is None else {"adaptation": self.adaptation.state()}
        return self.queues.to_dict() | adaptation

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.queues = Queues.from_dict(state)
        if self.adaptation is not None and "adaptation" in state:
            self.adaptation.restore(state["adaptation"])


def plan_whom_it_fits(
    policy: RoundPolicy, round_: Round, absent: Mapping[int, str] | None = None
) -> tuple[Answer, dict[int, str]]:
    """Plan; leave out clusters without any plan and plan again, until it is feasible or nobody is left.

    Parameters
    ----------
    policy : decides
    round_ : of all clusters
    absent : clusters that are left out from the start, with the reason

    Returns
    -------
    The answer, which keeps in ``infeasible`` why clusters were left out; and the reasons in words, by cluster.
    """
    instance, left_out = round_.instance, dict(absent or {})
    candidates = [n for n in range(instance.num_clusters) if n not in left_out]
    reasons: list[Infeasibility] = []
    while candidates:
        part = replace(
            round_,
            instance=replace(instance, clusters=tuple(instance.clusters[n] for n in candidates)),
            losses=[round_.losses[n] for n in candidates],
            indices=tuple(candidates),
            num_all=instance.num_clusters,
        )
        answer = policy.plan(part)
        _check_answer(policy, part, answer)
        for_all = (
            answer
            if len(candidates) == instance.num_clusters
            else answer_for_all(instance, answer, candidates, "infeasible")
        )
        if answer.status != "infeasible":
            return replace(for_all, infeasible=tuple(reasons)), left_out
        reasons += for_all.infeasible
        blamed = {i.cluster for i in for_all.infeasible if i.cluster is not None}
        for reason in for_all.infeasible:
            # A reason without a cluster ends the round for all; without the blamed clusters it may vanish.
            of_all = [] if blamed else candidates
            for n in of_all if reason.cluster is None else [reason.cluster]:
                left_out.setdefault(n, reason.reason)
        candidates = [n for n in candidates if n not in blamed] if blamed else []
    nobody = tuple(ClusterAnswer("infeasible", False, cost=c.skip) for c in instance.clusters)
    return Answer("infeasible", nobody, infeasible=tuple(reasons)), left_out


def _measured(declared: Round, network: MeasuredNetwork, policy: RoundPolicy, absent: Mapping[int, str]) -> Round:
    """Return a round with measured times; clusters without any other plan use their lost devices again."""
    round_ = replace(declared, instance=network.instance(declared.instance))
    if any(times.away for times in network.clusters):
        # A trial by the policy alone, which changes no cluster's plan.
        answer, _ = plan_whom_it_fits(policy, round_, absent)
        unfit = {reason.cluster for reason in answer.infeasible if reason.constraint in _OF_DEVICES}
        network.count_on_lost(n for n in unfit if n is not None)
        round_ = replace(declared, instance=network.instance(declared.instance))
    return round_


def _check_answer(policy: RoundPolicy, round_: Round, answer: Any) -> None:
    """Refuse an object that does not answer the round: a policy may be a user's class."""
    where, num_clusters = f"policy {policy.name}: round {round_.number}", round_.instance.num_clusters
    if not isinstance(answer, Answer) or len(answer.clusters) != num_clusters:
        raise ValueError(f"{where}: expected an Answer for {num_clusters} clusters, found {answer!r}")
    for cluster, part in zip(round_.indices, answer.clusters, strict=True):
        if part.selected and part.choice is None:
            raise ValueError(f"{where}: cluster {cluster} is selected without segments; give it a choice")
