"""Every class whose objects are saved and read again: how one is made, filled, saved and read."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import FedAdam, FedAvgM
from torch import nn

from client_pipeline.link.address import DecoderAddress
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.devices.block_moves import BlockPlacement
from client_pipeline.runtime.devices.snapshots import Snapshots
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from client_pipeline.system.devices import DeviceProfile
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.pacing import Pace, StagePace
from flower_app.config.selection import SelectionConfig
from flower_app.training.early_stopping import ModelSelection
from helpers.cluster_states import states
from strategies.aggregation.accountant import PrivacyAccountant, Sent
from strategies.aggregation.central_privacy import with_central_noise
from strategies.aggregation.server_optimizers import memory_of, remember
from strategies.clusters import ClusterState
from strategies.collapipe import CollaPipe
from strategies.decoder.copies import DecoderCopies
from strategies.decoder.trainer import DecoderTrainer
from strategies.dssda.queues import Queues
from strategies.estimation.affine_time import AffineTime
from strategies.estimation.cluster_times import DEVICE, LINK, ClusterTimes
from strategies.estimation.measured_network import MeasuredNetwork
from strategies.grid.update_receipts import UpdateReceipts
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.adaptation import Adaptation
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A class whose objects are saved."""

    make: Callable[[], Any]
    """An object as a run begins with it."""
    fill: Callable[[Any], Any]
    """Give it state in which nothing is as it was made; returns another object where the class is frozen."""
    save: Callable[[Any], Any]
    read: Callable[[Any, Any], Any]
    """Read what was saved into a new object, or from the class; returns the object."""
    given: tuple[str, ...] = ()
    """Attributes that come from the constructor, or are of one round alone."""


def restored(new, state):
    new.restore(state)
    return new


def state_of(obj):
    return obj.state()


def pair(make, fill, given=()):
    """A class with ``state`` and ``restore``."""
    return Kept(make=make, fill=fill, save=state_of, read=restored, given=given)


def record(example):
    """A frozen class with ``to_dict`` and ``from_dict``."""
    return Kept(
        make=lambda: example, fill=lambda e: e, save=lambda e: e.to_dict(), read=lambda e, raw: type(e).from_dict(raw)
    )


# Objects as they are after some rounds.


def optimizer():
    return PartOptimizer({"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2))}, OptimizerConfig())


def stepped(made):
    for step in (1, 2):
        for i, parameter in enumerate(made.parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * step + i)
        made.apply(step)


def copies():
    torch.manual_seed(0)
    return DecoderCopies(HeadTrainer(nn.Linear(2, 2), OptimizerConfig(), unit=1))


def stepped_copies(made):
    made.by_cluster[3] = made.shared.copy()
    stepped(made.shared.optimizer)
    for _ in range(2):
        stepped(made.by_cluster[3].optimizer)
    # Weights are the model's: they come with it.
    for trainer in (made.shared, made.by_cluster[3]):
        trainer.head.load_state_dict(copies().shared.head.state_dict())


def trainer():
    torch.manual_seed(0)
    return DecoderTrainer(HeadTrainer(nn.Linear(2, 2), OptimizerConfig(), unit=1), "step")


def stepped_trainer(made):
    stepped_copies(made.copies)
    made.settle_sync("round")


def feedback():
    return ErrorFeedback(UpdateCodec(CompressionConfig(update="int8")))


def fill_feedback(made):
    made.residual, made.pending, made.pending_round = {"w": torch.ones(2)}, {"w": torch.zeros(3)}, 5


def block(value):
    return MovedBlock({"w": torch.full((2,), value)}, {"w/step": torch.tensor(value)})


def placement():
    return BlockPlacement(SimpleNamespace(runtime=RuntimeConfig(), name="cluster-0"), {})


def fill_time(made):
    made.fixed_s, made.sample_s = 0.25, 0.125
    made._cov, made.noise, made._noise_before = [0.5, 0.25, 0.125], 0.07, 0.06
    made.rounds, made.last_round, made._run = 9, 11, 3
    made._up, made._down, made.trend, made._last_ratio = 1.5, 0.5, 0.01, -0.25
    made._recent = [[(2.0, 0.5, 1.0)], [(1.0, 0.25, 3.0), (2.0, 0.5, 1.0)]]


def filled_time():
    made = AffineTime(0.5, 0.5)
    fill_time(made)
    return made


def fill_times(made):
    made.times = {(DEVICE, 1): filled_time(), (LINK, 0): AffineTime(0.1, 0.2)}
    made.rounds, made.last_round, made.away, made._moved = 7, 8, {0, 2}, (3.0, 4e6)
    made.model_error, made._error_rounds, made.block_bytes = 0.05, 4, 1e6


def fill_network(made):
    for cluster in made.clusters:
        fill_times(cluster)


def adaptation():
    return Adaptation(MeasuredNetwork(3))


PLAN = ClusterPlan(
    delta=(2, 0, 1), order=(2, 1, 0), m=3, schedule="1f1b", token_slices=2, selected=False, channel=1, power_w=0.25
)


def fill_adaptation(made):
    fill_network(made.network)
    for standing in made._standings:
        standing.plan, standing.before_trial = PLAN, dataclasses.replace(PLAN, m=1)
        standing.noticed, standing.declined, standing.looked, standing.changed = ["device 1"], "2/0/1", 4, True


QUEUES = Queues(np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5, 0.6]))


def planner():
    return RoundPlanner(load_scenario("default"), make_policy("dssda"), adaptation=adaptation())


def fill_planner(made):
    made.queues = QUEUES
    fill_adaptation(made.adaptation)


def planned():
    return PlannedStrategy(planner=planner(), clusters=states())


def collapipe(mechanism="server-adaptive"):
    privacy = PrivacyConfig(update_mechanism=mechanism, update_noise=0.1, update_clip=1.0)
    return CollaPipe(planner=planner(), decoder=None, clusters=states(), aggregator=with_central_noise(privacy, 30))


def fill_strategy(made):
    fill_planner(made.planner)
    for cluster in made.clusters:
        cluster.last_loss = 0.5 + cluster.cluster
    if isinstance(made, CollaPipe):
        made.aggregator.clipping_norm = 2.5


def fill_accountant(made):
    made.updates = {0: 2, 2: 5}
    made.sent = {1: Sent(examples=3, tokens=40, longest=20, repeats=2, step=(4, 1), step_examples=3)}


def fill_selection(made):
    made.best_round, made.best, made.stale = 4, 0.25, 2


def fill_receipts(made):
    made._counted = made._previous_counts = [3, 0, 4]


STRATEGY_GIVEN = ("on_plan", "time_scale", "record", "averaged", "uncounted", "_decision")
COLLAPIPE_GIVEN = (*STRATEGY_GIVEN, "decoder", "_returns_head", "_addresses", "_start", "_refused_updates")
PLANNER_GIVEN = ("scenario", "policy", "drift", "_by_programs", "_choices", "_mean_energy")

KEPT = {
    "PartOptimizer": Kept(
        make=optimizer,
        fill=stepped,
        save=state_of,
        read=lambda new, state: new.load_state(state) or new,
        # Weights are kept with the model.
        given=("parameters", "config", "_groups"),
    ),
    "ErrorFeedback": Kept(
        make=feedback,
        fill=fill_feedback,
        save=lambda made: (made.residual, made.pending, made.pending_round),
        read=lambda new, state: new.restore(*state) or new,
        given=("codec",),
    ),
    "Snapshots": Kept(
        make=lambda: Snapshots(12.0),
        fill=lambda made: setattr(made, "_at_rest", {1: block(1.0), 3: block(2.0)}),
        save=lambda made: made._at_rest,
        read=restored,
        given=("version", "taken", "bytes", "fetch_s", "_timeout_s", "by_device", "_owner"),
    ),
    "BlockPlacement": Kept(
        make=lambda: placement().snapshots,
        fill=lambda made: setattr(made, "_at_rest", {1: block(1.0), 3: block(2.0)}),
        save=lambda made: made._at_rest,
        read=lambda new, states: restored(placement(), states).snapshots,
        given=("version", "taken", "bytes", "fetch_s", "_timeout_s", "by_device", "_owner"),
    ),
    "DecoderCopies": pair(copies, stepped_copies, ("lock",)),
    "DecoderTrainer": Kept(
        make=trainer,
        fill=stepped_trainer,
        save=lambda made: (made.state(), made.decoder_sync),
        read=lambda new, state: new.restore(*state) or new,
        given=("join_timeout_s", "step_timeout_s", "_timeouts", "current", "_summaries"),
    ),
    "AffineTime": Kept(
        make=lambda: AffineTime(0.5, 0.5),
        fill=fill_time,
        save=lambda made: made.to_dict(),
        read=lambda new, raw: AffineTime.from_dict(raw),
    ),
    "ClusterTimes": Kept(
        make=lambda: ClusterTimes(2.0),
        fill=fill_times,
        save=lambda made: made.to_dict(),
        read=lambda new, raw: ClusterTimes.from_dict(raw, 2.0),
        given=("scale",),
    ),
    "MeasuredNetwork": Kept(
        make=lambda: MeasuredNetwork(2, 3.0),
        fill=fill_network,
        save=lambda made: made.to_dict(),
        read=restored,
        given=("paced", "_scale"),
    ),
    "Adaptation": pair(adaptation, fill_adaptation, ("changes", "predictions", "settled_plans")),
    "RoundPlanner": pair(planner, fill_planner, PLANNER_GIVEN),
    "PlannedStrategy": pair(planned, fill_strategy, (*STRATEGY_GIVEN, "aggregator")),
    "CollaPipe": pair(collapipe, fill_strategy, COLLAPIPE_GIVEN),
    "CollaPipe with Flower's mods": pair(lambda: collapipe("client-adaptive"), fill_strategy, COLLAPIPE_GIVEN),
    "PrivacyAccountant": pair(
        lambda: PrivacyAccountant(PrivacyConfig(), {0: 10, 1: 20}),
        fill_accountant,
        ("config", "num_examples", "_returns_gradients"),
    ),
    "UpdateReceipts": pair(lambda: UpdateReceipts(range(3)), fill_receipts),
    "ModelSelection": pair(lambda: ModelSelection(SelectionConfig()), fill_selection, ("config",)),
    "FedAdam": Kept(
        make=FedAdam,
        fill=lambda made: (
            setattr(made, "m_t", {"w": np.arange(3.0), "s": np.array(2.0)}),
            setattr(made, "v_t", {"w": np.arange(3.0) + 1, "s": np.array(3.0)}),
        ),
        save=memory_of,
        read=lambda new, memory: remember(new, memory) or new,
        given=tuple(sorted(vars(FedAdam()).keys() - {"m_t", "v_t"})),
    ),
    "FedAvgM": Kept(
        make=FedAvgM,
        # More than ten: a sort by name must not put 10 before 2.
        fill=lambda made: setattr(made, "momentum_vector", [np.full(2, float(i)) for i in range(12)]),
        save=memory_of,
        read=lambda new, memory: remember(new, memory) or new,
        given=tuple(sorted(vars(FedAvgM()).keys() - {"momentum_vector"})),
    ),
    "Queues": record(QUEUES),
    "ClusterPlan": record(PLAN),
    "ClusterState": record(
        ClusterState(
            cluster=2,
            node_id=7,
            devices=tuple(DeviceProfile(**vars(d)) for d in load_scenario("default").clusters[1]),
            block_memory=3e8,
            num_examples=5,
            last_loss=0.75,
        )
    ),
    "DecoderAddress": record(
        DecoderAddress(
            target="edge:1",
            token="t",
            round=3,
            cluster=2,
            join_timeout_s=1.0,
            step_timeout_s=2.0,
            max_frame_bytes=2**20,
            tls=True,
            root_certificate="PEM",
        )
    ),
    "Pace": record(Pace([StagePace([1.0], [2.0], [3.0], [4.0], [5.0])], 6.0)),
}
