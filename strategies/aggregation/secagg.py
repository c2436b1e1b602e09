"""SecAgg+ (Bell et al., CCS 2020) on a round's updates: the server learns their weighted mean, and none of them.

Flower has the protocol for its older strategies: a mod on the clients, and a workflow whose four stages each are an
exchange of messages. Here a grid runs the stages in place of the one exchange of a training round, so that any strategy
that takes means works on top: every reply then brings the mean. Losses, targets and reports stay readable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from logging import WARNING
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.aggregation.secagg_masks import use_whole_seeds
from strategies.aggregation.secagg_replies import STAGES, unfit
from strategies.flower_internals import ClientAppCallable, Code, FitIns, FitRes, Parameters, log, parameters_to_ndarrays
from strategies.grid.forwarding import ForwardingGrid
from strategies.grid.reply_matching import failed, match_replies
from strategies.grid.update_spool import SpoolError
from strategies.npy_bytes import array_values
from strategies.records import ARRAYS, CONFIG, METRICS, REPORT, ROUND_KEY, WEIGHT_KEY

FEWEST_CLUSTERS = 3
"""Of two, each could take its own update off the mean."""
CLIPPING_RANGE = 8.0
"""Weights beyond it are cut: Flower's protocol computes with whole numbers."""
_FITRES = "fitres"


def as_older_reply(reply: Message) -> Message:
    """Add to a control unit's reply the records that Flower's mod for SecAgg+ reads.

    Raises
    ------
    ValueError
        If a weight is NaN, Inf or out of range: made a whole number it would be part of everybody's mean.
    """
    content = reply.content
    arrays = {name: array_values(array) for name, array in content.array_records[ARRAYS].items()}
    for name, values in arrays.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or Inf: training diverged; lower optimizer.lr")
        _check_range(name, values)
    weight = int(float(content.metric_records[METRICS][WEIGHT_KEY]))  # type: ignore[arg-type]
    # The workflow loses the offset of arrays without dimensions; these get one, which the answer takes off again.
    older = {str(i): Array(np.ascontiguousarray(values)) for i, values in enumerate(arrays.values())}
    content[f"{_FITRES}.parameters"] = ArrayRecord(older)
    content[f"{_FITRES}.num_examples"] = MetricRecord({"num_examples": weight})
    content[f"{_FITRES}.metrics"] = ConfigRecord({})
    content[f"{_FITRES}.status"] = ConfigRecord({"code": int(Code.OK.value), "message": ""})
    return reply


def secure_mod(message: Message, context: Any, call_next: ClientAppCallable) -> Message:
    """The client's end: Flower's ``secaggplus_mod`` around a training round, with masks of our own.

    Raises
    ------
    RuntimeError, ValueError
        If the round fails, or its weights cannot be masked: no answer but the reason may leave the cluster.
    """
    from strategies.flower_internals import secaggplus_mod

    def older_reply(m: Message, c: Any) -> Message:
        reply = call_next(m, c)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        return as_older_reply(reply)

    use_whole_seeds()
    return secaggplus_mod(message, context, older_reply)


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

    def _train(self, messages: list[Message], timeout: float | None) -> list[Message]:
        from strategies.flower_internals import SecAggPlusWorkflow, WorkflowState

        use_whole_seeds()
        arrays = messages[0].content.array_records[ARRAYS]
        for name, array in arrays.items():
            _check_range(name, array_values(array))
        orders = {message.metadata.dst_node_id: message for message in messages}
        # All hold shares of each other's keys; two of three, and so on, must be there in the end.
        workflow = SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=0.67,
            max_weight=self._max_weight,
            clipping_range=CLIPPING_RANGE,
            timeout=timeout,
        )
        sums: list[Parameters] = []
        context: Any = _older_context(orders, sums)
        state: Any = WorkflowState()
        errors: dict[int, str] = {}
        replies: dict[int, Message] = {}
        stages = workflow.setup_stage, workflow.share_keys_stage, workflow.collect_masked_vectors_stage
        for number, stage in enumerate((*stages, workflow.unmask_stage)):
            listening = _Listening(self._grid, STAGES[number], orders, arrays)
            try:
                going_on = stage(listening, context, state)  # type: ignore[arg-type]
            except SpoolError:
                raise
            except Exception as error:
                # Shares that do not fit each other show only here, and not whose they are.
                log(WARNING, "secure aggregation: stage %d of 4 failed: %r", number + 1, error)
                going_on = False
            errors |= {node: str(m.error.reason) for node, m in listening.answers.items() if m.has_error()}
            if number == 0:
                # The workflow would send what an older strategy has to say.
                state.nid_to_fitins = {node: message.content for node, message in orders.items()}
            if number == 1:
                # Who has left by now has no mask in any vector. The workflow would ask for shares of its key, which
                # nobody was given, and lose all others with it.
                state.sampled_node_ids = set(state.active_node_ids)
                neighbours = state.nid_to_neighbours.items()
                state.nid_to_neighbours = {node: near & state.active_node_ids for node, near in neighbours}
            if number == 2:
                replies = {node: reply for node, reply in listening.answers.items() if not reply.has_error()}
            if not going_on:
                log(WARNING, "secure aggregation: too few clusters are left after stage %d of 4", number + 1)
                sums.clear()
                break
        mean = _mean_of(sums, arrays)
        return [self._answer(order, replies, errors, mean) for order in orders.values()]

    def _answer(
        self, order: Message, replies: dict[int, Message], errors: dict[int, str], mean: ArrayRecord | str
    ) -> Message:
        """Return a cluster's reply with the mean in place of what it masked."""
        node = order.metadata.dst_node_id
        reply = replies.get(node)
        if reply is None or isinstance(mean, str):
            return failed(order, errors.get(node, mean if isinstance(mean, str) else "no masked update arrived"))
        content = RecordDict({ARRAYS: mean.copy(), METRICS: reply.content[METRICS], REPORT: reply.content[REPORT]})
        return Message(content, reply_to=order)


class _Listening:
    """The grid as a stage of the workflow uses it; keeps what came back, and makes errors of what is unfit."""

    def __init__(self, grid: Grid, stage: str, nodes: Collection[int], arrays: ArrayRecord) -> None:
        self._grid, self._stage, self._nodes, self._arrays = grid, stage, nodes, arrays
        self.answers: dict[int, Message] = {}
        """Each asked node's answer, where it gave one."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        answers = match_replies(sent, self._grid.send_and_receive(sent, timeout=timeout))
        self.answers = {
            order.metadata.dst_node_id: self._checked(order, answer)
            for order, answer in zip(sent, answers, strict=True)
            if answer is not None
        }
        return list(self.answers.values())

    def _checked(self, order: Message, answer: Message) -> Message:
        wrong = None if answer.has_error() else unfit(answer, self._stage, self._nodes, self._arrays)
        return answer if wrong is None else failed(order, f"secure aggregation: {wrong}")


def _mean_of(sums: list[Parameters], arrays: ArrayRecord) -> ArrayRecord | str:
    """The mean by name, of the arrays' shapes; or why there is none."""
    if not sums:
        return "too few clusters answered for a secure mean"
    mean = {}
    for (name, array), values in zip(arrays.items(), parameters_to_ndarrays(sums[0]), strict=True):
        # What is no sum of quantised weights: a mask was left, as one client's lie leaves it.
        if not np.abs(values).max(initial=0.0) <= CLIPPING_RANGE:
            return f"the secure mean of {name} is invalid: a cluster has not masked its update correctly"
        mean[name] = Array(values.reshape(array.shape).astype("float32"))
    return ArrayRecord(mean)


def _check_range(name: str, values: NDArray[Any]) -> None:
    """Refuse weights that the protocol's whole numbers do not reach."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest < CLIPPING_RANGE:
        raise ValueError(
            f"privacy.secure-aggregation: {name} holds {largest:g}, and computes between -{CLIPPING_RANGE:g} and "
            f"{CLIPPING_RANGE:g}; lower optimizer.lr, or leave it out"
        )


def _older_context(orders: dict[int, Message], sums: list[Parameters]) -> Any:
    """What the workflow asks of its context: a round's number, who takes part, and where the mean goes."""
    number = next(iter(orders.values())).content.config_records[CONFIG][ROUND_KEY]

    def configure_fit(*_: Any) -> list[tuple[Any, FitIns]]:
        nothing = FitIns(Parameters([], ""), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in orders]

    def aggregate_fit(_: int, results: list[tuple[Any, FitRes]], failures: Any) -> tuple[None, dict[str, Any]]:
        del failures
        sums.append(results[0][1].parameters)
        return None, {}

    records = RecordDict({"config": ConfigRecord({"current_round": number}), "parameters": ArrayRecord({})})
    return SimpleNamespace(
        state=records,
        strategy=SimpleNamespace(configure_fit=configure_fit, aggregate_fit=aggregate_fit),
        client_manager=SimpleNamespace(num_available=lambda: len(orders)),
    )
