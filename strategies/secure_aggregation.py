"""SecAgg+ (Bell et al., CCS 2020) on a round's updates: the server learns their weighted mean, and none of them.

Flower has the protocol for its older strategies: a mod on the clients, and a workflow whose four stages each are an
exchange of messages. Here a grid runs the stages in place of the one exchange of a training round, so that any strategy
that takes means works on top: every reply then brings the mean. Losses, targets and reports stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import WARNING
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from strategies.forwarding_grid import ForwardingGrid
from strategies.records import ARRAYS, CONFIG, METRICS, REPORT, ROUND_KEY, WEIGHT_KEY

FEWEST_CLUSTERS = 3
"""Of two, each could take its own update off the mean."""
CLIPPING_RANGE = 8.0
"""Weights beyond it are cut: Flower's protocol computes with whole numbers."""
_FITRES = "fitres"


def as_older_reply(reply: Message) -> Message:
    """Add to a control unit's reply the records that Flower's mod for SecAgg+ reads."""
    if not reply.has_error():
        content = reply.content
        arrays = content.array_records[ARRAYS]
        weight = int(float(content.metric_records[METRICS][WEIGHT_KEY]))  # type: ignore[arg-type]
        content[f"{_FITRES}.parameters"] = ArrayRecord({str(i): a for i, a in enumerate(arrays.values())})
        content[f"{_FITRES}.num_examples"] = MetricRecord({"num_examples": weight})
        content[f"{_FITRES}.metrics"] = ConfigRecord({})
        content[f"{_FITRES}.status"] = ConfigRecord({"code": int(Code.OK.value), "message": ""})
    return reply


def secure_mod(message: Message, context: Any, call_next: ClientAppCallable) -> Message:
    """The client's end: Flower's ``secaggplus_mod`` around a training round."""
    from flwr.client.mod import secaggplus_mod

    return secaggplus_mod(message, context, lambda m, c: as_older_reply(call_next(m, c)))


class SecureGrid(ForwardingGrid):
    """Passes everything on to ``grid``, and trains by SecAgg+.

    Parameters
    ----------
    grid : Flower's own
    max_weight : most targets of a cluster in a round; the protocol computes with shares of it
    """

    def __init__(self, grid: Grid, max_weight: float) -> None:
        super().__init__(grid)
        self._max_weight = max_weight

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Exchange messages; those of a training round in the four stages of the protocol."""
        sent = list(messages)
        if not sent or sent[0].metadata.message_type != MessageType.TRAIN:
            return self._grid.send_and_receive(sent, timeout=timeout)
        return self._train(sent, timeout)

    def _train(self, sent: list[Message], timeout: float | None) -> list[Message]:
        from flwr.server.workflow import SecAggPlusWorkflow
        from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

        _check_range(sent[0])
        orders = {message.metadata.dst_node_id: message for message in sent}
        # All hold shares of each other's keys; two of three, and so on, must be there in the end.
        workflow = SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=0.67,
            max_weight=self._max_weight,
            clipping_range=CLIPPING_RANGE,
            timeout=timeout,
        )
        joined: list[Parameters] = []
        context: Any = _older_context(orders, joined)
        state: Any = WorkflowState()
        errors: dict[int, str] = {}
        replies: list[Message] = []
        stages = workflow.setup_stage, workflow.share_keys_stage, workflow.collect_masked_vectors_stage
        for number, stage in enumerate((*stages, workflow.unmask_stage)):
            listening = _Listening(self._grid)
            going_on = stage(listening, context, state)  # type: ignore[arg-type]
            errors |= {m.metadata.src_node_id: str(m.error.reason) for m in listening.heard if m.has_error()}
            if number == 0:
                # The workflow would send what an older strategy has to say.
                state.nid_to_fitins = {node: message.content for node, message in orders.items()}
            if number == 2:
                replies = [reply for reply in listening.heard if not reply.has_error()]
            if not going_on:
                log(WARNING, "secure aggregation: too few clusters are left after stage %d of 4", number + 1)
                joined.clear()
                break
        return [self._answer(order, replies, errors, joined) for order in orders.values()]

    def _answer(
        self, order: Message, replies: list[Message], errors: dict[int, str], joined: list[Parameters]
    ) -> Message:
        """Return a cluster's reply with the mean in place of what it masked."""
        node = order.metadata.dst_node_id
        mine = next((reply for reply in replies if reply.metadata.src_node_id == node), None)
        if mine is None or not joined:
            reason = errors.get(node, "too few clusters answered for a secure mean")
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=order)
        names = order.content.array_records[ARRAYS]
        mean = zip(names.items(), parameters_to_ndarrays(joined[0]), strict=True)
        arrays = ArrayRecord({name: Array(value.reshape(a.shape).astype("float32")) for (name, a), value in mean})
        content = RecordDict({ARRAYS: arrays, METRICS: mine.content[METRICS], REPORT: mine.content[REPORT]})
        return Message(content, reply_to=order)


class _Listening:
    """The grid as a stage of the workflow uses it; keeps what came back."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.heard: list[Message] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        self.heard = list(self._grid.send_and_receive(messages, timeout=timeout))
        return self.heard


def _check_range(order: Message) -> None:
    """Refuse weights that the protocol's whole numbers do not reach."""
    for name, array in order.content.array_records[ARRAYS].items():
        largest = float(np.abs(array.numpy()).max(initial=0.0))
        if not largest < CLIPPING_RANGE:
            raise ValueError(
                f"privacy.secure-aggregation: {name} holds {largest:g}, and computes between -{CLIPPING_RANGE:g} and "
                f"{CLIPPING_RANGE:g}; lower optimizer.lr, or leave it out"
            )


def _older_context(orders: dict[int, Message], joined: list[Parameters]) -> Any:
    """What the workflow asks of its context: a round's number, who takes part, and where the mean goes."""
    number = next(iter(orders.values())).content.config_records[CONFIG][ROUND_KEY]

    def configure_fit(*_: Any) -> list[tuple[Any, FitIns]]:
        nothing = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in orders]

    def aggregate_fit(_: int, results: list[tuple[Any, FitRes]], failures: Any) -> tuple[None, dict[str, Any]]:
        del failures
        joined.append(results[0][1].parameters)
        return None, {}

    records = RecordDict({"config": ConfigRecord({"current_round": number}), "parameters": ArrayRecord({})})
    return SimpleNamespace(
        state=records,
        strategy=SimpleNamespace(configure_fit=configure_fit, aggregate_fit=aggregate_fit),
        client_manager=SimpleNamespace(num_available=lambda: len(orders)),
    )
