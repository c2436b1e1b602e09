"""Flower's grid of a SuperLink whose answers to requests are made here: replies lie in it as pieces."""

from types import SimpleNamespace

from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    Message as ProtoMessage,
    Metadata as ProtoMetadata,
    ObjectTree,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.superlink.grid import HttpGrid

from helpers.fake_grid import FakeGrid


def pieces_of(message):
    """The id of a message and its pieces by their ids, as a node pushes them."""
    # As a node does it: an object has an id once, not once for each that it lies in.
    with no_object_id_recompute():
        pieces = {name: piece.deflate() for name, piece in get_all_nested_objects(message).items()}
        return message.object_id, pieces


class PieceGrid(FakeGrid, HttpGrid):
    """Replies lie at its SuperLink in pieces, until their receipt is confirmed."""

    pull_interval = 0.01
    node = Node(node_id=1)
    run = SimpleNamespace(run_id=1)

    def __init__(self, client, num_nodes):
        super().__init__(client, num_nodes)
        self.pieces = {}
        """Order's id -> id and pieces of its reply."""

    @property
    def _runtime_client(self):
        return self

    def PullMessages(self, request):
        ids = [self.pieces[name][0] for name in request.message_ids if name in self.pieces]
        return PullAppMessagesResponse(
            messages_list=[ProtoMessage(metadata=ProtoMetadata(message_id=name)) for name in ids],
            message_object_trees=[ObjectTree(object_id=name) for name in ids],
        )

    def PullObject(self, request):
        for _, pieces in self.pieces.values():
            if request.object_id in pieces:
                content = pieces[request.object_id]
                return PullObjectResponse(object_found=True, object_available=True, object_content=content)
        return PullObjectResponse(object_found=False)

    def ConfirmMessageReceived(self, request):
        self.pieces = {name: piece for name, piece in self.pieces.items() if piece[0] != request.message_object_id}
        return ConfirmMessageReceivedResponse()
