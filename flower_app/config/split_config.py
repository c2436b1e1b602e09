"""Table ``[split]`` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

SERVER, CLUSTER = "server", "cluster"


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Table ``[split]``: where the model is cut between a cluster and the server."""

    labels: str = SERVER
    """Machine that has the labels and computes the loss. ``server``: every micro-batch brings them to it. ``cluster``:
    the control unit; of a language model of the transformers library the server keeps its ``model.decoder-layers`` and
    returns their states, of any other model it keeps nothing, and the whole decoder or head is the cluster's."""

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        if self.labels not in (SERVER, CLUSTER):
            raise ValueError(f"split.labels: expected one of {SERVER}, {CLUSTER}, found {self.labels!r}")
