"""What joins a round's updates: Flower's rules, and anybody's by ``aggregator.name = module:Class``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from strategies.flower_internals import log
from strategies.npy_bytes import array_values
from strategies.records import WEIGHT_KEY, read_metric, sole_arrays

if TYPE_CHECKING:
    from strategies.aggregation.config import AggregatorConfig

Update = dict[str, NDArray[Any]]
"""What a cluster changed of each array of the encoder, by name."""


class OnUpdates(FedAvg):
    """Hands one of Flower's strategies, the next in line, the changes of a round in place of its weights.

    Parameters
    ----------
    config : the table ``[aggregator]``
    num_clusters : of a round
    arguments : of the strategy
    """

    mean_alone: ClassVar[bool] = False
    """Whether it looks at nothing but the updates' weighted mean: the server may then be shown the mean in place of
    each update, as ``privacy.secure-aggregation`` does."""
    keeps: ClassVar[Literal["nothing", "unknown"]] = "unknown"
    """What it remembers from round to round. ``unknown``: something that no checkpoint holds, so that the run cannot be
    resumed."""

    def __init__(self, config: AggregatorConfig, num_clusters: int, **arguments: Any) -> None:
        super().__init__(weighted_by_key=WEIGHT_KEY, **arguments)
        self.config = config
        self.num_clusters = num_clusters
        self.current_arrays = ArrayRecord()
        """What the round began with."""

    @classmethod
    def fewest(cls, config: AggregatorConfig, malicious: int) -> int:
        """Return how many clusters must answer where so many of them may have sent anything."""
        del config, malicious
        return 1

    def borne(self, num_answers: int, num_failed: int) -> int | None:
        """How many of the answers are taken for malicious; None if there are too few.

        All f, as long as there are enough answers. Of fewer, f less the clusters of the round that failed: whoever does
        not answer, or not as ordered, has done its worst in this round.
        """
        for f in (self.config.malicious, self.config.malicious - num_failed):
            if f >= 0 and num_answers >= self.fewest(self.config, f):
                return f
        return None

    def size(self, num_updates: int, malicious: int) -> None:
        """Get ready for so many updates, and so many poisoned ones among them."""

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
                # Of arrays without dimensions numpy makes scalars.
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
    """A rule of one's own: :meth:`join` says what becomes of a round's updates; the decoder is trained, not joined.

    Its class attributes say what the run around it must know, :meth:`fewest` how many clusters it needs.
    """

    @abstractmethod
    def join(self, updates: Sequence[Update], weights: Sequence[float], malicious: int) -> Update:
        """Return the encoder's change.

        Parameters
        ----------
        updates : of each cluster that counts, one at least, in the order of their numbers
        weights : targets that each cluster trained on
        malicious : how many of them may have sent anything
        """

    def change_of(
        self, server_round: int, good: list[Message], malicious: int
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join by :meth:`join`; of the metrics the weighted mean.

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
