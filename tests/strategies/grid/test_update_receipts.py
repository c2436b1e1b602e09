"""Error feedback over rounds in which updates are lost: nothing is forgotten that no average holds."""

import pytest
import torch

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from helpers import byzantine
from helpers.fake_grid import FakeGrid
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.collapipe import CollaPipe
from strategies.grid.recording import RecordingGrid
from strategies.records import (
    ARRAYS,
    CONFIG,
    COUNTED_KEY,
    METRICS,
    WEIGHT_KEY,
    read_train_config,
    to_arrays,
    to_tensors,
)

pytestmark = pytest.mark.usefixtures("flower_process")

CODEC = UpdateCodec(CompressionConfig(update="top-k", density=0.25))
START = {"embedding.w": torch.zeros(8)}
CHANGE = torch.arange(1.0, 9.0)
LOST = ((1, 2), (1, 4))
"""Cluster and round."""


def test_what_compression_left_behind_travels_in_the_end():
    """Cluster 1 breaks off after it has compressed in round 2, and its update of round 4 is left out."""
    feedback = [ErrorFeedback(CODEC) for _ in range(2)]
    told, decoded = [], [{}, {}]

    def client(message, cluster):
        order = read_train_config(message.content.config_records[CONFIG], cluster)
        counted = message.content.config_records[CONFIG].get(COUNTED_KEY)
        told.append((order.round, tuple(counted or ())))
        begun = to_tensors(message.content.array_records[ARRAYS])
        feedback[cluster].settle(order.counted if counted else order.round - 1)
        change = CHANGE if order.round < 8 else torch.zeros(8)
        update = feedback[cluster].compress(begun, {"embedding.w": begun["embedding.w"] + change}, order.round)
        decoded[cluster][order.round] = CODEC.apply(begun, update)["embedding.w"] - begun["embedding.w"]
        if (cluster, order.round) == LOST[0]:
            raise RuntimeError("no power")
        if (cluster, order.round) == LOST[1]:
            update["embedding.w/values"][0] = float("nan")
        return answer_to(message, cluster, update)

    grid = FakeGrid(client, 2)
    recording = RecordingGrid(grid, grid.clusters, codec=CODEC)
    make_stock("FedAvg", {}, 2).start(recording, initial_arrays=to_arrays(START), num_rounds=20)
    # By cluster, in each round: what counted before it.
    assert [counted for round_, counted in sorted(set(told)) if round_ < 7] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
        (5, 5),
    ]
    # All that was learned in the rounds that counted has arrived; two of cluster 1's seven were lost with their round.
    for cluster, rounds in ((0, 7), (1, 5)):
        assert not feedback[cluster].residual["embedding.w"].any()
        arrived = sum(value for round_, value in decoded[cluster].items() if (cluster, round_) not in LOST)
        torch.testing.assert_close(arrived, rounds * CHANGE)
    assert recording.receipts.state() == [20, 20]


def test_an_update_that_the_strategy_leaves_out_has_not_counted(monkeypatch):
    kept = []

    class Kept(CollaPipe):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            kept.append(self)

    def claims_more(order, reply):
        reply.content[METRICS][WEIGHT_KEY] = 3 * reply.content[METRICS][WEIGHT_KEY]
        return reply

    monkeypatch.setattr(byzantine, "CollaPipe", Kept)
    outcome = byzantine.played("none", lambda order, reply: reply)
    assert [(number, [plan.m for plan in chosen]) for number, chosen in outcome.plans] == [(1, [8] * 5)]
    assert [state.last_loss for state in kept[0].clusters] == [1.0, 2.0, 3.0, 4.0, 5.0]
    outcome = byzantine.played("none", claims_more)
    # The updates of the others count by what each has trained on.
    assert byzantine.same(outcome.encoder(), byzantine.joined_by_hand("none", outcome))
    assert [strategy.uncounted for strategy in kept] == [set(), {4}]
