"""Grid that passes everything on to Flower's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class ForwardingGrid(Grid):
    """Passes everything on; classes that derive from it say what they do otherwise.

    Parameters
    ----------
    grid : Flower's own, or another of ours around it
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Any) -> None:
        """See Grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """See Grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """See Grid."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def innermost(grid: Grid) -> Grid:
    """Return Flower's own grid behind all that forward to it."""
    while isinstance(grid, ForwardingGrid):
        grid = grid._grid
    return grid
