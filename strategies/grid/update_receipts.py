"""Updates that are in the average: a control unit must know them before it forgets the rest of a compression."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flwr.app import Message, MessageType

from strategies.records import CONFIG, COUNTED_KEY


class UpdateReceipts:
    """The last round of each cluster whose update counted.

    Flower's robust rules do not say which updates they took: what reached one counts as taken.

    Parameters
    ----------
    clusters : of the run
    """

    def __init__(self, clusters: Collection[int]) -> None:
        self._counted = [0] * (max(clusters, default=-1) + 1)
        self._previous_counts = list(self._counted)

    def tell(self, orders: Iterable[Message]) -> None:
        """Add to a round's orders what counted so far; one list for all, as their configuration may be one."""
        for order in orders:
            if order.metadata.message_type == MessageType.TRAIN:
                order.content.config_records[CONFIG][COUNTED_KEY] = list(self._counted)

    def note(self, round_: int, clusters: Iterable[int]) -> None:
        """Note whose updates go into a round's average."""
        self._previous_counts = list(self._counted)
        for cluster in clusters:
            self._counted[cluster] = round_

    def withdraw(self, clusters: Iterable[int]) -> None:
        """Take back what was noted last of clusters that were left out after all."""
        for cluster in clusters:
            self._counted[cluster] = self._previous_counts[cluster]

    def state(self) -> list[int]:
        """Return the state that a continued run needs, as JSON values."""
        return list(self._counted)

    def restore(self, state: Sequence[int]) -> None:
        """Go on from :meth:`state`."""
        self._counted = [int(round_) for round_ in state]
        self._previous_counts = list(self._counted)
