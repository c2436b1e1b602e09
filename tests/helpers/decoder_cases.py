"""A tiny decoder, batches for it, and clusters that train it in threads."""

import copy
import threading
from contextlib import contextmanager

import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.link.frames import encode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import IGNORED_LABEL, target_weight
from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from strategies.decoder.config import DecoderConfig
from strategies.decoder.member import MicroBatch
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer

VOCABULARY, WIDTH = 13, 8
SPEC = transformer.spec(
    vocab_size=VOCABULARY, width=WIDTH, num_heads=2, feed_forward=16, encoder_layers=1, decoder_layers=1, dropout=0.0
)
LONGEST = 100
"""``data.max-length``; the model has positions for more."""
SGD = OptimizerConfig(name="sgd", lr=0.5)


def head_trainer(optimizer=SGD):
    return HeadTrainer(build_parts(SPEC, seed=1).head, optimizer, unit=1)


def batch_of(cluster, examples, source=5, target=4, seed=0):
    """Activations, mask and labels with padding; another batch for every cluster and seed."""
    generator = torch.Generator().manual_seed(1000 * cluster + seed)
    hidden = torch.randn(examples, source, WIDTH, generator=generator)
    mask = torch.ones(examples, source, dtype=torch.bool)
    labels = torch.randint(3, VOCABULARY, (examples, target), generator=generator)
    for i in range(examples):
        mask[i, source - i % 3 :] = False
        labels[i, target - (i + cluster) % 3 :] = IGNORED_LABEL
    return hidden, mask, {"labels": labels}


def cut(batch, num_micro_batches):
    hidden, mask, targets = batch
    sizes = micro_batch_sizes(len(hidden), num_micro_batches)
    pieces = zip(hidden.split(sizes), mask.split(sizes), targets["labels"].split(sizes), strict=True)
    return [(h, m, {"labels": labels}) for h, m, labels in pieces]


def train_step(link, step, batch, num_micro_batches, scale=1.0):
    """One local step of a cluster, as a CU does it; returns the gradients."""
    pieces = cut(batch, num_micro_batches)
    link.begin_step(step, num_micro_batches, target_weight(batch[2]))
    for i, piece in enumerate(pieces):
        link.send(i, *piece)
    gradients = [link.receive() for _ in pieces]
    link.end_step(scale)
    return gradients


def central_step(head, shares, lr=0.5):
    """SGD on the joint batch of ``shares`` [(batch, scale)]; the same as Eq. (7) when all scales are 1.

    Returns the head's new weights and, for each share, the gradient of its own mean loss.
    """
    head = copy.deepcopy(head).train()
    parameters = dict(head.named_parameters())
    total = sum(target_weight(batch[2]) for batch, _ in shares)
    step = {name: torch.zeros_like(p) for name, p in parameters.items()}
    gradients = []
    for (hidden, mask, targets), scale in shares:
        hidden = hidden.clone().requires_grad_()
        loss = head(hidden, mask, targets)
        own, *grads = torch.autograd.grad(loss, [hidden, *parameters.values()])
        gradients.append(own / target_weight(targets))
        for name, grad in zip(parameters, grads, strict=True):
            step[name] += scale * grad / total
    return {name: p.detach() - lr * step[name] for name, p in parameters.items()}, gradients


def step_id(cluster, step=1, round_=1):
    return StepId(seed=7, round=round_, step=step, cluster=cluster)


def all_at_once(*functions):
    """Run functions in threads; returns results or the exceptions they ended with."""
    results = [None] * len(functions)

    def call(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a cluster hangs"
    return results


@contextmanager
def service_of(
    num_clusters=2, sync="step", optimizer=SGD, join_s=20.0, step_s=20.0, base=None, kept=None, examples=2**16, **config
):
    """A real service on a free port."""
    trainer = DecoderTrainer(head_trainer(optimizer), sync, join_timeout_s=join_s, step_timeout_s=step_s)
    limits = StepLimits.of(SPEC, examples, LONGEST)
    service = DecoderService(DecoderConfig(**config), trainer, num_clusters, limits=limits, base=base, kept=kept)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def train_round(address, batches, num_micro_batches=2, before=lambda: None):
    """A CU's whole round over the stream, one step for each batch."""
    with DecoderStream.open(address) as stream:
        before()
        return [
            train_step(stream, step_id(address.cluster, step, address.round), batch, num_micro_batches)
            for step, batch in enumerate(batches, start=1)
        ]


def assert_still_serves(service, round_):
    addresses = service.open_round(round_, [0], 1)
    train_round(addresses[0], [batch_of(0, 3)])
    assert service.finish_round().clusters[0].departure is None


def first_frame(**change):
    batch = batch_of(0, 3)
    weight = float(target_weight(batch[2]))
    header = {
        "kind": "micro_batch",
        "round": 1,
        "step": 1,
        "micro_batch": 0,
        "num_micro_batches": 2,
        "weight": weight,
        "total_weight": 2 * weight,
        "seed": 1,
        "names": None,
    }
    tensors = {"hidden": batch[0], "mask": batch[1], "target.labels": batch[2]["labels"]}
    header.update({k: v for k, v in change.items() if k in header})
    tensors.update({k: v for k, v in change.items() if k not in header})
    return encode({k: v for k, v in header.items() if v is not None}, tensors)


PATIENT_S = 20.0


def trainer_of(sync="step", join_s=PATIENT_S, step_s=PATIENT_S, optimizer=SGD):
    return DecoderTrainer(head_trainer(optimizer), sync, join_timeout_s=join_s, step_timeout_s=step_s)


def whole_batch(cluster, step=1, round_=1, examples=3):
    """A cluster's batch as one micro-batch."""
    hidden, mask, targets = batch_of(cluster, examples, seed=step)
    weight = float(target_weight(targets))
    return MicroBatch(
        step=step_id(cluster, step, round_),
        micro_batch=0,
        num_micro_batches=1,
        weight=weight,
        total_weight=weight,
        hidden_BTD=hidden,
        mask_BT=mask,
        targets=targets,
    )
