"""Rounds of the real strategy in a real simulation, whose clients train a small model in their own process."""

import torch

from client_pipeline.families.families import build_parts
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.cluster_states import many_clusters
from helpers.replies import index_of
from helpers.tiny_models import NUM_BLOCKS, NUM_LABELS, VOCABULARY, tiny_spec

SPEC = tiny_spec("bert", "token-classification", dropout=0.0)
SGD = OptimizerConfig(name="sgd", lr=0.1)
STEPS = 3


def batch_of(cluster):
    """Sentences whose tokens have the label of their number: nothing is learned without the encoder."""
    generator = torch.Generator().manual_seed(cluster)
    ids = torch.randint(3, VOCABULARY, (8, 9), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool), "labels": ids % NUM_LABELS}


def learned(num_clusters, steps=60):
    """Weights of a model that has learned the task in one process."""
    parts = build_parts(SPEC, seed=1)
    adam = torch.optim.Adam([p for _, p in parts.named_parameters()], lr=0.01)
    for step in range(steps):
        adam.zero_grad()
        (parts.loss_sum(batch_of(step % num_clusters)) / 72).backward()
        adam.step()
    return parts.weights()


def loss_of(weights, clusters):
    """Mean loss per target of whole weights, over the clusters' data."""
    parts = build_parts(SPEC, seed=0)
    parts.load(weights)
    with torch.no_grad():
        loss, weight = 0.0, 0
        for batch in map(batch_of, clusters):
            loss += float(parts.loss_sum(batch))
            weight += int((batch["labels"] >= 0).sum())
    return loss / weight


def trained(message, cluster):
    """Train a round over the real stream, as a control unit does; returns order, weights before and after, and sums."""
    from client_pipeline.link.stream import DecoderStream
    from client_pipeline.partition.dropout_seed import StepId
    from client_pipeline.partition.parts import target_weight, targets
    from strategies.records import ARRAYS, CONFIG, read_train_config, to_tensors

    order = read_train_config(message.content.config_records[CONFIG], cluster)
    start = to_tensors(message.content.array_records[ARRAYS])
    parts, batch, weight, loss = build_parts(SPEC, seed=0), batch_of(cluster), 0, 0.0
    parts.load(start, head=False)
    parameters = dict(parts.named_parameters(head=False))
    adam = torch.optim.Adam(parameters.values(), lr=0.01)
    with DecoderStream.open(order.decoder) as link:
        for step in range(1, STEPS + 1):
            hidden = parts.encode(batch)
            own = target_weight(targets(batch))
            link.begin_step(StepId(seed=0, round=order.round, step=step, cluster=cluster), 1, own)
            link.send(0, hidden.detach(), batch["attention_mask"], targets(batch))
            gradient = link.receive()
            adam.zero_grad()
            hidden.backward(gradient.tensor)
            adam.step()
            link.end_step(1.0)
            weight, loss = weight + own, loss + gradient.loss_sum
    return order, start, {name: p.detach().clone() for name, p in parameters.items()}, weight, loss / weight


def answer(message, order, weights, weight, loss):
    from helpers.replies import answer_to

    return answer_to(message, order.decoder.cluster, weights, weight=weight, loss=loss, steps=STEPS)


def honest(message, cluster):
    order, _, weights, weight, loss = trained(message, cluster)
    return answer(message, order, weights, weight, loss)


def clusters_of(grid, num_clusters):
    """A scenario of so many clusters, each with a channel, and who they are."""
    from flower_app.training.training_run import wait_for_nodes
    from strategies.clusters import ClusterState

    scenario = many_clusters(num_clusters, num_blocks=NUM_BLOCKS, batch_size=8, local_steps=STEPS)
    indices = index_of(grid, wait_for_nodes(grid, num_clusters, 60))
    states = [
        ClusterState(cluster=n, node_id=indices[n], devices=devices, block_memory=scenario.block_memory, num_examples=8)
        for n, devices in enumerate(scenario.clusters)
    ]
    return scenario, states


def rounds_of(grid, num_clusters, make, initial, rounds=1):
    """Train from initial weights the strategy that ``make`` builds; returns the final weights, and the strategy."""
    from strategies.decoder.config import DecoderConfig
    from strategies.decoder.service import DecoderService
    from strategies.decoder.trainer import DecoderTrainer
    from strategies.grid.recording import RecordingGrid
    from strategies.planning.planner import RoundPlanner
    from strategies.planning.policies import make_policy
    from strategies.records import to_arrays, to_tensors

    scenario, states = clusters_of(grid, num_clusters)
    parts = build_parts(SPEC, seed=1)
    service = DecoderService(
        DecoderConfig(), DecoderTrainer(HeadTrainer(parts.head, SGD, unit=NUM_BLOCKS), "round"), num_clusters
    )
    service.start()
    try:
        planner = RoundPlanner(scenario, make_policy("uniform"))
        strategy = make(planner=planner, decoder=service, clusters=states)
        recording = RecordingGrid(grid, {state.node_id: state.cluster for state in states})
        result = strategy.start(recording, initial_arrays=to_arrays(initial), num_rounds=rounds)
        return to_tensors(result.arrays), strategy
    finally:
        service.stop()
