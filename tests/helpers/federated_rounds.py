"""Rounds of control units and a decoder service in this process, and the central step that they must equal."""

from contextlib import contextmanager

from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.control_unit import ControlUnit
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.whole import whole_step
from helpers.shared_actors import SHARED_ACTORS
from helpers.tiny_models import CLASSIC
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

LR = 0.5


PLANS = [
    ClusterPlan(delta=(2, 3), order=(1, 0), m=3),
    ClusterPlan(delta=(1, 0, 4), order=(0, 2), m=2, schedule="1f1b"),
]


class OneBatch:
    """A cluster's data: one batch, in a fixed order."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["input_ids"])

    def collate(self, indices, seed=0):
        return {name: tensor[sorted(indices)] for name, tensor in self.batch.items()}


def control_units(batches, optimizer, run, local_steps=1, spec=CLASSIC, first=0, **more):
    """A control unit for each batch; ``placement`` gives its devices actors other than the shared ones."""
    return [
        ControlUnit(
            ClusterSetup(
                run=run,
                cluster=n,
                spec=spec,
                optimizer=optimizer,
                runtime=RuntimeConfig(timeout=240),
                seed=7,
                local_steps=local_steps,
                load_data=lambda batch=batch: OneBatch(batch),
                **{
                    "batch_size": len(batch["input_ids"]),
                    "placement": SHARED_ACTORS.placement(n, len(PLANS[1].delta)),
                    **more,
                },
            )
        )
        for n, batch in enumerate(batches, start=first)
    ]


def federated_round(units, service, weights, number=1, local_steps=1, codec=None, plans=PLANS):
    """One round as the strategy runs it; returns the new global weights and the results."""
    from concurrent.futures import ThreadPoolExecutor

    tied = {name: weights[f"embedding.{own}"] for name, own in service.trainer.tied.items()}
    addresses = service.open_round(number, range(len(units)), local_steps, tied)
    encoder = {name: value for name, value in weights.items() if not name.startswith("head.")}
    orders = [RoundOrder(round=number, weights=encoder, plan=plans[n], decoder=addresses[n]) for n in range(len(units))]
    with ThreadPoolExecutor(len(units)) as pool:
        results = list(pool.map(lambda pair: pair[0].train_round(pair[1]), zip(units, orders, strict=True)))
    summary = service.finish_round({n: result.weight for n, result in enumerate(results)})
    total = sum(result.weight for result in results)
    trained = [codec.apply(encoder, r.weights) if codec else r.weights for r in results]
    shares = [result.weight / total for result in results]
    joined = {name: sum(t[name] * share for t, share in zip(trained, shares, strict=True)) for name in encoder}
    joined.update({f"head.{name}": value.clone() for name, value in summary.head.items()})
    return joined, results


@contextmanager
def decoder_services():
    """Give what starts a service over a fresh decoder; all are stopped at the end."""
    services = []

    def start(optimizer, decoder_sync="step", spec=CLASSIC, **more):
        parts = build_parts(spec, seed=1)
        trainer = DecoderTrainer(HeadTrainer(parts.head_on_server, optimizer, unit=len(parts.blocks)), decoder_sync)
        service = DecoderService(DecoderConfig(), trainer, num_clusters=2, **more)
        service.start()
        services.append(service)
        return service, parts.weights()

    try:
        yield start
    finally:
        for service in services:
            service.stop()


def central_gradient(batches, weights, spec=CLASSIC, step=1, frozen=None, round_=1):
    """Gradient of the mean over the joint batch, with each cluster's own micro-batches and dropout seeds."""
    total = sum(target_weight(targets(batch)) for batch in batches)
    summed, loss = {}, 0.0
    for n, batch in enumerate(batches):
        parts = build_parts(spec, seed=0)
        parts.load(weights)
        parts.load_frozen(frozen or {})
        whole = whole_step(parts, StepId(seed=7, round=round_, step=step, cluster=n), batch, PLANS[n].m)
        loss += whole.loss_sum / total
        for name, gradient in whole.gradients.items():
            summed[name] = summed.get(name, 0) + gradient * whole.weight / total
    return summed, loss
