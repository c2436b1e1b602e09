"""Orders to a control unit before the run and in each round, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
from client_pipeline.runtime.ray.placement import Placement
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.timetable.pacing import Pace
from client_pipeline.timetable.replanning import Replan

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
    """Order to a control unit before round 1."""

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
    forward_only: bool = False
    """True if none of the cluster's weights is trained, and the server answers with losses alone."""
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    frozen: Mapping[str, Any] = field(default_factory=dict)
    """Frozen weights below the adapters, by global name, as tensors or arrays. Empty without adapters or with
    ``base``."""
    base: str = ""
    """Source from which each machine gets the frozen weights by itself, as JSON of
    :class:`client_pipeline.weights.base_weights.FrozenBase`."""
    base_source: str = ""
    """Folder or hub id of these files on this machine; empty: as ``base`` says."""
    weight_cache: Path | None = None
    """Folder of files that were pulled; None: none are."""
    pull_from: DecoderAddress | None = None
    """Address from which missing files can be pulled before round 1; None: nothing can be pulled."""
    gradient_accumulation: int = 1
    """Batches of a step, whose gradients are summed up before the optimizers take it."""
    certificates: LinkCertificates = field(default_factory=LinkCertificates)
    checkpoints: Path | None = None
    """Folder of this control unit's checkpoints; None: it writes none."""
    folder: Path | None = None
    """Folder of the files of faults; None: nothing is written."""
    lost_at: float | None = None
    """Time at which the control unit before this one was lost [s, since 1970]; None: it is the first."""
    checkpoint_every: int = 1
    """Rounds between the server's commits."""
    resume_round: int = 0
    """Committed round to go on from; 0: from the start."""
    identity: RunIdentity = RunIdentity()
    """The run over all its continuations; ``run`` is of one."""
    data: str = ""
    """SHA-256 of the cluster's training files; empty where it has none."""
    placement: Placement = field(default_factory=Placement)
    """Places of the devices."""
    absent: tuple[int, ...] = ()
    """Devices that have not joined; the others go on without them."""
    faults: FaultConfig = field(default_factory=FaultConfig)
    """Faults to inject."""

    @property
    def actor_name(self) -> str:
        """Name of the control unit's actor; its devices' names begin with it."""
        return f"collapipe/{self.run}/cluster-{self.cluster}"


class HandOver(StrEnum):
    """Purpose of a train message of a round that is begun by one message, and collected by later ones."""

    BEGIN = "begin"
    COLLECT = "collect"


@dataclass(frozen=True, kw_only=True)
class RoundOrder:
    """Order to a control unit for one round.

    :func:`strategies.records.read_train_config` reads it from a message. The node adds the weights, the choice of plans
    after a loss, and a plan if the message has none.
    """

    round: int
    weights: Mapping[str, Any] = field(default_factory=dict)
    """Global weights, as tensors or arrays; with the head if the control unit trains the decoder itself."""
    plan: ClusterPlan | None = None
    """Plan of the cluster; None in a message: the node plans for itself."""
    decoder: DecoderAddress | None = None
    """Address of the decoder; None: the control unit trains the decoder itself."""
    pace: Pace | None = None
    """Times of devices and uplink; None: as fast as they go."""
    replan: Replan | None = None
    """Chooses a plan for the devices that are left; None: all devices count as alike."""
    counted: int = 0
    """Last round whose update of this cluster is in the average; 0: none is, or updates are not compressed."""
    waived: tuple[str, ...] = ()
    """Constraints that the plan need not meet."""
    run: str = ""
    """Name of the run's directory; empty: the server does not say."""
    hand_over: HandOver | None = None
    """Purpose of the message; None: it is answered when the round is over."""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Answer of a control unit to a round."""

    weights: dict[str, Any]
    """Trained weights, or their changes in the form of the update's codec; tensors or arrays."""
    weight: int
    """Targets trained on in the round: the weight in the average."""
    loss: float
    """Mean over these targets."""
    steps: int
    wall_s: float
    report: dict[str, Any]
    """JSON values: devices, clocks, moves."""
