"""A round of a stock strategy in which one client answers as the test wants."""

import torch

from helpers.fake_grid import FakeGrid
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.grid.recording import RecordingGrid
from strategies.records import to_arrays, to_tensors

NUM_CLUSTERS, HOSTILE = 5, 4


START = {"embedding.w": torch.arange(6.0).reshape(2, 3), "block.0.b": torch.ones(4), "block.0.s": torch.tensor(2.0)}


def trained(cluster):
    generator = torch.Generator().manual_seed(cluster)
    return {name: value + torch.randn(value.shape, generator=generator) for name, value in START.items()}


def honest(message, cluster):
    return answer_to(message, cluster, trained(cluster), weight=1 + cluster, loss=1.0 + cluster)


def round_of(answer, strategy="FedAvg", **options):
    """One round in which the last cluster answers by ``answer(order, honest reply)``: weights, and its record."""

    def client(message, cluster):
        reply = honest(message, cluster)
        return answer(message, reply) if cluster == HOSTILE else reply

    grid = FakeGrid(client, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, **options)
    arguments = {"num_malicious_nodes": 1} if strategy == "Krum" else {}
    server = make_stock(strategy, arguments, NUM_CLUSTERS)
    result = server.start(recording, initial_arrays=to_arrays(START), num_rounds=1)
    return to_tensors(result.arrays), recording.last_round
