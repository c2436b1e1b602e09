"""Where each cluster stands in a round, for whoever waits for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Standing(NamedTuple):
    """Where one cluster is in a round of the decoder."""

    place: str
    """``awaited`` (it has not joined), ``trains``, ``away`` (its stream is cut), ``finished``, ``left`` (somebody said
    so for it) or ``lost`` (it was too late)."""
    since: float
    """Since when; for ``trains``: when it was heard last [s, monotonic]."""
    reason: str
    """In words."""


class WatchedRound(Protocol):
    """A round of the decoder, as a grid sees it: :class:`strategies.decoder.round.DecoderRound`."""

    def standings(self) -> Mapping[int, Standing]:
        """Where each cluster is. Never waits for the decoder."""
        ...

    def give_up(self, cluster: int, reason: str) -> None:
        """Take a cluster out of the round, as no more is to come from it."""
        ...


class WatchedDecoder(Protocol):
    """The decoder of a run, as a grid sees it: :class:`strategies.decoder.trainer.DecoderTrainer`."""

    @property
    def current(self) -> WatchedRound:
        """The round that was opened last."""
        ...
