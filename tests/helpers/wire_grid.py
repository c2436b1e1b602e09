"""A round whose replies Flower itself takes to pieces and puts together, as over a network."""

import json

import torch
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from helpers.fake_grid import FakeGrid
from helpers.replies import answer_to
from strategies.baselines.stock import make_stock
from strategies.grid.parcels import unpack_message
from strategies.grid.recording import RecordingGrid
from strategies.grid.single_pulls import SinglePulls
from strategies.records import to_arrays, to_tensors

NUM_CLUSTERS, HOSTILE = 3, 2


START = {"embedding.w": torch.zeros(1000), "embedding.b": torch.zeros(3)}


class WireGrid(FakeGrid):
    """Replies are taken to pieces and put together again by Flower's own code, as over a network."""

    pull_interval = 0.01

    def __init__(self, tamper):
        super().__init__(self.answer, NUM_CLUSTERS)
        self.tamper, self.pieces = tamper, {}

    def answer(self, message, cluster):
        """Answer in many pieces, whatever the order came in: there is more to tamper with."""
        unpack_message(message)
        return answer_to(message, cluster, {name: value + cluster for name, value in START.items()})

    def push_messages(self, messages):
        sent = list(messages)
        for reply in super().send_and_receive(sent):
            # As a node does it: an object has a number once, not once for each that it lies in.
            with no_object_id_recompute():
                pieces = {name: piece.deflate() for name, piece in get_all_nested_objects(reply).items()}
                number = reply.object_id
            if reply.metadata.src_node_id == self.nodes[HOSTILE]:
                pieces = self.tamper(reply, pieces)
            self.pieces[reply.metadata.reply_to_message_id] = number, pieces
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids):
        replies = []
        for message_id in message_ids:
            if message_id in self.pieces:
                replies.append(inflate_object_from_contents(*self.pieces.pop(message_id)))
        return replies

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))


def round_of(tamper, spool=None):
    """A round of FedAvg over the wire; the weights, and the round's record."""
    grid = WireGrid(tamper)
    recording = RecordingGrid(SinglePulls(grid, spool), grid.clusters, spool=spool)
    server = make_stock("FedAvg", {}, NUM_CLUSTERS)
    try:
        result = server.start(recording, initial_arrays=to_arrays(START), num_rounds=1, timeout=30)
    except Exception as error:
        raise AssertionError(f"the run ended with {error!r}") from error
    return to_tensors(result.arrays), recording.last_round


def change_array(pieces, **changes):
    """Change what the first array says of itself."""
    for name, piece in pieces.items():
        if piece.startswith(b"Array "):
            head, _, body = piece.partition(b"\x00")
            body = json.dumps(json.loads(body) | changes).encode()
            kind, children, _ = head.split(b" ")
            return pieces | {name: b" ".join((kind, children, str(len(body)).encode())) + b"\x00" + body}
    raise AssertionError("no array")
