"""What the server learns of its clusters before round 1, in a real simulation."""

import json

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

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


FROZEN = {"embedding.w": torch.ones(1000), "block.0.w": torch.ones(10, 20)}


def server(grid):
    """Set up two clusters: as if both had trained, as if only the first had, and with frozen weights."""
    import logging

    from flower_app.training.cluster_setup import set_up_clusters, wait_for_nodes

    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    nodes, found = wait_for_nodes(grid, 2, 60), {}
    for name, frozen, trained in (("both", {}, {0, 1}), ("first", {}, {0}), ("frozen", FROZEN, {0})):
        clusters = set_up_clusters(grid, nodes, {}, frozen, 2, 128, trained)
        assert [state.cluster for state in clusters.states] == [0, 1]
        found[name] = [text for text in said if "cluster" in text], clusters.bytes_down
        said.clear()
    return found


@pytest.fixture(scope="module")
def found():
    return simulate(server, answering([True, False]))


def test_a_cluster_that_lost_its_checkpoint_is_named_when_a_run_goes_on(found):
    (said,), _ = found["both"]
    assert said.startswith("cluster 1 has no checkpoint of its own left") and "fresh optimizer" in said


def test_a_cluster_that_had_not_trained_has_no_checkpoint_to_lose(found):
    assert found["first"][0] == []


def test_frozen_weights_go_to_every_cluster_and_count(found):
    assert found["first"][1] == 0
    size = sum(value.nbytes for value in FROZEN.values())
    # Each array travels with a header of its own.
    assert 2 * size < found["frozen"][1] < 2 * size + 1000
