"""Rounds of the real strategy and decoder of five clusters or more, of which the last one is hostile.

The clients stand in for control units: over real streams they send activations drawn from their number, and answer
with an update drawn from it. The rules, the decoder's service, the planner and the grids are the real ones.
"""

from dataclasses import dataclass, replace

import torch
from flwr.app import Message

from client_pipeline.families.families import build_parts
from client_pipeline.link.base import LinkError
from client_pipeline.link.reopened_connection import give_up
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.cluster_states import many_clusters
from helpers.fake_grid import FakeGrid
from helpers.replies import answer_to
from helpers.tiny_models import CLASSIC, NUM_BLOCKS
from strategies.aggregation.config import SERVER_OPTIMIZERS, AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.rules import build_aggregator, fewest_clusters
from strategies.clusters import ClusterState
from strategies.collapipe import CollaPipe
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer
from strategies.grid.intake import RoundBounds
from strategies.grid.recording import RecordingGrid
from strategies.planned_strategy import start_from
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy
from strategies.records import ARRAYS, CONFIG, read_train_config, to_arrays, to_tensors

STEPS, BATCH = 2, 8
SGD = OptimizerConfig(name="sgd", lr=0.1)
RULES = {
    **{name: (AggregatorConfig(), ServerOptimizerConfig(name=name)) for name in SERVER_OPTIMIZERS},
    **{
        name: (AggregatorConfig(name=name), ServerOptimizerConfig())
        for name in ("krum", "multi-krum", "trimmed-mean", "median", "bulyan")
    },
}
"""Every way to join encoders in a round; ``none`` is their mean."""


def clusters_for(rule):
    """Five, or as many as the rule needs."""
    return max(5, fewest_clusters(RULES[rule][0]))


@dataclass
class Outcome:
    """Outcome of a round."""

    weights: dict
    failed: list
    """Clusters that failed the round, and those whose updates the strategy left out."""
    answers: dict
    """Honest replies by cluster, as they were sent."""
    refusals: list
    """Answers of the decoder to the hostile cluster."""
    initial: dict
    plans: list
    """Number of each round, and its plans."""

    def encoder(self):
        return {name: value for name, value in self.weights.items() if not name.startswith("head.")}

    def head(self):
        return {name: value for name, value in self.weights.items() if name.startswith("head.")}


def same(one, other):
    """Tell whether two sets of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def examples_of(cluster):
    """Return the examples of a batch: clusters of an odd number have more, and count more."""
    return 2 + cluster % 2


def activations(cluster, step):
    examples, generator = examples_of(cluster), torch.Generator().manual_seed(100 * cluster + step)
    hidden = torch.randn(examples, 3, 16, generator=generator)
    labels = torch.randint(3, 40, (examples, 4), generator=generator)
    return hidden, torch.ones(examples, 3, dtype=torch.bool), {"labels": labels}


def honest_stream(order, cluster):
    """Both steps of a round, as a control unit takes them."""
    with DecoderStream.open(order.decoder) as link:
        for step in range(1, STEPS + 1):
            one_step(link, order, cluster, step)


def one_step(link, order, cluster, step, end=True):
    hidden, mask, targets = activations(cluster, step)
    link.begin_step(StepId(seed=0, round=order.round, step=step, cluster=cluster), 1, float(targets["labels"].numel()))
    link.send(0, hidden, mask, targets)
    link.receive()
    if end:
        link.end_step(1.0)


def absent(order, cluster):
    """Leaves the decoder's round before it has said anything."""
    give_up(order.decoder, None, "no power")


def refused(change):
    """A stream whose first step the decoder must refuse; the cluster then leaves, so that nobody waits for it."""

    def stream(order, cluster):
        try:
            with DecoderStream.open(order.decoder) as link:
                change(link, order, cluster)
        except LinkError:
            absent(order, cluster)
            raise

    return stream


def sends(
    step=1, micro_batches=1, weight=None, micro_batch=0, hidden=lambda h: h, mask=lambda m: m, targets=lambda t: t
):
    """A first step with something wrong in it."""

    def change(link, order, cluster):
        h, m, t = activations(cluster, 1)
        own = float(t["labels"].numel()) if weight is None else weight
        link.begin_step(StepId(seed=0, round=order.round, step=step, cluster=cluster), micro_batches, own)
        link.send(micro_batch, hidden(h), mask(m), targets(t))
        link.receive()
        link.end_step(1.0)

    return refused(change)


def wrong_token(order, cluster):
    """Hello with a token that was never given."""
    try:
        DecoderStream.open(replace(order.decoder, token="0" * len(order.decoder.token)))
    except LinkError:
        absent(order, cluster)
        raise


STREAMS = {
    "a token of its own": wrong_token,
    "NaN for activations": sends(hidden=lambda h: h * float("nan")),
    "activations of another width": sends(hidden=lambda h: h[..., :4]),
    "more examples than a batch has": sends(
        hidden=lambda h: h.repeat(5, 1, 1),
        mask=lambda m: m.repeat(5, 1),
        targets=lambda t: {"labels": t["labels"].repeat(5, 1)},
    ),
    "labels that there are none of": sends(targets=lambda t: {"labels": t["labels"] + 1000}),
    "no labels": sends(targets=lambda t: {}),
    "a weight of more than it sends": sends(weight=1e6),
    "a weight of NaN": sends(weight=float("nan")),
    "a step that is not due": sends(step=2),
    "a micro-batch that there is none of": sends(micro_batch=3),
    "a goodbye before its first step": refused(lambda link, order, cluster: None),
}
"""Streams that the decoder refuses before any step of theirs has counted."""


def restarted(order, cluster):
    """Begins each of its steps again and again before it takes it."""
    with DecoderStream.open(order.decoder) as link:
        for step in range(1, STEPS + 1):
            for _ in range(3):
                one_step(link, order, cluster, step, end=False)
                link.drop_step()
            one_step(link, order, cluster, step)


def one_step_only(order, cluster):
    """Takes the first step, and leaves."""
    try:
        with DecoderStream.open(order.decoder) as link:
            one_step(link, order, cluster, 1)
            raise LinkError("enough")
    except LinkError:
        absent(order, cluster)
        raise


def honest_answer(message, cluster):
    """An update that any control unit of the round could send."""
    generator = torch.Generator().manual_seed(cluster)
    received = to_tensors(message.content.array_records[ARRAYS])
    weights = {name: v + 0.1 * torch.randn(v.shape, generator=generator) for name, v in received.items()}
    weight = STEPS * examples_of(cluster) * 4
    return answer_to(message, cluster, weights, weight=weight, steps=STEPS, loss=1.0 + cluster)


def played(rule, answer, stream=honest_stream, sync="step", rounds=1, others=lambda order, reply: reply):
    """Rounds in which the last cluster streams by ``stream`` and answers by ``answer(order, honest reply)``.

    ``others`` makes the other clusters' answers.
    """
    num_clusters = clusters_for(rule)
    hostile, answers = num_clusters - 1, {}

    def client(message, cluster):
        order = read_train_config(message.content.config_records[CONFIG], cluster)
        if cluster != hostile:
            honest_stream(order, cluster)
            answers[cluster] = honest_answer(message, cluster)
            return others(message, answers[cluster])
        try:
            stream(order, cluster)
        except Exception as error:
            refusals.append(str(error))
        return answer(message, honest_answer(message, cluster))

    refusals, plans = [], []
    initial = build_parts(CLASSIC, seed=1).weights()
    parts = build_parts(CLASSIC, seed=1)
    trainer = DecoderTrainer(HeadTrainer(parts.head, SGD, unit=NUM_BLOCKS), sync, join_timeout_s=20.0)
    grid = FakeGrid(client, num_clusters)
    scenario = many_clusters(num_clusters, num_blocks=NUM_BLOCKS, batch_size=BATCH, local_steps=STEPS)
    states = [
        ClusterState(cluster=n, node_id=node, devices=devices, block_memory=scenario.block_memory, num_examples=8)
        for n, (node, devices) in enumerate(zip(grid.nodes, scenario.clusters, strict=True))
    ]
    bounds = RoundBounds(
        steps=STEPS,
        max_weight=float(STEPS * BATCH * 4),
        num_blocks=NUM_BLOCKS,
        batch_size=BATCH,
        num_devices={state.cluster: len(state.devices) for state in states},
    )
    with DecoderService(DecoderConfig(), trainer, num_clusters, limits=StepLimits(examples=BATCH)) as service:
        strategy = CollaPipe(
            planner=RoundPlanner(scenario, make_policy("uniform")),
            decoder=service,
            clusters=states,
            aggregator=aggregator_of(rule),
            on_plan=lambda number, chosen: plans.append((number, chosen)),
        )
        recording = RecordingGrid(grid, grid.clusters, bounds=bounds, borne=2)
        result = strategy.start(recording, initial_arrays=to_arrays(initial), num_rounds=rounds)
    failed = recording.last_round["failed"] + strategy.record["refused_updates"]
    return Outcome(to_tensors(result.arrays), failed, answers, refusals, initial, plans)


def aggregator_of(rule):
    config, optimizer = RULES[rule]
    return build_aggregator(config, optimizer, num_clusters=clusters_for(rule))


def joined_by_hand(rule, outcome):
    """Return the rule's result for the honest clusters' answers alone."""
    aggregator = aggregator_of(rule)
    start_from(aggregator, to_arrays({k: v for k, v in outcome.initial.items() if not k.startswith("head.")}))
    replies = [outcome.answers[n] for n in sorted(outcome.answers)]
    arrays, _ = aggregator.aggregate_train(1, [Message(reply.content, reply_to=reply) for reply in replies])
    return {name: value.to(torch.float32) for name, value in to_tensors(arrays).items()}
