"""CollaPipe as a Flower strategy: plans, trains the decoder, averages encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt
from flwr.supercore import log

from client_pipeline.partition.parts import load_parameters, own_parameters, part_weights
from client_pipeline.partition.plan import ClusterPlan
from strategies.clusters import ClusterState, check_clusters
from strategies.decoder_service import DecoderService
from strategies.policies import Policy, RoundProblem
from strategies.recording_grid import RoundFailed
from strategies.records import ARRAYS, CONFIG, LOSS_KEY, WEIGHT_KEY, read_metric, to_arrays, to_tensors, train_config

HEAD = "head."


class CollaPipe(Strategy):
    """Segment-wise pipelines in the clusters, the decoder here, encoders averaged (arXiv:2509.19855, Algorithm 1).

    ``start`` takes and returns the whole model; messages leave the decoder out.

    Parameters
    ----------
    policy : chooses each round's plan
    decoder : the decoder's service, started
    clusters : the clusters that take part
    num_blocks : L
    batch_size : b
    local_steps : optimizer steps of a cluster per round
    aggregator : a stock strategy whose ``aggregate_train`` averages the encoders; FedAvg by default
    on_plan : called with each round's number and plans

    Example
    -------
    >>> strategy = CollaPipe(policy=UniformPolicy(), decoder=service, clusters=clusters,
    ...                      num_blocks=4, batch_size=32)                        # doctest: +SKIP
    >>> result = strategy.start(grid, initial_arrays=arrays, num_rounds=20)      # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        policy: Policy,
        decoder: DecoderService,
        clusters: Sequence[ClusterState],
        num_blocks: int,
        batch_size: int,
        local_steps: int = 1,
        aggregator: Strategy | None = None,
        on_plan: Callable[[int, Sequence[ClusterPlan]], None] | None = None,
    ) -> None:
        check_clusters(clusters, num_clusters=0)
        self.policy = policy
        self.decoder = decoder
        self.clusters = sorted(clusters, key=lambda state: state.cluster)
        self.num_blocks = num_blocks
        self.batch_size = batch_size
        self.local_steps = local_steps
        self.aggregator = aggregator if aggregator is not None else FedAvg(weighted_by_key=WEIGHT_KEY)
        self.on_plan = on_plan
        self._head_loaded = False

    def summary(self) -> None:
        """Log the configuration."""
        log(INFO, "\t├──> Policy: %s, decoder at %s", self.policy.name, self.decoder.advertised)
        log(INFO, "\t└──> Clusters: %d, local steps: %d", len(self.clusters), self.local_steps)

    def plan(self, server_round: int) -> list[ClusterPlan]:
        """Ask the policy for the plans of a round, in the order of the clusters."""
        problem = RoundProblem(
            round=server_round, num_blocks=self.num_blocks, batch_size=self.batch_size, clusters=self.clusters
        )
        return self.policy.plan(problem)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan, open the decoder's round, and send each selected control unit what it needs."""
        if not self._head_loaded:
            # The first round's arrays bring the initial (or restored) decoder; later ones only repeat it.
            parameters = own_parameters(self.decoder.trainer.head)
            load_parameters(parameters, part_weights(to_tensors(arrays), "head"), "decoder")
            self._head_loaded = True
        plans = self.plan(server_round)
        if self.on_plan is not None:
            self.on_plan(server_round, plans)
        present = set(grid.get_node_ids())
        selected = [
            (state, plan)
            for state, plan in zip(self.clusters, plans, strict=True)
            if plan.selected and state.node_id in present
        ]
        if missing := [state.cluster for state in self.clusters if state.node_id not in present]:
            log(WARNING, "configure_train: clusters %s are not connected", missing)
        if not selected:
            raise RoundFailed(
                f"round {server_round}: no cluster can train: the plan selects "
                f"{[s.cluster for s, p in zip(self.clusters, plans, strict=True) if p.selected]}, "
                f"connected are {[s.cluster for s in self.clusters if s.node_id in present]}"
            )
        addresses = self.decoder.open_round(server_round, [state.cluster for state, _ in selected], self.local_steps)
        encoder = ArrayRecord({name: array for name, array in arrays.items() if not name.startswith(HEAD)})
        if hasattr(self.aggregator, "current_arrays"):
            # Flower's adaptive strategies step from where the round began, each in a form of its own.
            numpy = isinstance(self.aggregator, FedOpt)
            start = {name: array.numpy() for name, array in encoder.items()} if numpy else encoder.copy()
            self.aggregator.current_arrays = start
        log(INFO, "configure_train: clusters %s", [state.cluster for state, _ in selected])
        return [
            Message(
                content=RecordDict(
                    {
                        ARRAYS: encoder,
                        CONFIG: ConfigRecord({**config, **train_config(server_round, plan, addresses[state.cluster])}),
                    }
                ),
                message_type=MessageType.TRAIN,
                dst_node_id=state.node_id,
            )
            for state, plan in selected
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the encoders by what each cluster trained, and join the decoder to them."""
        cluster_of = {state.node_id: state for state in self.clusters}
        ordered = sorted(replies, key=lambda reply: cluster_of[reply.metadata.src_node_id].cluster)
        round_ = self.decoder.finish_round()
        for cluster, summary in round_.clusters.items():
            if summary.left is not None:
                log(WARNING, "aggregate_train: cluster %d left round %d: %s", cluster, server_round, summary.left)
        # A cluster counts with its encoder if the decoder learned from it too, else in neither average.
        counted = [
            reply
            for reply in ordered
            if reply.has_error() or round_.clusters[cluster_of[reply.metadata.src_node_id].cluster].steps
        ]
        for reply in counted:
            if not reply.has_error():
                cluster_of[reply.metadata.src_node_id].last_loss = read_metric(reply, LOSS_KEY)
        encoder, metrics_record = self.aggregator.aggregate_train(server_round, counted)
        if encoder is None:
            return None, metrics_record
        whole = {**to_tensors(encoder), **{HEAD + name: value for name, value in round_.head.items()}}
        return to_arrays(whole), metrics_record

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No federated evaluation: the server evaluates on its own data (``evaluate_fn``)."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        del server_round, replies
        return None
