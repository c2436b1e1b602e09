"""A trained model that a control unit's client app takes from the server, for the door of its box."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from client_pipeline import durable
from client_pipeline.partition.spec import ModelSpec, is_outside
from flower_app.config.run_config import RunConfig
from flower_app.node.config import NodeConfig
from flower_app.node.door_folder import DoorFolder
from strategies.clusters import ClusterState

_OPEN_S = 900.0
"""Longest wait for the door to open: it imports, devices join and load [s]."""
_POLL_S = 0.5


def take_model(
    config: RunConfig, node: NodeConfig, values: Mapping[str, Any], weights: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    """Hand a model to the box's door, and wait until it is open; or let the door close.

    Parameters
    ----------
    config : the run's
    node : the box's own
    values : ``name``, ``spec``, ``tokenizer``, ``task``, ``base`` and ``network`` of the run; or ``end``: close
    weights : by global name; none with ``end``

    Returns
    -------
    ``cluster``, and ``door``: its address; ``closed`` with ``end``.

    Raises
    ------
    ValueError
        If the box's owner has opened no door, frozen weights are not on this machine, or the door does not open.
    """
    cluster = node.cluster
    if not node.door:
        raise ValueError(
            f"cluster {cluster}: its control unit has no door; only its owner opens one: collapipe join --serve ADDRESS"
        )
    door = DoorFolder(Path(node.door))
    if values.get("end"):
        door.withdraw()
        return {"cluster": cluster, "closed": True}
    network = json.loads(str(values["network"]))
    if cluster >= len(network):
        raise ValueError(f"cluster {cluster}: the run has the clusters 0 to {len(network) - 1}, and does not need it")
    declared = ClusterState.from_dict(network[cluster])
    state = ClusterState(
        cluster=cluster,
        node_id=0,
        devices=node.devices(declared.devices),
        block_memory=declared.block_memory,
        num_examples=0,
    )
    door.withdraw()
    _keep_model(door.folder, config, node, values, weights)
    number = door.give({"name": values["name"], "config": config.to_flat(), "state": state.to_dict()})
    deadline = time.monotonic() + _OPEN_S
    while not (status := door.status(number)):
        if time.monotonic() > deadline:
            door.withdraw()
            raise ValueError(f"cluster {cluster}: its door did not open within {_OPEN_S:g} s; the box's log says why")
        time.sleep(_POLL_S)
    if error := status["error"]:
        door.withdraw()
        raise ValueError(f"cluster {cluster}: its door does not open: {error}")
    return {"cluster": cluster, "door": status["address"]}


def _keep_model(
    folder: Path, config: RunConfig, node: NodeConfig, values: Mapping[str, Any], weights: Mapping[str, NDArray[Any]]
) -> None:
    """Write the model's folder. Frozen weights in files stay where the training has left them on this machine."""
    # They import torch, which this process does without else.
    import torch

    from client_pipeline.families.fresh_base import frozen_base
    from client_pipeline.link.weight_pull import weights_here
    from client_pipeline.weights.base_weights import BaseWeights
    from flower_app.saved_model import keep_versions, save_model

    spec = ModelSpec.from_json(str(values["spec"]))
    if is_outside(spec.family):
        raise ValueError(f"expected a model of the transformers library to answer with, found one of {spec.family}")
    base = frozen_base(str(values["base"]), spec, node.model_path) if values["base"] else None
    if isinstance(base, BaseWeights):
        base = weights_here(base, node.weight_cache)
    durable.make_folders(folder)
    # The arrays' own memory is read alone.
    tensors = {
        name: torch.from_numpy(value if value.flags.writeable else value.copy()) for name, value in weights.items()
    }
    save_model(folder, spec, tensors, str(values["tokenizer"]), json.loads(str(values["task"])), base=base)
    keep_versions(folder, ())


def refuse_while_serving(node: NodeConfig) -> None:
    """Refuse to train on a cluster that answers.

    Raises
    ------
    ValueError
        Naming the model, and the remedy.
    """
    if node.door and (order := DoorFolder(Path(node.door)).order()):
        raise ValueError(
            f"cluster {node.cluster}: its control unit answers with the model of run {order.get('name')!r}, and a "
            "cluster either trains or answers; end the answers first: collapipe serve --superlink ADDRESS --end"
        )
