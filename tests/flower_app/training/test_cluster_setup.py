"""Facts about the clusters before round 1, in a real simulation."""

import json

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_app.training.cluster_setup import wait_for_nodes
from helpers.cluster_states import states
from helpers.simulation import simulate

pytestmark = pytest.mark.slow


def answering(restored):
    """A ClientApp whose node n answers that it found its own checkpoint as ``restored[n]`` says."""
    app = ClientApp()
    described = [state.to_dict() for state in states()]

    @app.query("setup")
    def setup(message, context):
        cluster = int(context.node_config["partition-id"])
        state = described[cluster] | {"node_id": message.metadata.dst_node_id, "num_examples": 10}
        answer = {"state": state, "truncated": 0, "restored": restored[cluster]}
        return Message(RecordDict({"config": ConfigRecord({"json": json.dumps(answer)})}), reply_to=message)

    return app


def server(grid):
    """Set up two clusters as if both had trained; returns the warnings."""
    import logging

    from flower_app.training.cluster_setup import set_up_clusters, wait_for_nodes

    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    clusters = set_up_clusters(grid, wait_for_nodes(grid, 2, 60), {}, {}, 2, 128, {0, 1})
    assert [state.cluster for state in clusters.states] == [0, 1]
    return [text for text in said if "cluster" in text]


def test_a_cluster_that_lost_its_checkpoint_is_named_when_a_run_goes_on():
    (said,) = simulate(server, answering([True, False]))
    assert said.startswith("cluster 1 has no checkpoint of its own left") and "fresh optimizer" in said


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
