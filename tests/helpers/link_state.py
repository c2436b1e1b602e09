"""Flower's own link state, and SuperNodes of which the test says when they answer."""

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from helpers.patience import eventually
from strategies.flower_names import CLIENT_APP_RAISED_EXCEPTION
from strategies.grid.reply_timeouts import BoundedGrid

FOR_EVER = 1e9


class Link:
    """Flower's link state of one run, and the SuperNodes of its clusters."""

    def __init__(self, num_clusters):
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        run = Run.create_empty(1)
        run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
        self.state = factory.state()
        self.state.run_ids[1] = RunRecord(run=run)
        self.state.task_store[1] = Task(task_id=1, run_id=1)
        self.grid = InMemoryGrid(factory, pull_interval=0.02)
        self.grid.set_run(run)
        self.nodes = [self.state.create_node("", "", bytes([n]) * 32, FOR_EVER) for n in range(num_clusters)]
        for node in self.nodes:
            self.state.activate_node(node, FOR_EVER)
        self.clusters = {node: cluster for cluster, node in enumerate(self.nodes)}
        self.waits = []

    def bounded(self, decoder=None, **options):
        return BoundedGrid(self.grid, self.clusters, decoder, on_wait=self.waits.append, **options)

    def orders(self, *clusters, kind="train"):
        return [
            Message(RecordDict({"config": ConfigRecord({"n": c, "server-round": 1})}), self.nodes[c], kind)
            for c in clusters
        ]

    def pull(self, cluster):
        """Take a node's next order, as its SuperNode does."""
        return eventually(lambda: self.state.get_message_ins(self.nodes[cluster], 1))[0]

    def answer(self, order, error="", code=CLIENT_APP_RAISED_EXCEPTION):
        reply = Message(Error(code, error) if error else RecordDict(), reply_to=order)
        reply.metadata.__dict__["_message_id"] = f"reply to {order.metadata.message_id}"
        assert self.state.store_message_res(reply)

    def beat_for(self, cluster, seconds):
        """Let a node's next heartbeat be its last."""
        self.state.acknowledge_node_heartbeat(self.nodes[cluster], seconds / 2)

    def start_again(self, cluster):
        self.state.deactivate_node(self.nodes[cluster])
        self.state.activate_node(self.nodes[cluster], FOR_EVER)
