"""Plans by measured times, changed only where that pays: a move of TEBs costs time, and estimates err.

A round's problem has the measured times. Where the new segments differ from those that a cluster has run, the
event simulator times both under the same estimates. The new ones are taken if they save more time in the next
:data:`HORIZON` rounds than moving the TEBs takes, and more than noise explains; else the old ones stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from client_pipeline.counted import counted
from client_pipeline.partition.plan import ClusterPlan
from strategies.dssda.answer import Answer, Match, SegmentChoice
from strategies.dssda.evaluation import exceeds, score
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, MOVE, SPOKEN
from strategies.estimation.measured_network import MeasuredNetwork, Prediction
from strategies.planning.policy import Round, RoundPolicy
from strategies.planning.refinement import refined_plan
from strategies.planning.segment_rules import choice_of

HORIZON = 10
"""Rounds in which a move of TEBs must pay."""
LEAST_GAIN, MOST_GAIN = 0.02, 0.04
"""Least relative gain of a step that is worth another plan: where the times are well known, and where they are not."""
_DEVIATIONS = 3.0
"""Standard deviations of the estimates that a gain must have beside the least one."""
_LOOK, _FIRST_LOOKS = 5, 6
"""Rounds between two searches for better segments where nothing was noticed; and first rounds that all search."""
UNSEEN = 30
"""Rounds without work after which a device gets one TEB for one round, to measure its present time."""
_FIRST_MOVE_S, _FIRST_BYTES_S = 1.0, 5e7
"""Assumed cost of a move before any was seen: seconds, and bytes in a second."""


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Plan change of a cluster, taken or declined."""

    cluster: int
    taken: bool
    reason: str
    """Cause of the change, and the ground for taking or declining it."""
    gain_s: float
    """Seconds of a round that it saves, as estimated."""
    move_s: float
    """Seconds that moving the TEBs takes, as estimated."""
    trial: bool = False
    """True if it is for one round alone, to measure a device."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dict(vars(self))


@dataclass(kw_only=True)
class _Standing:
    """Last plan of a cluster, and the changes noticed since it was made."""

    plan: ClusterPlan | None = None
    noticed: list[str] = field(default_factory=list)
    declined: str = ""
    """Segments that were last reported as not worth their move."""
    looked: int = 0
    """Last round, by the cluster's own count, that searched for better segments."""
    changed: bool = False
    """True if anything was noticed since."""
    before_trial: ClusterPlan | None = None
    """Plan to return to after the round under way."""

    def plans(self) -> dict[str, ClusterPlan | None]:
        """Return its plans by the names of their fields."""
        return {"plan": self.plan, "before_trial": self.before_trial}


class Adaptation:
    """A run's estimates, and the clusters' present plans.

    Parameters
    ----------
    network : the measured times
    """

    def __init__(self, network: MeasuredNetwork) -> None:
        self.network = network
        self.changes: list[PlanChange] = []
        """Plan changes of the round that was planned last."""
        self.predictions: dict[int, Prediction] = {}
        """Predictions for the clusters that this round selected."""
        self.settled_plans: dict[int, ClusterPlan] = {}
        """Segments, order and micro-batches of the clusters in the round that was planned last."""
        self.tries = True
        """False: no device gets TEBs only to be measured."""
        self._standings = [_Standing() for _ in network.clusters]

    def assume(self, plans: Mapping[int, ClusterPlan]) -> None:
        """Go on as if clusters had run plans in the times that are estimated."""
        for n, plan in plans.items():
            self._standings[n].plan = plan
            self.network.clusters[n].rounds += 1

    def observe(
        self, round_: int, cluster: int, report: Mapping[str, Any], declared: Instance, planned_upload_s: float | None
    ) -> None:
        """Learn from the report of a cluster that trained."""
        standing = self._standings[cluster]
        times = self.network.clusters[cluster]
        away = set(times.away)
        if cluster in self.predictions and not report["faults"]:
            predicted_s, measured_s = self.predictions[cluster].pipeline_s, self.network.pipeline_seconds(report)
            times.learn_model_error(predicted_s, measured_s)
        changes = self.network.observe(round_, cluster, report, declared, planned_upload_s)
        texts = [f"device {k} was lost" for k in sorted(times.away - away)]
        texts += [f"device {k} is back" for k in sorted(away - times.away)]
        texts += [str(c) for c in changes if c.kind in SPOKEN and abs(c.change.factor - 1) > LEAST_GAIN]
        standing.noticed = _newest(standing.noticed, texts)
        standing.changed = standing.changed or bool(changes) or bool(texts)
        ran, back, standing.before_trial = ClusterPlan.from_dict(dict(report["plan"])), standing.before_trial, None
        standing.plan = ran if back is None or texts else back
        standing.changed = standing.changed or back is not None

    def settle(self, instance: Instance, indices: tuple[int, ...], answer: Answer, refines: bool) -> Answer:
        """Return the answer with new segments where they pay, else with the clusters' present ones.

        Parameters
        ----------
        instance : measured, of the clusters that are planned
        indices : their numbers in the run
        answer : of the policy
        refines : whether the event simulator may improve the policy's segments
        """
        self.changes, self.settled_plans = [], {}
        matches: list[Match | None] = []
        for n, part in enumerate(answer.clusters):
            if (match := part.match) is not None:
                plan = self._settled(instance, n, indices[n], match.choice, refines)
                self.settled_plans[indices[n]] = plan
                if (plan.delta, plan.m) != (match.choice.delta, match.choice.m):
                    match = replace(match, choice=choice_of(instance, n, plan))
            matches.append(match)
        if all(m is None or m.choice is part.choice for m, part in zip(matches, answer.clusters, strict=True)):
            return answer
        return score(instance, matches, "feasible")

    def _settled(self, instance: Instance, n: int, cluster: int, proposed: SegmentChoice, refines: bool) -> ClusterPlan:
        standing, devices = self._standings[cluster], instance.device_arrays(n)
        old, network = standing.plan, self.network.of([cluster])
        single = replace(instance, clusters=(instance.clusters[n],))
        rounds, fits = network.clusters[0].rounds, old is not None and _holds(instance, n, old)
        if refines and fits and old is not None and not standing.changed and rounds > _FIRST_LOOKS:
            if self.tries and (trial := self._trial(single, cluster, old)) is not None:
                standing.before_trial = old
                return trial
            if rounds < standing.looked + _LOOK:
                return old
        standing.looked, standing.changed = rounds, False
        plan = ClusterPlan(delta=proposed.delta, order=proposed.order(devices.phi * devices.f), m=proposed.m)
        if refines and rounds:
            plan = refined_plan(instance, n, proposed, lambda tried: network.predict(single, 0, tried).train_s)
        if old is None or not fits:
            if old is not None:
                # There is no choice: the old plan no longer fits.
                reason = f"{'; '.join(standing.noticed) or 'the devices changed'}; {_segments(old)} does not fit"
                self.changes.append(PlanChange(cluster=cluster, taken=True, reason=reason, gain_s=0.0, move_s=0.0))
                standing.noticed = []
            return plan
        plan = replace(old, delta=plan.delta, order=plan.order, m=plan.m)
        if (plan.delta, plan.order, plan.m) == (old.delta, old.order, old.m):
            standing.declined = ""
            return old
        before, after = (network.predict(single, 0, p) for p in (old, plan))
        gain_s = before.train_s - after.train_s
        moved = sum(a != b for a, b in zip(_owners(plan), _owners(old), strict=True))
        move_s = self._move_seconds(cluster, moved, instance.gamma0)
        least = min(LEAST_GAIN + _DEVIATIONS * max(before.deviation, after.deviation), MOST_GAIN)
        taken = gain_s > least * before.train_s and HORIZON * gain_s > move_s
        if taken:
            reason = _reason(old, plan, standing.noticed, before, after, moved, move_s)
            standing.noticed, standing.declined = [], ""
            self.changes.append(PlanChange(cluster=cluster, taken=True, reason=reason, gain_s=gain_s, move_s=move_s))
            return plan
        if _segments(plan) != standing.declined and gain_s > 0:
            standing.declined = _segments(plan)
            reason = (
                f"{_segments(plan)} instead of {_segments(old)} would save {gain_s:.3g} s of {before.train_s:.3g} s a "
                f"round, and moving {counted(moved, 'TEB')} takes {move_s:.3g} s: not worth it"
            )
            self.changes.append(PlanChange(cluster=cluster, taken=False, reason=reason, gain_s=gain_s, move_s=move_s))
        return old

    def _trial(self, instance: Instance, cluster: int, old: ClusterPlan) -> ClusterPlan | None:
        """Give one TEB to a device that has been idle for long; None if there is none, or if that costs a round."""
        times, memory = self.network.clusters[cluster], instance.device_arrays(0).mem
        unseen = {
            k: times.unseen_rounds(k)
            for k, blocks in enumerate(old.delta)
            if not blocks and k not in times.away and not exceeds(instance.gamma0, float(memory[k]))
        }
        device = max(unseen, key=unseen.__getitem__, default=None)
        giver = max(old.devices, key=lambda k: old.delta[k])
        if device is None or unseen[device] < UNSEEN or old.delta[giver] < 2:
            return None
        delta, order = list(old.delta), old.devices
        delta[giver], delta[device] = delta[giver] - 1, 1
        order.insert(order.index(giver), device)
        plan = replace(old, delta=tuple(delta), order=tuple(order))
        network = self.network.of([cluster])
        before, after = (network.predict(instance, 0, p) for p in (old, plan))
        moved = sum(a != b for a, b in zip(_owners(plan), _owners(old), strict=True))
        loss_s, move_s = after.train_s - before.train_s, self._move_seconds(cluster, 2 * moved, instance.gamma0)
        if loss_s + move_s > before.train_s:
            return None
        reason = (
            f"device {device} has not worked for {counted(unseen[device], 'round')}: one TEB for one round, to see "
            "what it takes"
        )
        self.changes.append(
            PlanChange(cluster=cluster, taken=True, reason=reason, gain_s=-loss_s, move_s=move_s, trial=True)
        )
        return plan

    def _move_seconds(self, cluster: int, moved: int, gamma0: float) -> float:
        if not moved:
            return 0.0
        times = self.network.clusters[cluster]
        num_bytes = moved * (times.block_bytes or gamma0)
        known = times[MOVE, 0]
        if known is None:
            return (_FIRST_MOVE_S + num_bytes / _FIRST_BYTES_S) / times.scale
        return known.seconds(num_bytes)

    def predict(self, instance: Instance, plans: Mapping[int, ClusterPlan]) -> None:
        """Predict and keep the times of the selected clusters."""
        self.predictions = {n: self.network.predict(instance, n, plan) for n, plan in plans.items()}

    def comparison(self, cluster: int, report: Mapping[str, Any], planned_upload_s: float | None) -> dict[str, Any]:
        """Return predicted and reported times of a cluster's round, as JSON values."""
        predicted = self.predictions[cluster]
        return {
            "cluster": cluster,
            "predicted_train_s": predicted.train_s,
            "measured_train_s": self.network.train_seconds(report),
            "predicted_pipeline_s": predicted.pipeline_s,
            "measured_pipeline_s": self.network.pipeline_seconds(report),
            "predicted_upload_s": planned_upload_s,
            "measured_upload_s": self.network.upload_seconds(report),
        }

    def record(self) -> dict[str, Any]:
        """Return the round's plan changes and the estimates, as JSON values."""
        return {"changes": [change.to_dict() for change in self.changes], "estimates": self.estimates()}

    def estimates(self) -> list[dict[str, Any]]:
        """Return the estimated times of each cluster, as JSON values."""
        return [
            {
                "cluster": n,
                "times": [
                    {
                        "kind": kind,
                        "place": place,
                        "fixed_s": time.fixed_s,
                        "sample_s": time.sample_s,
                        "noise": time.noise,
                        "rounds": time.rounds,
                    }
                    for (kind, place), time in sorted(times.times.items())
                ],
            }
            for n, times in enumerate(self.network.clusters)
        ]

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        return {
            "network": self.network.to_dict(),
            "standings": [
                vars(s) | {key: plan and plan.to_dict() for key, plan in s.plans().items()} for s in self._standings
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.network.restore(state["network"])
        self._standings = [
            _Standing(**raw | {key: raw[key] and ClusterPlan.from_dict(raw[key]) for key in _Standing().plans()})
            for raw in state["standings"]
        ]


class SettledPolicy(RoundPolicy):
    """A policy whose plans change only where that pays.

    Parameters
    ----------
    policy : decides
    adaptation : holds the present plans
    """

    def __init__(self, policy: RoundPolicy, adaptation: Adaptation) -> None:
        self.name = policy.name
        self._policy, self._adaptation = policy, adaptation

    def plan(self, round_: Round) -> Answer:
        """Plan, and keep present segments that are as good."""
        answer = self._policy.plan(round_)
        if answer.status == "infeasible":
            return answer
        return self._adaptation.settle(round_.instance, tuple(round_.indices), answer, self._policy.seeks_least_time)


def _newest(noticed: list[str], texts: list[str]) -> list[str]:
    """Return the notices, the latest of each device, link or stream."""
    subjects = {text.partition(" takes ")[0] for text in texts}
    return [*(text for text in noticed if text.partition(" takes ")[0] not in subjects), *texts][-8:]


def _holds(instance: Instance, n: int, plan: ClusterPlan) -> bool:
    """Return whether a plan still fits the cluster's memory and allowed micro-batches."""
    memory = instance.device_arrays(n).mem
    if len(plan.delta) != len(memory):
        return False
    fits = all(not exceeds(d * instance.gamma0, float(memory[k])) for k, d in enumerate(plan.delta))
    return fits and plan.m in instance.m_set and sum(plan.delta) == instance.L


def _owners(plan: ClusterPlan) -> list[int]:
    """Return the device of each TEB."""
    return [segment.device for segment in plan.segments() for _ in segment.blocks]


def _segments(plan: ClusterPlan) -> str:
    parts = ", ".join(f"{segment.device}:{len(segment.blocks)}" for segment in plan.segments())
    return f"{parts} with m = {plan.m}"


def _reason(
    old: ClusterPlan,
    new: ClusterPlan,
    noticed: list[str],
    before: Prediction,
    after: Prediction,
    moved: int,
    move_s: float,
) -> str:
    dropped = [k for k in old.devices if k not in new.devices]
    joined = [k for k in new.devices if k not in old.devices]
    parts = list(noticed) or ["the times are better known"]
    for words, devices in (("is left out: it costs more than it brings", dropped), ("takes part again", joined)):
        parts += [f"{DEVICE} {k} {words}" for k in devices]
    saved = 1 - after.train_s / before.train_s
    return (
        f"{'; '.join(parts)}; {_segments(old)} becomes {_segments(new)}: {after.train_s:.3g} s a round instead of "
        f"{before.train_s:.3g} s ({saved:.0%} less), moving {counted(moved, 'TEB')} takes {move_s:.3g} s"
    )
