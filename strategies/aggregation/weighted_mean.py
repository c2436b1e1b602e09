"""The weighted mean of a round's updates, one array after the other: the same bits as Flower's FedAvg, in less memory.

FedAvg adds up one reply after the other and then packs the sums: beside the replies it holds the model twice. Here an
array is read from each reply, added, and packed before the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from strategies.npy_bytes import array_values
from strategies.records import read_metric, sole_arrays


class WeightedMean(FedAvg):
    """FedAvg whose :meth:`aggregate_train` holds less in memory."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average; without a good reply nothing changes."""
        good, _ = self._check_and_log_replies(replies, is_train=True)
        if not good:
            return None, None
        counts = [read_metric(reply, self.weighted_by_key) for reply in good]
        total = sum(counts)
        arrays = weighted_mean([sole_arrays(reply) for reply in good], [count / total for count in counts])
        return arrays, self.train_metrics_aggr_fn([reply.content for reply in good], self.weighted_by_key)


def weighted_mean(updates: Sequence[ArrayRecord], weights: Sequence[float]) -> ArrayRecord:
    """Sum weight x array over the updates, for each array.

    Parameters
    ----------
    updates : one at least; all with the arrays of the first
    weights : of each update; numpy's rules give the type of float x array, and the first update's type stays

    Returns
    -------
    The sums, in the first update's order. This order and that of the additions are FedAvg's.
    """
    mean = ArrayRecord()
    for name in updates[0]:
        values: Any = array_values(updates[0][name]) * weights[0]
        for update, weight in zip(updates[1:], weights[1:], strict=True):
            values += array_values(update[name]) * weight
        # numpy turns arrays without dimensions into scalars.
        mean[name] = Array(np.asarray(values))
    return mean
