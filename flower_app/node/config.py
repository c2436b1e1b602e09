"""Configuration of a SuperNode: ``--node-config``, read once into a frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client_pipeline.link.address import LinkCertificates
from client_pipeline.plugins import is_within
from client_pipeline.system.devices import DeviceProfile
from client_pipeline.system.scenario import load_scenario

if TYPE_CHECKING:
    from flower_app.config.run_config import RunConfig

_STATE_DIR = "~/.collapipe"
"""Folder of a node that names none."""
CLASS_KEYS = ("task.name", "model.family")
"""Keys of a run's configuration that may name a class which control units import."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Settings of one control unit: those that differ from node to node, beside the run's configuration for all."""

    cluster: int
    """The cluster that this node is, from 0: ``partition-id``."""
    simulated: bool = False
    """Flower simulates the node."""
    data_path: str = ""
    """Folder of this cluster's text, in place of ``data.path``."""
    model_path: str = ""
    """Folder of the pretrained model, in place of ``model.pretrained``."""
    device_profile: str = ""
    """Scenario file that says what this cluster's devices are, as ``collapipe profile`` writes it: of this cluster
    alone, or of the whole network; empty: what the run's scenario says."""
    state_dir: str = ""
    """Folder of the control unit's checkpoints."""
    tls_certificate: str = ""
    """The CU's certificate for the decoder's stream (PEM)."""
    tls_key: str = field(default="", repr=False)
    """Path of its private key."""
    tls_ca: str = ""
    """Checks the decoder's certificate, in place of what the server sends."""
    ray_address: str = ""
    """``host:port`` of this cluster's own Ray, whose nodes are the devices. Empty: all actors run in the Ray that is
    here, the simulation's for instance."""
    host: str = ""
    """Address of the control unit that its devices reach, with ``ray-address``."""
    door: str = ""
    """Folder of the door at which this control unit answers with a trained model; empty: its owner has opened none."""
    modules: str = ""
    """Modules and packages, separated by commas, of whose classes a run may name some; see :meth:`check_classes`."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> NodeConfig:
        """Read a node's configuration; Flower has turned text into numbers and booleans where it could.

        Raises
        ------
        ValueError
            If there is no ``partition-id``, a key is unknown, or an address has only one half.
        """
        index = raw.get("partition-id")
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ValueError(
                f"node config: partition-id: expected the cluster's index from 0, found {index!r}; start the SuperNode "
                'with --node-config "partition-id=0"'
            )
        simulated = "num-partitions" in raw
        if unknown := sorted(raw.keys() - {"partition-id", "num-partitions", *KEYS}):
            raise ValueError(f"node config: unknown key {unknown[0]!r}; expected partition-id, {', '.join(KEYS)}")
        texts = {key.replace("-", "_"): str(raw.get(key, "")) for key in KEYS}
        node_config = cls(cluster=index, simulated=simulated, **texts)
        if bool(node_config.ray_address) != bool(node_config.host):
            raise ValueError("node config: ray-address and host: expected both or none, found one")
        return node_config

    def text(self) -> str:
        """Write it as ``flower-supernode --node-config`` takes it."""
        values = {key: str(getattr(self, key.replace("-", "_"))) for key in KEYS}
        for key, value in values.items():
            if '"' in value or "\n" in value:
                raise ValueError(f"node config: {key}: expected no quotation mark and no line break, found {value!r}")
        given = [f'{key}="{value}"' for key, value in values.items() if value]
        return " ".join([f"partition-id={self.cluster}", *given])

    @property
    def certificates(self) -> LinkCertificates:
        """Files for the decoder's stream."""
        return LinkCertificates(certificate=self.tls_certificate, key=self.tls_key, root_certificate=self.tls_ca)

    @property
    def folder(self) -> Path:
        """Folder of what the node keeps."""
        return Path(self.state_dir or _STATE_DIR).expanduser()

    @property
    def weight_cache(self) -> Path:
        """Folder of frozen weights that were pulled."""
        return self.folder / "weights"

    def run_config(self, config: RunConfig) -> RunConfig:
        """Return the run's configuration with this node's own folder of text.

        Raises
        ------
        ValueError
            If the node has no text of its own and needs some.
        """
        if config.data.partition == "nodes" and not (self.data_path or self.simulated):
            raise ValueError(
                f"node config of cluster {self.cluster}: data-path: expected the folder of its text with "
                "data.partition = nodes, found none; start the node with collapipe join --data FOLDER"
            )
        return replace(config, data=replace(config.data, path=self.data_path)) if self.data_path else config

    def check_classes(self, flat: Mapping[str, Any]) -> None:
        """Refuse a run that would have this node import what its owner has not allowed.

        Of the classes that a configuration names by ``module:Class``, a control unit and its devices import the task
        and the model family. In a simulation they are the user's own processes.
        """
        allowed = [name for name in self.modules.split(",") if name]
        for key in CLASS_KEYS:
            module, named, _ = str(flat.get(key, "")).partition(":")
            if named and not is_within(module, allowed) and not self.simulated:
                raise ValueError(
                    f"{key}: {flat[key]!r}: the control unit of cluster {self.cluster} imports no module that its "
                    f"owner has not allowed, found {', '.join(allowed) or 'none'} allowed; install it there and on its "
                    f"devices, and start it with collapipe join --allow-module {module}"
                )

    def devices(self, declared: tuple[DeviceProfile, ...]) -> tuple[DeviceProfile, ...]:
        """Return the cluster's devices: of its own profile, or as the run's scenario declares them.

        Raises
        ------
        ValueError, FileNotFoundError
            If the profile is no scenario file.
        """
        if not self.device_profile:
            return declared
        return profile_devices(self.device_profile, self.cluster)


KEYS = tuple(item.name.replace("_", "-") for item in fields(NodeConfig) if item.name not in ("cluster", "simulated"))
"""Keys of ours beside Flower's own ``partition-id``; each is a text, empty where it is left out."""


def profile_devices(profile: str, cluster: int) -> tuple[DeviceProfile, ...]:
    """Return the devices of a cluster by its profile: a file of this one cluster, or of a whole network.

    Raises
    ------
    ValueError, FileNotFoundError
        If the profile is no scenario file, or one of several clusters without this one.
    """
    if not Path(profile).is_file():
        raise FileNotFoundError(f"node config: device-profile: no file {profile}; write one with collapipe profile")
    clusters = load_scenario(profile).clusters
    if len(clusters) == 1:
        return clusters[0]
    if cluster >= len(clusters):
        raise ValueError(
            f"node config: device-profile: {profile} has the clusters 0 to {len(clusters) - 1}, expected cluster "
            f"{cluster}; give it the file of its own network, or one that describes this cluster alone"
        )
    return clusters[cluster]
