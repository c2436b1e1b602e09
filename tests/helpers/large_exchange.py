"""Rounds of a large model in this process, and what they hold beside its weights: run in a process of its own."""

import tracemalloc
import uuid
from types import SimpleNamespace

import numpy as np
from flwr.app import Array, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from helpers.piece_grid import PieceGrid
from helpers.replies import answer_to
from strategies.aggregation.config import ServerOptimizerConfig
from strategies.aggregation.server_optimizers import averaging_strategy
from strategies.grid.recording import RecordingGrid
from strategies.grid.reply_timeouts import BoundedGrid
from strategies.grid.single_pulls import SinglePulls
from strategies.grid.update_spool import UpdateSpool
from strategies.records import to_arrays

NUM_ARRAYS, ARRAY_BYTES = 16, 4_000_000
MODEL_BYTES = NUM_ARRAYS * ARRAY_BYTES


class FarGrid(PieceGrid):
    """Answers lie at a SuperLink elsewhere until they are pulled: their pieces are here once, shared by all."""

    def __init__(self, num_nodes, weights):
        super().__init__(None, num_nodes)
        self.arrays, self.shared = to_arrays(weights), {}

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, last_activated_at="") for node in self.nodes]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            # The weights are not kept here.
            content = RecordDict({"config": message.content["config"]})
            order = Message(content, message.metadata.dst_node_id, MessageType.TRAIN)
            order.metadata.__dict__["_message_id"] = message.metadata.message_id
            self.pieces[message.metadata.message_id] = self._taken_to_pieces(order)
        return list(self.pieces)

    def answer(self, order):
        cluster = self.clusters[order.metadata.dst_node_id]
        reply = answer_to(order, cluster, {}, weight=1 + cluster)
        reply.content["arrays"] = self.arrays
        return reply

    def _taken_to_pieces(self, order):
        reply = self.answer(order)
        nested = get_all_nested_objects(reply)
        for name, piece in nested.items():
            if name not in self.shared:
                self.shared[name] = piece.deflate()
        return reply.object_id, {name: self.shared[name] for name in nested}


def orders_of(grid, arrays, round_):
    return [
        Message(
            RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": round_})}),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
        )
        for node in grid.nodes
    ]


def grids(far, folder):
    """The layers of a run around a grid."""
    spool = UpdateSpool(folder)
    return RecordingGrid(BoundedGrid(SinglePulls(far, spool), far.clusters), far.clusters, spool=spool)


def extra_models(num_clusters, folder, layers=grids):
    """Most memory that each of two rounds' exchange and average take beside the round's weights, in models."""
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1
    generator = np.random.default_rng(0)
    weights = {f"w{n}": generator.random(ARRAY_BYTES // 4, dtype=np.float32) for n in range(NUM_ARRAYS)}
    start = to_arrays({name: np.zeros_like(value) for name, value in weights.items()})
    far = FarGrid(num_clusters, weights)
    # All pieces are here before anything is counted.
    far.push_messages(orders_of(far, start, 0))
    far.pieces.clear()
    recording, aggregator = layers(far, folder), averaging_strategy(ServerOptimizerConfig())
    mean, peaks = start, []
    del start
    tracemalloc.start()
    for round_ in (1, 2):
        start = mean
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        replies = recording.send_and_receive(orders_of(far, start, round_))
        mean, _ = aggregator.aggregate_train(round_, replies)
        peaks.append((tracemalloc.get_traced_memory()[1] - before) / MODEL_BYTES)
        assert len(replies) == num_clusters and isinstance(mean["w0"], Array)
        np.testing.assert_allclose(mean["w3"].numpy(), weights["w3"], rtol=1e-5)
    return peaks
