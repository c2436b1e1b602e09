"""What the server makes of its nodes, in a real simulation: too few of them, and rounds in which they fail."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from flower_app.training.cluster_setup import wait_for_nodes
from helpers.replies import index_of
from helpers.simulation import simulate
from strategies.baselines.stock import make_stock
from strategies.grid.recording import RecordingGrid, RoundFailed
from strategies.records import read_train_config

pytestmark = pytest.mark.slow


def start(grid, rounds=2, codec=None):
    nodes = wait_for_nodes(grid, 2, 60)
    clusters = {node: cluster for cluster, node in index_of(grid, nodes).items()}
    recording = RecordingGrid(grid, clusters, codec=codec)
    arrays = ArrayRecord({"embedding.w": Array(np.zeros(4, dtype=np.float32))})
    result = make_stock("FedAvg", {}, 2).start(recording, initial_arrays=arrays, num_rounds=rounds)
    return recording.last_round, result.arrays["embedding.w"].numpy()


def answer(message, cluster, value, weight):
    from helpers.replies import answer_to

    return answer_to(message, cluster, {"embedding.w": torch.full((4,), float(value))}, weight=weight, loss=value)


def test_too_few_nodes_is_an_error_that_says_how_many_came():
    with pytest.raises(
        ValueError,
        match="3 clusters need as many nodes, 2 nodes came; simulate as many: .*num-supernodes=3 ",
    ):
        simulate(lambda grid: wait_for_nodes(grid, 3, 3.0), lambda message, cluster: None)


def test_a_round_in_which_every_client_fails_is_an_error_with_each_reason():
    def fail(message, cluster):
        raise RuntimeError("device 3 is on fire")

    with pytest.raises(RoundFailed, match="round 1: every client failed: cluster 0: .*on fire.*; cluster 1: .*on fire"):
        simulate(start, fail)


def test_a_strategy_gets_weights_where_updates_were_sent_and_a_broken_update_is_a_failed_client():
    codec = UpdateCodec(CompressionConfig(update="int8"))

    def client(message, cluster):
        from helpers.replies import answer_to

        begun = {name: torch.from_numpy(a.numpy()) for name, a in message.content.array_records["arrays"].items()}
        feedback = ErrorFeedback(codec)
        update = feedback.compress(begun, {"embedding.w": torch.tensor([0.0, 127.0, -1.0, 64.0])})
        if cluster == 1:
            update["embedding.w/scale"] = torch.tensor([float("nan")])
        return answer_to(message, cluster, update)

    last, arrays = simulate(lambda grid: start(grid, rounds=1, codec=codec), client)
    np.testing.assert_array_equal(arrays, [0.0, 127.0, -1.0, 64.0])
    (failed,) = last["failed"]
    assert failed["reason"] == "update of embedding.w (int8): NaN or Inf: training diverged on the control unit"
    # What was sent is counted, not what it was decoded to: both updates, 4 and 4 bytes of tensors in each.
    assert 2 * 8 < last["bytes_up"] <= 2 * (8 + 2 * 160)


def test_losses_are_weighted_and_one_failure_is_recorded():
    def client(message, cluster):
        order = read_train_config(message.content.config_records["config"])
        assert (order.plan, order.decoder, order.pace, order.waived) == (None, None, None, ())
        if order.round == 2 and cluster == 1:
            raise RuntimeError("late")
        return answer(message, cluster, value=[1.0, 4.0][cluster], weight=[1, 2][cluster])

    def one_round(grid):
        return start(grid, rounds=1)

    last, arrays = simulate(one_round, client)
    assert last["train_loss"] == pytest.approx(3.0)
    assert last["weight"] == 3
    assert last["failed"] == []
    assert [report["cluster"] for report in last["clusters"]] == [0, 1]
    assert last["bytes_up"] >= 2 * 4 * 4
    np.testing.assert_allclose(arrays, 3.0)

    last, arrays = simulate(start, client)
    assert last["train_loss"] == 1.0
    assert [report["cluster"] for report in last["clusters"]] == [0]
    assert len(last["failed"]) == 1
    assert "late" in last["failed"][0]["reason"]
    np.testing.assert_allclose(arrays, 1.0)


def our_client():
    from flower_app.client_app import app

    return app


def test_a_failure_of_our_client_reaches_the_server_as_one_line():
    def server(grid):
        node = wait_for_nodes(grid, 2, 60)[0]
        content = RecordDict({"config": ConfigRecord({"server-round": 1, "plan": '{"m": 2}'})})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=node, message_type="train")])
        return reply.has_error() and reply.error.reason

    assert simulate(server, our_client()) == "plan: delta: expected a list of integers, found None"
