"""What a control unit is told before the run and in each round, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from client_pipeline.link.address import DecoderAddress, LinkCertificates
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.fault_config import FaultConfig
from client_pipeline.runtime.optimizer_config import OptimizerConfig
from client_pipeline.runtime.pacing import Pace
from client_pipeline.runtime.placement import Placement
from client_pipeline.runtime.replanning import Replan

if TYPE_CHECKING:
    from client_pipeline.partition.parts import Batch


class TrainingData(Protocol):
    """A cluster's training examples."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Pad the examples into one batch; ``seed`` decides what is random in it."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClusterSetup:
    """Everything a control unit is told once, before round 1."""

    run: str
    """Names the run; a control unit of another run gives way between its rounds."""
    cluster: int
    spec: ModelSpec
    optimizer: OptimizerConfig
    runtime: RuntimeConfig
    seed: int
    batch_size: int
    local_steps: int
    load_data: Callable[[], TrainingData]
    """Called once, in the control unit's process."""
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    frozen: Mapping[str, Any] = field(default_factory=dict)
    """What adapters are added to, by global name; empty without adapters. Tensors, or arrays on their way; those of
    ``base`` are not among them."""
    base: str = ""
    """Where each machine gets the frozen weights by itself, as JSON of
    :class:`client_pipeline.partition.base_weights.FrozenBase`."""
    base_source: str = ""
    """Folder or hub id of these files on this machine; empty: as ``base`` says."""
    weight_cache: Path | None = None
    """Folder of files that were pulled; None: none are."""
    pull_from: DecoderAddress | None = None
    """Where files that are not here can be pulled before round 1; None: nowhere."""
    gradient_accumulation: int = 1
    """Batches of a step, whose gradients are summed up before the optimizers take it."""
    certificates: LinkCertificates = field(default_factory=LinkCertificates)
    checkpoints: Path | None = None
    """Folder of this control unit's checkpoints; None: it writes none."""
    folder: Path | None = None
    """Folder for what is known of faults; None: nothing is written."""
    lost_at: float | None = None
    """When the control unit that this one stands in for was lost [s, since 1970]; None: it is the first."""
    checkpoint_every: int = 1
    """Rounds between the server's commits."""
    resume_round: int = 0
    """Committed round to go on from; 0: from the start."""
    identity: RunIdentity = RunIdentity()
    """The run over all its continuations; ``run`` is of one."""
    data: str = ""
    """SHA-256 of the cluster's training files; empty where it has none."""
    placement: Placement = field(default_factory=Placement)
    """Where the devices are."""
    absent: tuple[int, ...] = ()
    """Devices that have not joined; those who are there go on without them."""
    faults: FaultConfig = field(default_factory=FaultConfig)
    """What goes wrong on purpose."""

    @property
    def actor_name(self) -> str:
        """Name of the control unit's actor; its devices' names begin with it."""
        return f"collapipe/{self.run}/cluster-{self.cluster}"


@dataclass(frozen=True, kw_only=True)
class RoundOrder:
    """What a control unit is told each round."""

    round: int
    weights: Mapping[str, Any]
    """Global weights; with the head if there is no decoder to talk to. Tensors, or arrays on their way."""
    plan: ClusterPlan
    decoder: DecoderAddress | None = None
    """None: the control unit trains the decoder itself."""
    pace: Pace | None = None
    """What devices and uplink take; None: as fast as they go."""
    replan: Replan | None = None
    """Plans for the devices that are left when one is lost; None: they are taken to be alike."""
    counted: int = 0
    """Last round whose update of this cluster is in the average; 0: none is, or updates are not compressed."""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What a control unit answers."""

    weights: dict[str, Any]
    """Trained weights, or what they changed by in the form of the update's codec. Tensors, or arrays on their way."""
    weight: int
    """Targets trained on in the round: the weight in the average."""
    loss: float
    """Mean over these targets."""
    steps: int
    wall_s: float
    report: dict[str, Any]
    """JSON values: devices, clocks, moves."""
