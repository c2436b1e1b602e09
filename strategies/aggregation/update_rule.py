"""Rules that join a round's updates: Flower's, and a user's by ``aggregator.name = module:Class``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from strategies.flower_names import log
from strategies.npy_bytes import array_values
from strategies.records import WEIGHT_KEY, read_metric, sole_arrays

if TYPE_CHECKING:
    from strategies.aggregation.config import AggregatorConfig

Update = dict[str, NDArray[Any]]
"""A cluster's change of each array of the encoder, by name."""


class OnUpdates(FedAvg):
    """Adapter that hands the next Flower strategy in the MRO a round's changes instead of its weights.

    Parameters
    ----------
    config : the table ``[aggregator]``
    num_clusters : of a round
    arguments : of the strategy
    """

    keeps: ClassVar[Literal["nothing", "unknown"]] = "unknown"
    """State kept from round to round. ``unknown``: a state that no checkpoint holds, so that the run cannot be
    resumed."""

    def __init__(self, config: AggregatorConfig, num_clusters: int, **arguments: Any) -> None:
        super().__init__(weighted_by_key=WEIGHT_KEY, **arguments)
        self.config = config
        self.num_clusters = num_clusters
        self.current_arrays = ArrayRecord()
        """Arrays at the start of the round."""

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        """Return the fewest answers that tolerate ``malicious`` arbitrary ones among them."""
        del config, malicious
        return 1

    def borne(self, num_answers: int, num_failed: int) -> int | None:
        """Return the number of answers that count as malicious; None if there are too few answers.

        With enough answers it is f. With fewer it is f less the failed clusters of the round, because a cluster that
        sends no answer, or a wrong one, can do no more harm in this round.
        """
        for f in (self.config.malicious, self.config.malicious - num_failed):
            if f >= 0 and num_answers >= self.fewest(self.config, f):
                return f
        return None

    def size(self, num_updates: int, malicious: int) -> None:
        """Prepare for the number of updates, and of poisoned ones among them."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate; without enough replies nothing changes."""
        good = [reply for reply in replies if not reply.has_error()]
        malicious = self.borne(len(good), self.num_clusters - len(good)) if good else None
        if malicious is None:
            log(
                WARNING,
                "aggregate_train: round %d: %s needs %d clusters, %d answered; the encoder stays as it was",
                server_round,
                self.config.name,
                self.fewest(self.config, self.config.malicious),
                len(good),
            )
            return None, None
        self.size(len(good), malicious)
        start = {name: array_values(array) for name, array in self.current_arrays.items()}
        for reply in good:
            (key,) = reply.content.array_records
            arrays = sole_arrays(reply)
            reply.content[key] = ArrayRecord(
                # numpy turns arrays without dimensions into scalars.
                {n: Array(np.asarray(array_values(arrays[n]) - start[n])) for n in start}
            )
        change, metrics = self.change_of(server_round, good, malicious)
        if change is None:
            return None, metrics
        joined = {n: np.asarray(start[n] + array_values(change[n]).astype(start[n].dtype)) for n in start}
        return ArrayRecord({n: Array(value) for n, value in joined.items()}), metrics

    def change_of(
        self, server_round: int, good: list[Message], malicious: int
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join replies that hold changes; returns the encoder's change, and the metrics."""
        del malicious
        return super().aggregate_train(server_round, good)


class UpdateRule(OnUpdates):
    """Base class of a user's rule: :meth:`join` joins a round's updates; the decoder is trained, not joined.

    Its class attributes declare its traits to the run. :meth:`fewest` gives the number of clusters that it needs.
    """

    @abstractmethod
    def join(self, updates: Sequence[Update], weights: Sequence[float], malicious: int) -> Update:
        """Return the encoder's change.

        Parameters
        ----------
        updates : of each cluster that counts, one at least, in the order of their numbers
        weights : targets that each cluster trained on
        malicious : number of clusters that may have sent arbitrary updates
        """

    def change_of(
        self, server_round: int, good: list[Message], malicious: int
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join the updates by :meth:`join`, and the metrics by their weighted mean.

        Raises
        ------
        ValueError
            For a change of other arrays than the encoder's, or of NaN or Inf.
        """
        updates = [{name: array_values(array) for name, array in sole_arrays(reply).items()} for reply in good]
        weights = [float(read_metric(reply, WEIGHT_KEY)) for reply in good]
        change = self.join(updates, weights, malicious)
        where = f"aggregator.name: {self.config.name}: round {server_round}: join"
        if not isinstance(change, dict) or change.keys() != updates[0].keys():
            found = sorted(change) if isinstance(change, dict) else change
            raise ValueError(
                f"{where}: expected a change for each of the {len(updates[0])} arrays by name, found {found!r:.200}"
            )
        for name, of_first in updates[0].items():
            value = np.asarray(change[name])
            if value.shape != of_first.shape or not np.isfinite(value).all():
                raise ValueError(
                    f"{where}: {name}: expected finite numbers {list(of_first.shape)}, found {list(value.shape)}"
                    f"{'' if np.isfinite(value).all() else ' with NaN or Inf'}"
                )
        metrics = self.train_metrics_aggr_fn([reply.content for reply in good], self.weighted_by_key)
        return ArrayRecord({name: Array(np.asarray(value)) for name, value in change.items()}), metrics
