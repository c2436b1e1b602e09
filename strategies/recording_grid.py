"""A Grid around any strategy: counts bytes and time, keeps the reports, fails a round in which all clients failed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log

from client_pipeline.link.update_codec import UpdateCodec, UpdateError
from client_pipeline.runtime.faults import FaultRecord
from strategies.forwarding_grid import ForwardingGrid
from strategies.records import (
    ARRAYS,
    CONFIG,
    ROUND_KEY,
    WEIGHT_KEY,
    read_failure,
    read_metric,
    read_report,
    sole_arrays,
    to_arrays,
    to_tensors,
)


class RoundFailed(RuntimeError):
    """No client finished the round; the message gives each one's reason."""


class RecordingGrid(ForwardingGrid):
    """Passes everything on to ``grid``, for the nodes of this run alone.

    Parameters
    ----------
    grid : Flower's own
    clusters : cluster index of each node id; other nodes stay hidden from the strategy
    all_needed_s : how long to wait for a node that is gone, for strategies that need all; None for those that go on
        without it. Flower's own wait has no end.
    codec : of the control units' updates; the strategy gets trained weights. None: these are what is sent.
    borne : rounds in a row that may pass without any client's answer, once there was one
    count_bytes : whether weights that go up and down count; they do not where they travel for evaluation alone
    on_train : called with the round and its clusters before these are asked to train
    """

    def __init__(
        self,
        grid: Grid,
        clusters: Mapping[int, int],
        all_needed_s: float | None = None,
        *,
        codec: UpdateCodec | None = None,
        borne: int = 0,
        count_bytes: bool = True,
        on_train: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        super().__init__(grid)
        self._clusters = dict(clusters)
        self._all_needed_s = all_needed_s
        self._codec = codec
        self._borne = borne
        self._empty: int | None = None
        """Rounds in a row without an answer; None before the first answer."""
        self._count_bytes = count_bytes
        self._on_train = on_train
        self.last_reports: list[dict[str, Any]] = []
        """The control units' reports of the last training exchange."""
        self.last_round: dict[str, Any] = {}
        """Of the last training exchange: ``train_loss``, ``messages_s``, ``bytes_down``, ``bytes_up``, ``clusters``
        (the control units' reports), ``failed`` and ``faults``."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the run's nodes that are connected, in the order of their clusters.

        Raises
        ------
        RoundFailed
            If all are needed and one stays away for too long; the message names its cluster.
        """
        deadline = time.monotonic() + (self._all_needed_s or 0.0)
        while True:
            present = set(self._grid.get_node_ids())
            missing = sorted(cluster for node, cluster in self._clusters.items() if node not in present)
            if not missing or self._all_needed_s is None:
                return [node for node in sorted(self._clusters, key=self._clusters.__getitem__) if node in present]
            if time.monotonic() > deadline:
                raise RoundFailed(f"clusters {missing} have not been connected for {self._all_needed_s:g} s")
            time.sleep(0.5)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        return (node for node in self._grid.get_nodes() if node.node_id in self._clusters)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange messages; replies come in the order of the clusters, so that sums repeat bit for bit.

        Raises
        ------
        RoundFailed
            If this was a training exchange and no reply came without an error.
        """
        sent = list(messages)
        if self._on_train is not None and sent and sent[0].metadata.message_type == MessageType.TRAIN:
            self._on_train(_round_of(sent), [self._clusters[message.metadata.dst_node_id] for message in sent])
        start = time.perf_counter()
        replies = list(self._grid.send_and_receive(sent, timeout=timeout)) if sent else []
        replies.sort(key=lambda reply: self._clusters.get(reply.metadata.src_node_id, -1))
        if sent and sent[0].metadata.message_type == MessageType.TRAIN:
            bytes_up = self._bytes([reply for reply in replies if not reply.has_error()])
            begun = {message.metadata.dst_node_id: message for message in sent}
            replies = [self._checked(reply, begun[reply.metadata.src_node_id]) for reply in replies]
            self._record(sent, replies, time.perf_counter() - start, bytes_up)
        return replies

    def _checked(self, reply: Message, order: Message) -> Message:
        """Return a reply with the trained weights in place of the update; an error's reply if they are none."""
        if reply.has_error():
            return reply
        try:
            if self._codec is not None:
                trained = self._codec.apply(to_tensors(sole_arrays(order)), to_tensors(sole_arrays(reply)))
                reply.content[ARRAYS] = to_arrays(trained)
            if (name := not_finite(sole_arrays(reply))) is not None:
                raise UpdateError(f"update of {name}: NaN or Inf: training diverged on the control unit")
            check_answer(reply)
        except UpdateError as error:
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(error)), reply_to=order)
        return reply

    def take_round(self) -> dict[str, Any]:
        """Return the record of the last training exchange, once."""
        record, self.last_round = self.last_round, {}
        return record

    def _record(self, sent: list[Message], replies: list[Message], seconds: float, bytes_up: int) -> None:
        good = [reply for reply in replies if not reply.has_error()]
        number = _round_of(sent)
        reasons: dict[int, str] = {}
        faults: list[dict[str, Any]] = []
        for reply in replies:
            cluster = self._clusters.get(reply.metadata.src_node_id, -1)
            if reply.has_error():
                reasons[cluster], told = read_failure(reply.error.reason)
                kind = "nan" if "NaN or Inf" in reasons[cluster] else "cluster"
                faults += told or [_lost(kind, cluster, number, reasons[cluster])]
            else:
                faults += read_report(reply).get("faults", [])
        answered = {reply.metadata.src_node_id for reply in replies}
        for message in sent:
            node = message.metadata.dst_node_id
            if node not in answered:
                cluster = self._clusters.get(node, -1)
                reasons[cluster] = "no reply in time"
                faults.append(_lost("cluster", cluster, number, reasons[cluster]))
        weights = [read_metric(reply, WEIGHT_KEY) for reply in good]
        loss_sum = sum(read_metric(reply, "loss") * w for reply, w in zip(good, weights, strict=True))
        self.last_reports = [read_report(reply) for reply in good]
        self.last_round = {
            "train_loss": loss_sum / sum(weights) if good else math.nan,
            "weight": sum(weights),
            "messages_s": seconds,
            "bytes_down": self._bytes(sent),
            "bytes_up": bytes_up,
            "clusters": self.last_reports,
            "failed": [{"cluster": cluster, "reason": reason} for cluster, reason in sorted(reasons.items())],
            "faults": faults,
        }
        for fault in faults:
            log(WARNING, "round %d: %s", number, told_fault(fault))
        if good:
            self._empty = 0
            return
        listed = "; ".join(f"cluster {cluster}: {reason}" for cluster, reason in sorted(reasons.items()))
        if self._empty is None or self._empty >= self._borne:
            raise RoundFailed(f"round {number}: every client failed: {listed}")
        self._empty += 1
        log(WARNING, "round %d: every client failed, the model stays as it was: %s", number, listed)

    def _bytes(self, messages: list[Message]) -> int:
        return sum(array_bytes(message) for message in messages) if self._count_bytes else 0


def array_bytes(message: Message) -> int:
    """Bytes of a message's arrays, as they are sent."""
    return sum(record.count_bytes() for record in message.content.array_records.values())


def check_answer(reply: Message) -> None:
    """Raise UpdateError for an answer whose numbers and report nobody could add up."""
    try:
        for key in (WEIGHT_KEY, "loss", "steps"):
            if not math.isfinite(value := read_metric(reply, key)):
                raise UpdateError(f"{key} = {value}: NaN or Inf: training diverged on the control unit")
            if value < 0 and key != "loss":
                raise UpdateError(f"{key}: expected at least 0, found {value:g}")
        read_report(reply)
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        if isinstance(error, UpdateError):
            raise
        raise UpdateError(f"expected a control unit's answer with numbers and a report, found {error!r}") from error


def not_finite(arrays: ArrayRecord) -> str | None:
    """Name of an array that holds NaN or Inf; None if all are finite."""
    for name, array in arrays.items():
        values = array.numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            return name
    return None


def told_fault(fault: Mapping[str, Any]) -> str:
    """A fault in words, for the log."""
    who = "".join(f", {name} {fault[name]}" for name in ("cluster", "device") if fault.get(name) is not None)
    end = "the round was lost"
    if fault.get("recovered"):
        seconds = fault.get("seconds")
        end = "the round went on" if seconds is None else f"the round went on after {seconds:.1f} s"
    return f"fault ({fault.get('kind')}{who}, step {fault.get('step')}): {end}: {fault.get('reason', '')}"


def _lost(kind: str, cluster: int, number: int, reason: str) -> dict[str, Any]:
    return FaultRecord(kind=kind, cluster=cluster, round=number, recovered=False, reason=reason).to_dict()


def _round_of(orders: list[Message]) -> int:
    return int(cast(int, orders[0].content.config_records[CONFIG][ROUND_KEY]))
