"""Reports as a real control unit gives them, for clients of tests that stand in for one."""

from functools import cache

from flwr.app import Message

from client_pipeline.system.scenario import load_scenario


@cache
def any_device():
    """A device's profile."""
    return load_scenario("default").clusters[0][0]


def report_of(order, cluster, node_id, **changes):
    """A whole report of a round.

    Parameters
    ----------
    order : the train order, as ``read_train_config`` gives it
    cluster, node_id : whose report it is
    changes : of its keys
    """
    from client_pipeline.partition.plan import ClusterPlan

    plan = order.plan or ClusterPlan(delta=(2, 0), order=(0,), m=1)
    profile = any_device()
    state = {
        "cluster": cluster,
        "node_id": node_id,
        "devices": [dict(vars(profile)) for _ in plan.delta],
        "block_memory": 1e6,
        "num_examples": 8,
        "last_loss": None,
    }
    return {
        "cluster": cluster,
        "num_examples": 8,
        "loss": 1.0,
        "plan": plan.to_dict(),
        "devices": {str(k): {"blocks": d, "busy_s": 0.1} for k, d in enumerate(plan.delta) if d},
        "measured": {
            "tebs": {str(k): [[8, 4, 0.02]] for k, d in enumerate(plan.delta) if d},
            "links": {str(plan.order[0]): [[8, 4, 0.01]]},
            "inlets": {str(plan.order[0]): [[8, 3, 0.01]]},
            "spare": {str(k): [[8, 3, 0.02]] for k, d in enumerate(plan.delta) if not d},
            "stream": [[8, 4, 0.03]],
            "pipeline_s": 0.1,
        },
        "timeline": [["F", 0, 0, 0.0, 0.1], ["B", 0, 0, 0.1, 0.3]],
        "state": state,
        "faults": [],
        "peak_bytes": 1,
        "moved_blocks": 0,
        "moved_bytes": 0,
        "link_bytes": 0,
        "snapshots": {"taken": 0, "bytes": 0, "fetch_s": 0.0},
        "prepare_s": 0.1,
        "train_s": 0.2,
        "collect_s": 0.1,
        "paced_s": None,
        "stream_bytes": {"up": 0, "down": 0},
        "payload_bytes": {"up": 0, "down": 0, "update": 0},
    } | changes


def answer_to(message, cluster, weights, *, weight=1, loss=1.0, steps=1, wall_s=0.1, **changes):
    """An honest control unit's reply to a train message."""
    from flwr.app import Message

    from strategies.records import CONFIG, read_train_config, reply_content

    order = read_train_config(message.content.config_records[CONFIG], cluster)
    report = report_of(order, cluster, message.metadata.dst_node_id, **changes)
    content = reply_content(weights, weight=weight, loss=loss, steps=steps, wall_s=wall_s, report=report)
    return Message(content, reply_to=message)


def index_of(grid, nodes):
    """Node id of each partition-id, asked of the nodes."""
    from flwr.app import ConfigRecord, RecordDict

    asked = [Message(RecordDict({"c": ConfigRecord()}), dst_node_id=n, message_type="query") for n in nodes]
    # On a busy machine whoever answers may import for as long as this.
    replies = grid.send_and_receive(asked, timeout=300)
    return {int(r.content.config_records["c"]["partition"]): r.metadata.src_node_id for r in replies}
