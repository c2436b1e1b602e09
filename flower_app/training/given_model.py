"""A run's model for the boxes of its deployment, which answer with it at their own doors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from client_pipeline.families.registry import is_decoder_only
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from flower_app.config.run_config import RunConfig
from flower_app.config.serve_config import END
from flower_app.runs import run_directory
from flower_app.runs.doors import SERVE_FOLDER, door_line
from flower_app.runs.run_lock import nodes_held, serving
from flower_app.saved_model import read_model
from flower_app.training.cluster_setup import nodes_there, wait_for_nodes
from flower_app.training.network import training_scenario
from flower_app.training.run_grid import NODES_TIMEOUT_S
from strategies.clusters import ClusterState
from strategies.flower_names import log
from strategies.grid.received_report import checked_door
from strategies.grid.received_values import MalformedReply
from strategies.grid.reply_matching import error_reason, match_replies
from strategies.printable import printable
from strategies.records import ARRAYS, CONFIG, SERVE, to_arrays

_GIVE_S = 3600.0
"""Time for a control unit to take the model, and to open its door [s]."""
_MOST_CHARACTERS = 2000
"""Longest message of a node that is shown."""


def serve_on_boxes(config: RunConfig, grid: Grid) -> None:
    """Be the server app of ``collapipe serve --superlink``: give a finished run's model to the boxes, or end answers.

    Raises
    ------
    ValueError
        If too few nodes come, another run holds one of them, or no box answers with the model.
    """
    run_dir = Path(config.run_dir).resolve()
    folder = run_dir / SERVE_FOLDER
    with serving(folder):
        try:
            # Those that are there end their answers: a lost box need not come back for that.
            num_clusters = config.num_clusters or training_scenario(config).num_clusters
            if config.serve.when == END:
                nodes = nodes_there(grid, num_clusters)
                log(INFO, "boxes that are connected: %d of %d", len(nodes), num_clusters)
            else:
                nodes = wait_for_nodes(grid, num_clusters, NODES_TIMEOUT_S)
            with nodes_held(nodes, folder):
                doors = give_model(grid, nodes, config, run_dir)
            if not any("error" not in door for door in doors):
                raise ValueError("; ".join(door["error"] for door in doors) or "no node is a cluster of this run")
            run_directory.write_summary(folder, run_directory.FINISHED, doors=doors)
        except BaseException as error:
            # On a full disk the command says how it ended.
            with suppress(OSError):
                run_directory.write_failure(folder, error)
            raise


def give_model(grid: Grid, nodes: Sequence[int], config: RunConfig, run_dir: Path) -> list[dict[str, Any]]:
    """Give a run's model to every node's box, all parts of it, or end its answers.

    Parameters
    ----------
    grid : Flower's
    nodes : of the run
    config : ``serve.when`` says what is asked of the boxes
    run_dir : with the model

    Returns
    -------
    By cluster: ``cluster`` with the address of its ``door``, or ``closed``; ``error`` where a box does not answer.

    Raises
    ------
    ValueError, FileNotFoundError
        If the run has no model that boxes can answer with.
    """
    values: dict[str, Any] = {"end": True}
    arrays = to_arrays({})
    if config.serve.when != END:
        stored = read_model(run_dir, config.model.family, config.task.name)
        check_answering(stored.spec)
        scenario = training_scenario(config, stored.spec)
        scenario = scenario.first(config.num_clusters or scenario.num_clusters)
        network = [
            ClusterState(cluster=n, node_id=0, devices=devices, block_memory=scenario.block_memory, num_examples=0)
            for n, devices in enumerate(scenario.clusters)
        ]
        values = {
            "name": run_dir.name,
            "spec": stored.spec.to_json(),
            "tokenizer": stored.tokenizer_json,
            "task": json.dumps(stored.task),
            "base": "" if stored.base is None else stored.base.to_json(),
            "network": json.dumps([cluster.to_dict() for cluster in network]),
        }
        arrays = to_arrays(stored.weights)
    content = RecordDict({CONFIG: ConfigRecord({"json": json.dumps(values)}), ARRAYS: arrays})
    orders = [Message(content, dst_node_id=node, message_type=SERVE) for node in nodes]
    answers = match_replies(orders, grid.send_and_receive(orders, timeout=_GIVE_S))
    doors = [_door(node, reply) for node, reply in zip(nodes, answers, strict=True)]
    for door in doors:
        log(WARNING if "error" in door else INFO, "%s", door_line(door))
    return doors


def check_answering(spec: ModelSpec) -> None:
    """Refuse a model that boxes cannot answer with.

    Raises
    ------
    ValueError
        Naming its family and head.
    """
    if not is_decoder_only(spec.family) or spec.head != CAUSAL_LM:
        raise ValueError(
            f"serve.when: boxes answer with decoder-only language models of the transformers library, found "
            f"{spec.family!r} with the head {spec.head}; leave it out, and use collapipe predict"
        )


def _door(node: int, reply: Message | None) -> dict[str, Any]:
    """Return what a node says of its door; whatever is wrong with it is an error of this node alone."""
    if reply is None:
        return {"error": f"node {node}: no answer within {_GIVE_S:g} s"}
    if reply.has_error():
        return {"error": printable(f"node {node}: {error_reason(reply)}", _MOST_CHARACTERS)}
    try:
        answer = checked_door(reply.content)
    except MalformedReply as error:
        return {"error": printable(f"node {node}: its answer cannot be read: {error}", _MOST_CHARACTERS)}
    return {
        name: printable(value, _MOST_CHARACTERS) if isinstance(value, str) else value for name, value in answer.items()
    }
