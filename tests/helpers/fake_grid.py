"""A grid whose nodes answer at once, in this process; messages, strategies and our own grids are the real ones."""

import uuid
from concurrent.futures import ThreadPoolExecutor

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.serverapp import Grid

SUPERLINK = 1
FIRST_NODE = 101


class FakeGrid(Grid):
    """Nodes 101, 102, ... of the clusters 0, 1, ...; each message is answered by ``client(message, cluster)``.

    A client that returns None never answers; one that raises answers with an error, as Flower's own would.
    """

    def __init__(self, client, num_nodes):
        self.client = client
        self.nodes = range(FIRST_NODE, FIRST_NODE + num_nodes)
        self.clusters = {node: cluster for cluster, node in enumerate(self.nodes)}

    def set_run(self, run):
        pass

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **named):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return []

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        # All at once: clients may wait for each other at the decoder.
        with ThreadPoolExecutor(max(len(sent), 1)) as threads:
            return [reply for replies in threads.map(self._answers, sent) for reply in replies]

    def _answers(self, message):
        cluster = self.clusters[message.metadata.dst_node_id]
        try:
            reply = self.client(message, cluster)
        except Exception as error:
            reply = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
        return [] if reply is None else reply if isinstance(reply, list) else [reply]


def superlink_error(message, reason="Node Unavailable"):
    """Return the SuperLink's own answer for a node that is gone; its sender is not the node."""
    told = message.metadata
    metadata = Metadata(
        run_id=told.run_id,
        message_id=uuid.uuid4().hex,
        src_node_id=SUPERLINK,
        dst_node_id=SUPERLINK,
        reply_to_message_id=told.message_id,
        group_id=told.group_id,
        created_at=told.created_at,
        ttl=0,
        message_type=told.message_type,
    )
    return make_message(metadata=metadata, error=Error(3, reason))
