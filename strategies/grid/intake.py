"""The door for what clients answer: each reply is checked against its order, or it is that cluster's failure.

Nothing behind this door looks at what a client sent before it has been checked. What a reply may hold is one record of
each kind: ``arrays``, of the names, types and shapes that the order asks for; ``metrics``, four finite numbers;
``report``, JSON whose every key has a type. What is wrong is said by the reason of a failed reply, in printable text of
bounded length, and the round goes on without that cluster.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from client_pipeline.link.update_codec import UpdateCodec, UpdateError
from client_pipeline.runtime.transport.faults import FaultRecord
from strategies.flower_names import KEY_NORM_BIT
from strategies.grid.received_arrays import all_finite, checked_arrays, expected_forms
from strategies.grid.received_report import ReportTerms, checked_faults, checked_report
from strategies.grid.received_values import SECONDS, Kind, MalformedReply, check_object, excerpt, number, parse_json
from strategies.grid.reply_matching import exchange_seconds, failed
from strategies.grid.update_spool import SMALL_BYTES, SpoolError, UpdateSpool, record_bytes, record_of
from strategies.printable import printable
from strategies.records import (
    ARRAYS,
    CONFIG,
    FAULTS_PREFIX,
    LOSS_KEY,
    METRICS,
    REPORT,
    STEPS_KEY,
    WALL_KEY,
    WEIGHT_KEY,
    read_train_config,
    to_arrays,
    to_tensors,
)

NO_REPLY = "no reply in time"
_DIVERGED = "NaN or Inf: training diverged on the control unit"
_MOST_WEIGHT = 2.0**40
_MOST_LOSS = 1e12
_ERROR_CHARACTERS = 1 << 20
"""Longest end of an error's text that is read."""


@dataclass(frozen=True, kw_only=True)
class RoundBounds:
    """Bounds of every honest reply, from a run's configuration; a bound that is None is not checked."""

    steps: int | None = None
    """Optimizer steps of a cluster in a round."""
    max_weight: float = _MOST_WEIGHT
    """Most targets that a cluster can train on in a round."""
    num_blocks: int | None = None
    """L."""
    batch_size: int | None = None
    """b, at most as many micro-batches."""
    num_devices: Mapping[int, int] = field(default_factory=dict)
    """K of each cluster."""


@dataclass(frozen=True, kw_only=True)
class TakenReply:
    """Outcome of an order."""

    cluster: int
    message: Message
    """Checked answer, or an error, for the strategy."""
    reason: str | None = None
    """Reason of the cluster's failure; None without one."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Records of the round's faults, at least one if it failed."""
    weight: float = 0.0
    loss: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


class ReplyIntake:
    """Takes in replies to training orders.

    Parameters
    ----------
    clusters : cluster index of each node id
    codec : of the control units' updates; strategies get trained weights. None: these are what is sent
    bounds : of every honest reply
    spool : where weights that are not small wait for those of the other clusters; None: the machine's folder for
        temporary files
    """

    def __init__(
        self,
        clusters: Mapping[int, int],
        codec: UpdateCodec | None = None,
        bounds: RoundBounds | None = None,
        spool: UpdateSpool | None = None,
    ) -> None:
        self._clusters = dict(clusters)
        self._codec = codec
        self._bounds = bounds if bounds is not None else RoundBounds()
        self._spool = spool if spool is not None else UpdateSpool()

    def take(self, order: Message, reply: Message | None) -> TakenReply:
        """Check a reply; whatever is wrong with it becomes its cluster's failure.

        Raises
        ------
        SpoolError
            If its weights cannot be put aside: that is no cluster's doing.
        """
        terms = self._terms(order)
        if reply is None:
            return self._lost(order, terms, NO_REPLY)
        if reply.has_error():
            return self._client_failed(order, reply, terms)
        try:
            return self._answer(order, reply, terms)
        except (MalformedReply, UpdateError) as error:
            return self._lost(order, terms, printable(str(error)))
        except SpoolError:
            raise
        except Exception as error:
            # A hole in the checks must not be one in the run.
            return self._lost(order, terms, f"its answer cannot be read: {excerpt(error)}")

    def _terms(self, order: Message) -> ReportTerms:
        node, bounds = order.metadata.dst_node_id, self._bounds
        cluster = self._clusters.get(node, -1)
        order_terms = read_train_config(order.content.config_records[CONFIG], cluster)
        return ReportTerms(
            cluster=cluster,
            node_id=node,
            round=order_terms.round,
            plan=order_terms.plan,
            num_devices=bounds.num_devices.get(cluster),
            num_blocks=bounds.num_blocks,
            batch_size=bounds.batch_size,
        )

    def _answer(self, order: Message, reply: Message, terms: ReportTerms) -> TakenReply:
        arrays, metrics, report_text = _records(reply.content)
        values = self._checked_metrics(order, metrics)
        report = checked_report(report_text, terms) | {"exchange_s": exchange_seconds(reply)}
        weights = self._weights(order, arrays)
        content = RecordDict(
            {
                ARRAYS: weights,
                METRICS: MetricRecord({key: metrics[key] for key in values}),
                REPORT: ConfigRecord({"json": json.dumps(report)}),
            }
        )
        return TakenReply(
            cluster=terms.cluster,
            message=Message(content, reply_to=order),
            faults=report["faults"],
            weight=values[WEIGHT_KEY],
            loss=values[LOSS_KEY],
            report=report,
        )

    def _checked_metrics(self, order: Message, metrics: MetricRecord) -> dict[str, float]:
        bounds = self._bounds
        steps = Kind("a number above 0", lambda v: 0 < v <= 2**31)
        if bounds.steps is not None:
            steps = Kind(f"{bounds.steps}, as ordered", lambda v: v == bounds.steps)
        kinds = {
            WEIGHT_KEY: Kind(
                f"a number above 0, and at most {bounds.max_weight:g}", lambda v: 0 < v <= bounds.max_weight
            ),
            LOSS_KEY: number(0.0, _MOST_LOSS),
            STEPS_KEY: steps,
            WALL_KEY: SECONDS,
        }
        if order.content.config_records[CONFIG].get(KEY_NORM_BIT):
            kinds[KEY_NORM_BIT] = Kind("0 or 1", lambda v: v in (0, 1))
        for key in (WEIGHT_KEY, LOSS_KEY, STEPS_KEY):
            value = metrics.get(key)
            if isinstance(value, float) and not abs(value) < float("inf"):
                raise MalformedReply(f"{key} = {value}: {_DIVERGED}")
        scalar = Kind("a number", lambda v: type(v) in (int, float))
        values = dict(metrics)
        check_object(values, {key: scalar for key in kinds}, "metrics")
        check_object(values, kinds, "metrics")
        return {key: float(cast(float, metrics[key])) for key in kinds}

    def _weights(self, order: Message, arrays: ArrayRecord) -> ArrayRecord:
        """The trained weights, in the order's order: one array after the other is decoded, checked and put aside."""
        sent = order.content.array_records[ARRAYS]
        update = checked_arrays(arrays, expected_forms(sent, self._codec))
        is_small = record_bytes(sent) < SMALL_BYTES
        weights = ArrayRecord()
        for name in sent:
            array = self._trained(name, sent, update)
            if not all_finite(array):
                raise MalformedReply(f"update of {name}: {_DIVERGED}")
            weights[name] = array if is_small else self._spool.put_aside(array)
        return weights

    def _trained(self, name: str, sent: ArrayRecord, update: ArrayRecord) -> Array:
        """One array's trained weights."""
        if self._codec is None:
            return update[name]
        start = record_of([(name, sent[name])])
        parts = [f"{name}/{part}" for part in self._codec.kinds(math.prod(sent[name].shape))]
        trained = self._codec.apply(to_tensors(start), to_tensors(record_of((part, update[part]) for part in parts)))
        return to_arrays(trained)[name]

    def _client_failed(self, order: Message, reply: Message, terms: ReportTerms) -> TakenReply:
        """Take in the reason that a client gives for its own failure, and what it recorded before."""
        lines = [line.strip() for line in (reply.error.reason or "")[-_ERROR_CHARACTERS:].splitlines() if line.strip()]
        faults: list[dict[str, Any]] = []
        if lines and lines[-1].startswith(FAULTS_PREFIX):
            text = lines.pop().removeprefix(FAULTS_PREFIX)
            try:
                faults = checked_faults(parse_json(text, "faults", _ERROR_CHARACTERS), terms)
            except MalformedReply as error:
                lines = lines or [str(error)]
        reason = printable(lines[-1]) if lines else "no reason given"
        return self._lost(order, terms, reason, faults)

    def _lost(
        self,
        order: Message,
        terms: ReportTerms,
        reason: str,
        faults: list[dict[str, Any]] | None = None,
    ) -> TakenReply:
        if not faults:
            kind = "nan" if "NaN or Inf" in reason else "cluster"
            record = FaultRecord(kind=kind, cluster=terms.cluster, round=terms.round, recovered=False, reason=reason)
            faults = [record.to_dict()]
        return TakenReply(
            cluster=terms.cluster,
            message=failed(order, reason),
            reason=reason,
            faults=faults,
        )


def _records(content: RecordDict) -> tuple[ArrayRecord, MetricRecord, Any]:
    """The one record of each kind."""
    kinds = {ARRAYS: ArrayRecord, METRICS: MetricRecord, REPORT: ConfigRecord}
    kinds_by_name = {name: type(record) for name, record in content.items()}
    if kinds_by_name != kinds:
        words = ", ".join(f"{excerpt(name)} ({kind.__name__})" for name, kind in list(kinds_by_name.items())[:8])
        raise MalformedReply(f"expected one record each of {', '.join(kinds)}, found {words or 'none'}")
    report = content.config_records[REPORT]
    if set(report) != {"json"}:
        raise MalformedReply(f"report: expected the key json alone, found {excerpt(' '.join(list(report)[:8]))}")
    return content.array_records[ARRAYS], content.metric_records[METRICS], report["json"]
