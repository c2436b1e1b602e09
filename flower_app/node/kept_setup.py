"""What a node was told before round 1, kept in its folder: a control unit that is lost starts again with it.

One file, so that values and frozen weights are always of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from client_pipeline import durable
from client_pipeline.partition.base_weights import BaseWeights
from flower_app.node.config import NodeConfig
from strategies.records import BASE_KEY

_FILE = "setup.safetensors"


def write(folder: Path, setup_values: Mapping[str, Any], frozen: Mapping[str, Tensor]) -> None:
    """Keep the set-up's values and the frozen weights."""
    durable.make_folders(folder)
    durable.remove_leftovers(folder)
    tensors = {name: value.contiguous() for name, value in frozen.items()}
    durable.write_file(
        folder / _FILE, partial(save_file, tensors, metadata={"collapipe": json.dumps(dict(setup_values))})
    )


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what was kept.

    Raises
    ------
    FileNotFoundError
        If nothing was; the message names the file.
    ValueError
        If the file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no set-up of this node's control unit; start the run again")
    try:
        with safe_open(path, framework="pt") as file:
            setup_values = json.loads((file.metadata() or {})["collapipe"])
            return dict(setup_values), {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a node's set-up, {error}; start the run again") from error


def frozen_of_node(
    setup_values: Mapping[str, Any], sent: Mapping[str, Tensor], node: NodeConfig
) -> Mapping[str, Tensor]:
    """Return a run's frozen weights by global name: of this machine's files, with their digests compared, or as sent.

    Raises
    ------
    ValueError
        If the files are not here, or not those of the server; the message names the folder and the digest.
    """
    text = str(setup_values.get(BASE_KEY, ""))
    return BaseWeights.from_json(text, node.model_path).check() if text else sent
