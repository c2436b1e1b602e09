"""A Flower strategy whose rounds are planned on the server: what CollaPipe and its baselines have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.timetable.pacing import Pace
from strategies.aggregation.server_optimizers import ADAPTIVE
from strategies.aggregation.weighted_mean import WeightedMean
from strategies.clusters import ClusterState, check_clusters
from strategies.flower_names import log
from strategies.npy_bytes import array_values
from strategies.planning.costs import Times, Work, costs_record, pipeline_work, round_costs
from strategies.planning.plan_demands import plan_times
from strategies.planning.planner import Decision, InfeasibleRound, RoundPlanner
from strategies.planning.policy import RoundPolicy
from strategies.records import ARRAYS, CONFIG, LOSS_KEY, WEIGHT_KEY, read_metric, read_report, train_config
from strategies.traits import Traits

OnPlan = Callable[[int, Sequence[ClusterPlan]], None]


class PlannedStrategy(Strategy):
    """Plans a round, has the selected clusters train it, and joins what they trained.

    A subclass says by ``traits`` what it does otherwise; what its constructor takes beyond these arguments comes from
    ``strategy-options``.

    Parameters
    ----------
    planner : plans each round and keeps the queues; its scenario says L, b and the local steps
    clusters : the clusters that take part
    aggregator : a stock strategy whose ``aggregate_train`` averages; by default the weighted mean, as FedAvg's
    on_plan : called with each round's number and plans
    time_scale : paced devices: wall seconds of a virtual second; None lets them run as fast as they can
    """

    traits = Traits(keeps="state")
    """Traits that the run around it reads."""
    work: Work = staticmethod(pipeline_work)
    """Work of a local step under the system model."""
    times: Times = staticmethod(plan_times)
    """The same of each stage, link and micro-batch of what really runs, for paced devices."""

    def __init__(
        self,
        *,
        planner: RoundPlanner,
        clusters: Sequence[ClusterState],
        aggregator: Strategy | None = None,
        on_plan: OnPlan | None = None,
        time_scale: float | None = None,
    ) -> None:
        check_clusters(clusters, num_clusters=0)
        self.planner = planner
        self.clusters = sorted(clusters, key=lambda state: state.cluster)
        self.aggregator = aggregator if aggregator is not None else WeightedMean(weighted_by_key=WEIGHT_KEY)
        self.on_plan = on_plan
        self.time_scale = time_scale
        self.record: dict[str, Any] = {}
        """Record of the last round: its ``plan`` and its ``virtual`` costs, as JSON values."""
        self.averaged = True
        """True if the last round's updates became an average."""
        self.uncounted: set[int] = set()
        """Clusters whose answer to the last round is in no average."""
        self._decision: Decision | None = None

    def summary(self) -> None:
        """Log the configuration."""
        log(INFO, "\t├──> Policy: %s", self.planner.policy.name)
        log(INFO, "\t└──> Clusters: %d, local steps: %d", len(self.clusters), self.local_steps)

    @property
    def local_steps(self) -> int:
        """Optimizer steps of a cluster per round."""
        return self.planner.scenario.planner.local_steps

    # What a subclass may change.

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy | None:
        """Return the policy that this strategy brings, from the run's seed; None: the run's ``policy`` plans."""
        del seed
        return None

    @classmethod
    def check_model(cls, lora: LoraConfig | None, num_blocks: int) -> None:
        """Raise ``ValueError`` for a model that this strategy does not train.

        Parameters
        ----------
        lora : its adapters; None: all its weights are trained
        num_blocks : TEBs of a cluster, L
        """
        del lora, num_blocks

    def prepare(self, server_round: int, arrays: ArrayRecord, selected: Sequence[ClusterState]) -> None:
        """Get ready for a round that has been planned."""

    def arrays_for(self, state: ClusterState, arrays: ArrayRecord) -> ArrayRecord:
        """Return the weights that a cluster starts the round with."""
        del state
        return arrays

    def decoder_for(self, state: ClusterState) -> Any:
        """Return the address of the decoder's service; None: the control unit trains the decoder itself."""
        del state

    def join(
        self, server_round: int, replies: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None, list[Message]]:
        """Join the clusters' weights; returns them, the metrics, and the replies that counted."""
        arrays, metrics = self.aggregator.aggregate_train(server_round, replies)
        return arrays, metrics, replies

    def note_no_average(self) -> None:
        """Note, in :meth:`join`, that the round's updates became no average, whatever arrays it returns."""
        self.averaged = False

    # Flower's hooks.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan the round, and send each selected control unit what it needs."""
        present = set(grid.get_node_ids())
        absent = {s.cluster: "its node is not connected" for s in self.clusters if s.node_id not in present}
        self.planner.observe([state.devices for state in self.clusters])
        losses = [math.inf if s.last_loss is None else s.last_loss for s in self.clusters]
        decision = self._decision = self.planner.plan(server_round, losses, absent)
        if self.on_plan is not None:
            self.on_plan(server_round, decision.plans)
        for cluster, reason in decision.left_out.items():
            log(WARNING, "Round %d: cluster %d left out: %s", server_round, cluster, reason)
        selected = [state for state, chosen in zip(self.clusters, decision.selected, strict=True) if chosen]
        if not selected:
            raise InfeasibleRound(server_round, decision.left_out)
        self.prepare(server_round, arrays, selected)
        log(INFO, "configure_train: clusters %s", [state.cluster for state in selected])
        if decision.power_control is not None:
            log(INFO, "Round %d: %s", server_round, decision.power_control.text())
        if decision.teb_costs:
            log(INFO, "Round %d: %s", server_round, decision.teb_costs)
        return [
            Message(
                content=RecordDict(
                    {
                        ARRAYS: self.arrays_for(state, arrays),
                        CONFIG: ConfigRecord(
                            {
                                **config,
                                **train_config(
                                    server_round,
                                    decision.plans[state.cluster],
                                    decoder=self.decoder_for(state),
                                    pace=self._pace(decision, state.cluster),
                                    waived=self.traits.waives,
                                ),
                            }
                        ),
                    }
                ),
                message_type=MessageType.TRAIN,
                dst_node_id=state.node_id,
            )
            for state in selected
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join what the clusters trained; update queues and what is known of the clusters, once."""
        decision = self._decision
        assert decision is not None
        state_of = {state.node_id: state for state in self.clusters}
        ordered = sorted(replies, key=lambda reply: state_of[reply.metadata.src_node_id].cluster)
        self.averaged = True
        arrays, metrics, counted = self.join(server_round, ordered)
        averaged = self.averaged and arrays is not None
        in_average = {reply.metadata.src_node_id for reply in counted if averaged and not reply.has_error()}
        self.uncounted = {state.cluster for node, state in state_of.items() if node not in in_average}
        trained, compared, computed = set(), [], {}
        for reply in counted:
            if reply.has_error():
                continue
            state = state_of[reply.metadata.src_node_id]
            trained.add(state.cluster)
            report = read_report(reply)
            computed[state.cluster] = min(report.get("computed_steps", self.local_steps), self.local_steps)
            raw_state = report.get("state")
            state.note_round(read_metric(reply, LOSS_KEY), ClusterState.from_dict(raw_state) if raw_state else None)
            if self.planner.adaptation is not None and "measured" in report:
                compared.append(self._learn(decision, state.cluster, report))
        gamma = self.planner.settle(decision, trained)
        # Virtual time is the scenario's, whatever the plan was made by.
        virtual = decision.as_declared()
        costs = round_costs(virtual, type(self).work, [s.cluster in trained for s in self.clusters], computed)
        adaptation = self.planner.adaptation
        adapted = {} if adaptation is None else adaptation.record() | {"predictions": compared}
        self.record = {
            "plan": plan_record(self.planner.policy.name, decision) | {"waived": list(self.traits.waives)} | adapted,
            "virtual": costs_record(virtual, costs, gamma, self.planner.scenario),
        }
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no cluster: the server evaluates on its own data (``evaluate_fn``)."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Aggregate nothing."""
        del server_round, replies
        return None

    def state(self) -> dict[str, Any]:
        """Return the state that a continued run needs, as JSON values."""
        return {"queues": self.planner.state(), "losses": [state.last_loss for state in self.clusters]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.planner.restore(state["queues"])
        for cluster, loss in zip(self.clusters, state["losses"], strict=True):
            cluster.note_round(loss)

    def _learn(self, decision: Decision, cluster: int, report: dict[str, Any]) -> dict[str, Any]:
        """Estimate by a cluster's report; returns what was predicted beside what it says."""
        adaptation = self.planner.adaptation
        assert adaptation is not None
        planned_upload_s = decision.answer.clusters[cluster].uplink_s
        compared = adaptation.comparison(cluster, report, planned_upload_s)
        adaptation.observe(decision.number, cluster, report, decision.declared, decision.declared_upload_s(cluster))
        return compared

    def _pace(self, decision: Decision, cluster: int) -> Pace | None:
        if self.time_scale is None:
            return None
        times = type(self).times(decision.declared, cluster, decision.plans[cluster])
        uplink_s = decision.declared_upload_s(cluster) or 0.0
        return Pace.of(times, uplink_s, self.time_scale)


def start_from(aggregator: Strategy, arrays: ArrayRecord) -> None:
    """Tell one of Flower's adaptive strategies where the round began, in the form that it keeps."""
    if hasattr(aggregator, "current_arrays"):
        numpy = isinstance(aggregator, ADAPTIVE)
        aggregator.current_arrays = {name: array_values(a) for name, a in arrays.items()} if numpy else arrays.copy()


def plan_record(policy: str, decision: Decision) -> dict[str, Any]:
    """Return the origin of a round's plan, as JSON values: ``plan`` of a run's ``rounds.jsonl``."""
    answer = decision.answer
    finite = answer.lower_bound is not None and math.isfinite(answer.lower_bound)
    return {
        "policy": policy,
        "status": answer.status,
        "objective": answer.objective,
        "lower_bound": answer.lower_bound if finite else None,
        "gap": answer.gap,
        "left_out": [{"cluster": n, "reason": reason} for n, reason in sorted(decision.left_out.items())],
        "power_control": decision.power_control.to_dict() if decision.power_control else None,
        **({"teb_costs": decision.teb_costs} if decision.teb_costs else {}),
    }
