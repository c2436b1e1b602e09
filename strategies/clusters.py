"""State of each cluster, as its control unit reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from client_pipeline.system.devices import DeviceProfile

_SOME, _ANY = (1e-30, 1e21), (0.0, 1e21)
DEVICE_RANGES = {
    "flop_per_cycle": _SOME,
    "frequency": _SOME,
    "memory": _ANY,
    "kappa": _ANY,
    "energy_budget_j": _ANY,
    "link_power_w": _ANY,
    "link_bandwidth_hz": _SOME,
    "link_gain": _SOME,
    "link_interference_w": _ANY,
}
"""Least and most of each number of a device that a control unit may report: products of them stay finite."""


@dataclass(kw_only=True)
class ClusterState:
    """One cluster, as its control unit last reported it."""

    cluster: int
    node_id: int
    devices: tuple[DeviceProfile, ...]
    block_memory: float
    """gamma_0 [byte]."""
    num_examples: int
    last_loss: float | None = None
    """Mean training loss of the last round that it trained in."""

    @property
    def speeds(self) -> list[float]:
        """phi_k f_k of each device [FLOP/s]."""
        return [device.speed for device in self.devices]

    @property
    def memories(self) -> list[float]:
        """Memory of each device [byte]."""
        return [device.memory for device in self.devices]

    def note_round(self, loss: float | None, report: ClusterState | None = None) -> None:
        """Note the loss of a round that it trained in, and what its control unit now says of devices and examples."""
        self.last_loss = loss
        if report is not None:
            self.devices, self.num_examples = report.devices, report.num_examples

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as a control unit reports them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ClusterState:
        """Read what :meth:`to_dict` wrote."""
        return cls(**{**raw, "devices": tuple(DeviceProfile(**device) for device in raw["devices"])})


def check_clusters(clusters: Sequence[ClusterState], num_clusters: int) -> None:
    """Refuse two nodes that claim one cluster, and clusters that no node claims.

    Raises
    ------
    ValueError
        Naming the nodes, or the clusters.
    """
    node_by_cluster: dict[int, int] = {}
    for state in clusters:
        if state.cluster in node_by_cluster:
            raise ValueError(
                f"nodes {node_by_cluster[state.cluster]} and {state.node_id} both say they are cluster "
                f"{state.cluster}; give each node its own partition-id"
            )
        node_by_cluster[state.cluster] = state.node_id
    if missing := sorted(set(range(num_clusters)) - node_by_cluster.keys()):
        raise ValueError(
            f"num-clusters: no node is cluster {', '.join(map(str, missing))} of {num_clusters}; give the nodes the "
            f"partition-ids 0 to {num_clusters - 1}"
        )
