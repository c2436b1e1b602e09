"""Traits of a strategy that the run around it must know: declared on its class, read everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keeps = Literal["nothing", "memory", "state", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Class attribute ``traits`` of a strategy. The defaults are those of anybody's strategy that declares none.

    Example
    -------
    >>> class Shown(SeparateModels):                             # doctest: +SKIP
    ...     traits = replace(SeparateModels.traits, uploads=True)
    """

    uploads: bool = True
    """True if trained weights go up after each round, and count as bytes and time. Otherwise weights
    travel for evaluation alone."""
    averages: bool = True
    """True if the round's arrays are one model. Otherwise they are a model for each cluster, named by
    :func:`strategies.separate_models.cluster_prefix`."""
    decoder_on_server: bool = False
    """True if the server trains the decoder on activations; the constructor then takes ``decoder``, its service.
    Otherwise each control unit trains it with the rest of the model, and uploads the whole model."""
    channel_for_each: bool = False
    """True if every cluster that trains has a channel of its own, under the policies of this package: then no more
    train at once than there are channels (C2, C3)."""
    takes_aggregator: bool = False
    """True if ``[aggregator]``, ``[server-optimizer]`` and the mechanisms of ``[privacy]`` join the updates;
    the constructor then takes ``aggregator``."""
    waives: tuple[str, ...] = ()
    """Constraints of the round's problem that its plans need not meet, such as ``"C7"``."""
    keeps: Keeps = "unknown"
    """State that a resumed run must restore beside the arrays. ``nothing``; the ``memory`` of one of Flower's server
    optimizers (:func:`strategies.aggregation.server_optimizers.memory_of`); its ``state()`` and the memory of its
    aggregator, which every :class:`~strategies.planned_strategy.PlannedStrategy` has; or ``unknown``: something that no
    checkpoint holds, so that the run cannot be resumed."""
