"""Every class whose objects are saved and read again: how one is made, filled, saved and read."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import FedAvgM
from torch import nn

from client_pipeline.link.address import DecoderAddress
from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.run_identity import RunIdentity
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.cluster_checkpoint import ClusterCheckpoint, read_checkpoint, write_checkpoint
from client_pipeline.runtime.control_unit.data_order import DataOrder
from client_pipeline.runtime.devices.block_moves import BlockPlacement
from client_pipeline.runtime.devices.snapshots import Snapshots
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from client_pipeline.runtime.stage.stage import Stage
from client_pipeline.system.devices import DeviceProfile
from client_pipeline.system.scenario import load_scenario
from client_pipeline.timetable.pacing import Pace, StagePace
from flower_app.config.run_config import RunConfig
from flower_app.config.selection import SelectionConfig
from flower_app.training.early_stopping import ModelSelection
from flower_app.training.prepared_run import PreparedRun
from flower_app.training.releases import Releases, accounted
from flower_app.training.round_closer import RoundClock, RoundCloser, RunStanding
from helpers.cluster_states import states
from helpers.recovery_cases import ADAMW, SPEC, control_unit
from strategies.aggregation.accountant import PrivacyAccountant, Sent
from strategies.aggregation.central_privacy import with_central_noise
from strategies.aggregation.server_optimizers import ADAPTIVE, memory_of, remember
from strategies.checkpoint import FORMAT, Checkpoint, commit, last_committed
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
    attributes: Callable[[Any], Mapping[str, Any]] = vars
    """All attributes."""
    step: Callable[[Any], Any] | None = None
    """Do what follows after a resume; returns what comes of it."""
    is_record: bool = False
    """True if the class is frozen: its example has no default value."""


def restored(new, state):
    new.restore(state)
    return new


def state_of(obj):
    return obj.state()


def pair(make, fill, given=(), step=None):
    """A class with ``state`` and ``restore``."""
    return Kept(make=make, fill=fill, save=state_of, read=restored, given=given, step=step)


def record(example, read=lambda e, raw: type(e).from_dict(raw), save=lambda e: e.to_dict(), attributes=vars):
    """A frozen class, with ``to_dict`` and ``from_dict`` if nothing else is given."""
    return Kept(make=lambda: example, fill=lambda e: e, save=save, read=read, attributes=attributes, is_record=True)


def file_record(example, write, read):
    """A named tuple that goes through a file."""
    return record(example, lambda _, e: (write(e), read())[1], lambda e: e, lambda e: e._asdict())


# Objects as they are after some rounds.


def optimizer():
    return PartOptimizer({"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2))}, OptimizerConfig())


def stepped(made):
    for step in (1, 2):
        for i, parameter in enumerate(made.parameters.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * step + i)
        made.apply(step)


def third_step(made):
    for parameter in made.parameters.values():
        parameter.data, parameter.grad = torch.ones_like(parameter), torch.full_like(parameter, 0.5)
    made.apply(3)
    return made.parameters


def stage():
    torch.manual_seed(0)
    made = Stage(SPEC, ADAMW)
    for index in (1, 2):
        made.place(index)
    return made


def trained_stage(made):
    for step in (1, 2):
        stage_step(made, step)


def stage_step(made, step=3):
    identity, mask_BT = StepId(seed=0, round=1, step=step, cluster=0), torch.ones(2, 3, dtype=torch.bool)
    y_BTD = made.forward(identity, 0, torch.linspace(-1.0, 1.0, 96).reshape(2, 3, 16), mask_BT)
    gradient_BTD = made.backward(identity, 0, y_BTD, mask_BT)
    made.apply(step, 1.0)
    return [y_BTD, gradient_BTD, made.weights()]


def stage_from(new, saved):
    made = Stage(SPEC, ADAMW)
    for index, state in saved.items():
        made.place(index, state, version=2)
    return made


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


def unit(**more):
    """A control unit in which no round has begun; its checkpoints go to the working directory."""
    compression = CompressionConfig(update="top-k")
    return control_unit("kept", spec=SPEC, compression=compression, checkpoints=Path("cluster"), **more)


def fill_unit(made):
    made.prepare()
    for _ in range(5):
        made.order.next_batch()
    fill_feedback(made.feedback)
    for optimizer in (made.optimizer, made._head().optimizer):
        stepped(optimizer)
    made.pipeline.placement.restore({i: block(float(i)) for i in range(made.num_blocks)})


def save_unit(made):
    made._checkpoint(2, made.pipeline.placement.snapshots._at_rest)


def read_unit(new, saved):
    made = unit(resume_round=2)
    made.prepare()
    return made


def attributes_of_unit(made):
    head, snapshots = made._own_head, made.pipeline.placement.snapshots
    return vars(made) | {
        "optimizer": made.optimizer.state(),
        "_own_head": head and head.optimizer.state(),
        "pipeline": snapshots._at_rest,
        "order": made.order and made.order.drawn,
    }


UNIT_GIVEN = (
    *("setup", "watch", "data", "adapter", "num_blocks", "embedding", "parameters", "codec", "injector", "faults"),
    *("recovery", "spare_devices", "noise", "speed", "_slow", "_slow_before", "signs", "restored"),
)


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
    made.sent = {1: Sent(examples=3, recalled=5, tokens=40, longest=20, repeats=2, step=(4, 1), step_examples=3)}


def fill_selection(made):
    made.best_round, made.best, made.stale = 4, 0.25, 2


def run(resumed=None):
    """What is known of a run before its nodes are asked, as far as its progress goes."""
    values = dict.fromkeys(field.name for field in dataclasses.fields(PreparedRun))
    values |= {"config": RunConfig(), "run_dir": Path(), "identity": RunIdentity("run", "config"), "inputs": {}}
    return PreparedRun(**values | {"resumed": resumed, "started": 0.0})


def fill_standing(made):
    fill_selection(made.selection)
    made.account({"updates": {"releases": 3}})
    made.complete(7)


def committed(standing, wall_s=0.0):
    """Commit a round as the run does it."""
    closer = RoundCloser(
        run(),
        standing,
        RoundClock(run()),
        SimpleNamespace(whole=lambda arrays: {}),
        exchanges=SimpleNamespace(receipts=UpdateReceipts(range(3))),
        strategy=None,
        accountant=PrivacyAccountant(PrivacyConfig(), {}),
        faults=None,
    )
    closer._commit(standing.last_round, None, wall_s)


def releases():
    return Releases(Path(), PrivacyAccountant(NOISY, {0: 10, 1: 20}), {}, examples=16, length=9, run="run")


NOISY = PrivacyConfig(update_clip=1.0, update_noise=2.0)


def fill_releases(made):
    made.begin_round(2, [0, 1])
    fill_accountant(made._accountant)
    made._sent = made._accountant.sent


def read_releases(new, saved):
    before = Checkpoint(2, {}, {}, {}, {"privacy": saved})
    accountant = PrivacyAccountant(NOISY, {0: 10, 1: 20})
    return accounted(RunConfig(), Path(), accountant, None, before, RunIdentity("run", "config"))


def next_round_of_releases(made):
    made.begin_round(3, [1])
    return [made._round, made._accountant.state(made._sent), made._accountant.record()]


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
        step=third_step,
    ),
    "DataOrder": Kept(
        make=lambda: DataOrder(10, 4, 0, 2),
        fill=lambda made: [made.next_batch() for _ in range(4)],
        save=lambda made: made.drawn,
        read=lambda new, drawn: new.go_to(drawn) or new,
        # The permutation of an epoch follows from these.
        given=("num_examples", "batch_size", "_key", "_permuted"),
        step=lambda made: [made.next_batch(), made.drawn],
    ),
    "Stage": Kept(
        make=stage,
        fill=trained_stage,
        save=lambda made: made.states(),
        read=stage_from,
        given=tuple(sorted(vars(Stage(SPEC, ADAMW)).keys() - {"blocks"})),
        step=stage_step,
    ),
    "ClusterCheckpoint": file_record(
        ClusterCheckpoint(
            round=2,
            drawn=18,
            states={"embedding": block(1.0), "block.3": block(2.0)},
            residual={"w": torch.ones(2)},
            pending={"w": torch.zeros(3), "a/b": torch.ones(1, dtype=torch.float64)},
            pending_round=1,
            identity=RunIdentity("run", "config"),
            data="digest",
        ),
        lambda made: write_checkpoint(Path("part"), made),
        lambda: read_checkpoint(Path("part"), 2, RunIdentity("run", "config"), "digest"),
    ),
    "Checkpoint": file_record(
        Checkpoint(
            round=2,
            weights={"w": torch.ones(2, 3).T},
            decoder={"shared/w/step": torch.tensor(3.0)},
            server={"m_t/w": torch.arange(3.0)},
            # Format and round come with what is read.
            state={"format": FORMAT, "round": 2, "wall-s": 0.1, "privacy": {"record": None}},
            identity=RunIdentity("run", "config"),
        ),
        lambda made: commit(Path(), made),
        lambda: last_committed(Path()),
    ),
    "ControlUnit": Kept(
        make=unit,
        fill=fill_unit,
        save=save_unit,
        read=read_unit,
        given=UNIT_GIVEN,
        attributes=attributes_of_unit,
        step=lambda made: made.order.next_batch(),
    ),
    "RunStanding": Kept(
        make=lambda: RunStanding(run()),
        fill=fill_standing,
        save=committed,
        read=lambda new, _: RunStanding(run(last_committed(Path()))),
        step=lambda made: [made.selection.update(8, {"loss": 0.3}), made.selection.stale, made.privacy],
    ),
    "RoundClock": Kept(
        make=lambda: RoundClock(run()),
        fill=lambda made: setattr(made, "_before_s", 30.0),
        save=lambda made: committed(RunStanding(run()), made._before_s),
        read=lambda new, _: RoundClock(run(last_committed(Path()))),
        given=("_started", "_round_started", "round_s"),
    ),
    "Releases": Kept(
        make=releases,
        fill=fill_releases,
        save=lambda made: made._accountant.state(),
        read=read_releases,
        # A round is noted when it begins.
        given=("_path", "_run", "_examples", "_length", "_lock", "_round"),
        step=next_round_of_releases,
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
    "Adaptation": pair(adaptation, fill_adaptation, ("changes", "predictions", "settled_plans", "tries")),
    "RoundPlanner": pair(planner, fill_planner, PLANNER_GIVEN),
    "PlannedStrategy": pair(planned, fill_strategy, (*STRATEGY_GIVEN, "aggregator")),
    "CollaPipe": pair(collapipe, fill_strategy, COLLAPIPE_GIVEN),
    "CollaPipe with Flower's mods": pair(lambda: collapipe("client-adaptive"), fill_strategy, COLLAPIPE_GIVEN),
    "PrivacyAccountant": pair(
        lambda: PrivacyAccountant(PrivacyConfig(), {0: 10, 1: 20}),
        fill_accountant,
        ("config", "num_examples", "_returns_gradients"),
    ),
    "UpdateReceipts": pair(
        lambda: UpdateReceipts(range(3)), fill_receipts, step=lambda made: (made.note(5, [1]), made.state())
    ),
    "ModelSelection": pair(
        lambda: ModelSelection(SelectionConfig()),
        fill_selection,
        ("config",),
        step=lambda made: [made.update(5, {"loss": 0.3}), made.stale],
    ),
    **{
        strategy.__name__: Kept(
            make=strategy,
            fill=lambda made: (
                setattr(made, "m_t", {"w": np.arange(3.0), "s": np.array(2.0)}),
                setattr(made, "v_t", {"w": np.arange(3.0) + 1, "s": np.array(3.0)}),
            ),
            save=memory_of,
            read=lambda new, memory: remember(new, memory) or new,
            given=tuple(sorted(vars(strategy()).keys() - {"m_t", "v_t"})),
        )
        for strategy in ADAPTIVE
    },
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
