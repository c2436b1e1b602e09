"""What the server learns of its clusters before round 1, in a real simulation."""

import json

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from simulation import simulate
from test_strategies import states


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


def warnings_of(trained):
    """A server that sets up two clusters and returns what it warned of."""

    def server(grid):
        import logging

        from flower_app.cluster_setup import set_up_clusters, wait_for_nodes

        said = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("flwr").addHandler(handler)
        clusters = set_up_clusters(grid, wait_for_nodes(grid, 2, 60), {}, {}, 2, 128, trained)
        assert [state.cluster for state in clusters.states] == [0, 1] and clusters.bytes_down == 0
        return [text for text in said if "cluster" in text]

    return server


def test_a_cluster_that_lost_its_checkpoint_is_named_when_a_run_goes_on():
    (said,) = simulate(warnings_of(trained={0, 1}), answering([True, False]))
    assert said.startswith("cluster 1 has no checkpoint of its own left") and "fresh optimizer" in said


def test_a_cluster_that_had_not_trained_has_no_checkpoint_to_lose():
    assert simulate(warnings_of(trained={0}), answering([True, False])) == []
