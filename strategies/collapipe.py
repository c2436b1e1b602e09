"""CollaPipe as a Flower strategy: plans, trains the decoder, averages encoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from client_pipeline.link.address import DecoderAddress
from client_pipeline.partition.parts import load_parameters, own_parameters, part_weights
from strategies.aggregation.central_privacy import adaptive_clip, restore_clip, tell_clip
from strategies.aggregation.product_mean import arrays_of_cluster
from strategies.clusters import ClusterState
from strategies.decoder.member import ClusterSummary
from strategies.decoder.service import DecoderService
from strategies.flower_names import log
from strategies.grid.reply_matching import failed
from strategies.grid.update_spool import is_in_memory, record_of
from strategies.npy_bytes import array_values
from strategies.planned_strategy import OnPlan, PlannedStrategy, start_from
from strategies.planning.planner import RoundPlanner
from strategies.records import STEPS_KEY, WEIGHT_KEY, read_metric, to_arrays, to_tensors

HEAD = "head."


class CollaPipe(PlannedStrategy):
    """Segment-wise pipelines in the clusters, the decoder here, encoders averaged (arXiv:2509.19855, Algorithm 1).

    ``start`` takes and returns the whole model, or all of it but the decoder, which is the service's then and nobody
    copies; messages leave the decoder out.

    Parameters
    ----------
    planner : plans each round, by whichever policy
    decoder : the decoder's service, started; None: the clusters train it with the rest of the model
    clusters : the clusters that take part
    aggregator : a stock strategy whose ``aggregate_train`` averages the encoders; by default the mean. See
        :func:`strategies.aggregation.server_optimizers.averaging_strategy`
    on_plan : called with each round's number and plans
    time_scale : paced devices: wall seconds of a virtual second; None lets them run as fast as they can

    Example
    -------
    >>> planner = RoundPlanner(load_scenario("table2"), make_policy("dssda"))    # doctest: +SKIP
    >>> strategy = CollaPipe(planner=planner, decoder=service, clusters=clusters)  # doctest: +SKIP
    >>> result = strategy.start(grid, initial_arrays=arrays, num_rounds=20)      # doctest: +SKIP
    """

    traits = replace(PlannedStrategy.traits, decoder_on_server=True, channel_for_each=True, takes_aggregator=True)

    def __init__(
        self,
        *,
        planner: RoundPlanner,
        decoder: DecoderService | None,
        clusters: Sequence[ClusterState],
        aggregator: Strategy | None = None,
        on_plan: OnPlan | None = None,
        time_scale: float | None = None,
    ) -> None:
        super().__init__(
            planner=planner, clusters=clusters, aggregator=aggregator, on_plan=on_plan, time_scale=time_scale
        )
        self.decoder = decoder
        self._returns_head: bool | None = None
        """True if the arrays have the decoder; None before the first round's."""
        self._addresses: dict[int, DecoderAddress] = {}
        self._start = ArrayRecord()
        self._refused_updates: list[dict[str, Any]] = []
        """Clusters of the last round whose updates were left out, with the reason."""

    def summary(self) -> None:
        """Log the configuration."""
        if self.decoder is not None:
            log(INFO, "\t├──> Decoder at %s", self.decoder.advertised)
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Plan and send the round, with the clip that Flower's mods on the clusters ask for."""
        tell_clip(self.aggregator, config)
        return super().configure_train(server_round, arrays, config, grid)

    def state(self) -> dict[str, Any]:
        """Return the state that a continued run needs, with the clip where that adapts, as JSON values."""
        return super().state() | {"clip": adaptive_clip(self.aggregator)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        super().restore(state)
        restore_clip(self.aggregator, state.get("clip"))

    def prepare(self, server_round: int, arrays: ArrayRecord, selected: Sequence[ClusterState]) -> None:
        """Open the decoder's round."""
        if self.decoder is None:
            start_from(self.aggregator, arrays)
            return
        if self._returns_head is None:
            # The first round's arrays may bring the initial (or restored) decoder; later ones only repeat it.
            head = ArrayRecord({name: array for name, array in arrays.items() if name.startswith(HEAD)})
            self._returns_head = bool(head)
            if head:
                parameters = own_parameters(self.decoder.trainer.head)
                load_parameters(parameters, part_weights(to_tensors(head), "head"), "decoder")
        clusters = [state.cluster for state in selected]
        tied = {
            name: arrays[f"embedding.{embedding_name}"] for name, embedding_name in self.decoder.trainer.tied.items()
        }
        self._addresses = self.decoder.open_round(
            server_round, clusters, self.local_steps, to_tensors(ArrayRecord(tied))
        )
        self._start = encoder_of(arrays)
        start_from(self.aggregator, self._start)

    def arrays_for(self, state: ClusterState, arrays: ArrayRecord) -> ArrayRecord:
        """Everything but the server's decoder; adapters of the cluster's own rank."""
        sent = arrays if self.decoder is None else encoder_of(arrays)
        return arrays_of_cluster(self.aggregator, state.cluster, sent)

    def decoder_for(self, state: ClusterState) -> DecoderAddress | None:
        """Address and token of the round; None: the control unit trains the decoder itself."""
        return self._addresses.get(state.cluster)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join the round's updates; the record also counts the hello frames that the decoder refused."""
        aggregate = super().aggregate_train(server_round, replies)
        if self.decoder is None:
            return aggregate
        self.record["refused_updates"] = self._refused_updates
        self.record["refused_hellos"] = refused = self.decoder.hellos.take_refused()
        if refused:
            log(WARNING, "aggregate_train: round %d: hellos refused by the decoder: %s", server_round, refused)
        return aggregate

    def join(
        self, server_round: int, replies: list[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None, list[Message]]:
        """Average the encoders by what each cluster trained, and join the decoder to them."""
        if self.decoder is None:
            arrays, metrics, counted = super().join(server_round, replies)
            return None if arrays is None else float32_arrays(arrays), metrics, counted
        cluster_of = {state.node_id: state.cluster for state in self.clusters}
        summaries = self.decoder.end_round()
        for cluster, summary in summaries.items():
            if summary.departure is not None:
                log(WARNING, "aggregate_train: cluster %d left round %d: %s", cluster, server_round, summary.departure)
        # A cluster counts with its encoder if the decoder learned from it too, else in neither average.
        counted, refused_updates = [], []
        for reply in replies:
            cluster = cluster_of[reply.metadata.src_node_id]
            reason = None if reply.has_error() else weight_mismatch(reply, summaries[cluster])
            if reason is not None:
                log(WARNING, "aggregate_train: update of cluster %d left out: %s", cluster, reason)
                refused_updates.append({"cluster": cluster, "reason": reason})
            counted.append(reply if reason is None else failed(reply, reason))
        self._refused_updates = refused_updates
        good = [reply for reply in counted if not reply.has_error()]
        round_ = self.decoder.finish_round(
            {cluster_of[reply.metadata.src_node_id]: read_metric(reply, WEIGHT_KEY) for reply in good}
        )
        encoder, metrics_record = self.aggregator.aggregate_train(server_round, counted)
        if encoder is None:
            self.note_no_average()
            # The decoder may have learned all the same: its weights go with the encoder that it will go on with.
            encoder = self._start
        head = {HEAD + name: value for name, value in round_.head.items()} if self._returns_head else {}
        joined = record_of([*float32_arrays(encoder).items(), *to_arrays(head).items()])
        return joined, metrics_record, counted


def weight_mismatch(reply: Message, summary: ClusterSummary) -> str | None:
    """Return why an update may not count: the decoder did not learn what its cluster claims; None if it did."""
    if summary.departure is not None:
        return f"the cluster left the decoder's round: {summary.departure}"
    # What Flower's strategies weight by: the targets, or where all count alike the steps.
    for key, seen in ((WEIGHT_KEY, summary.weight), (STEPS_KEY, float(summary.steps))):
        claimed = read_metric(reply, key)
        if not 0 < claimed <= seen * (1 + 1e-6):
            return f"it claims {key} = {claimed:g}, the decoder has seen {seen:g}"
    return None


def float32_arrays(arrays: ArrayRecord) -> ArrayRecord:
    """Return a round's arrays in float32 and in memory, those that are already as they are.

    The scalars of Flower's adaptive strategies make float64 of theirs; a rule may pass on an update that is on disk.
    """
    return record_of(
        (name, array if is_in_memory(array) and array.dtype == "float32" else _in_float32(array))
        for name, array in arrays.items()
    )


def _in_float32(array: Array) -> Array:
    return Array(np.asarray(array_values(array), dtype=np.float32))


def encoder_of(arrays: ArrayRecord) -> ArrayRecord:
    """Embedding and encoder of the whole model's arrays."""
    return record_of((name, array) for name, array in arrays.items() if not name.startswith(HEAD))
