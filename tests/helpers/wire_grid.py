"""A round whose replies Flower itself takes to pieces and puts together, as over a network."""

import json

import torch

from helpers.piece_grid import PieceGrid, pieces_of
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.grid.parcels import unpack_message
from strategies.grid.recording import RecordingGrid
from strategies.grid.single_pulls import SinglePulls
from strategies.records import to_arrays, to_tensors

NUM_CLUSTERS, HOSTILE = 3, 2
START = {"embedding.w": torch.zeros(1000), "embedding.b": torch.zeros(3)}
LARGE_START = {"embedding.w": torch.zeros(600_000), "embedding.b": torch.zeros(3)}
"""Weights that are put together on disk."""


class WireGrid(PieceGrid):
    """Replies are taken to pieces by Flower's own code, and tampered with."""

    def __init__(self, tamper, start=START):
        super().__init__(self.answer, NUM_CLUSTERS)
        self.tamper, self.start = tamper, start

    def answer(self, message, cluster):
        """Answer in many pieces, whatever the order came in: there is more to tamper with."""
        unpack_message(message)
        weights = {name: value + cluster for name, value in self.start.items()}
        # No two replies have a piece in common.
        return answer_to(message, cluster, weights, wall_s=0.1 + cluster)

    def push_messages(self, messages):
        sent = list(messages)
        for reply in super().send_and_receive(sent):
            number, pieces = pieces_of(reply)
            if reply.metadata.src_node_id == self.nodes[HOSTILE]:
                pieces = self.tamper(reply, pieces)
            self.pieces[reply.metadata.reply_to_message_id] = number, pieces
        return [message.metadata.message_id for message in sent]


def round_of(tamper, spool=None, start=START):
    """A round of FedAvg over the wire; the weights, and the round's record."""
    grid = WireGrid(tamper, start)
    recording = RecordingGrid(SinglePulls(grid, spool), grid.clusters, spool=spool)
    server = make_stock("FedAvg", {}, NUM_CLUSTERS)
    result = server.start(recording, initial_arrays=to_arrays(start), num_rounds=1, timeout=120)
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
