"""Set-up of a node, kept in its folder: a control unit that is lost starts again with it.

One file, so that values and frozen weights are always of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from client_pipeline import durable

_FILE = "setup.safetensors"


def write(folder: Path, setup_values: Mapping[str, Any], frozen: Mapping[str, NDArray[Any]]) -> None:
    """Keep the set-up's values and the frozen weights."""
    durable.make_folders(folder)
    durable.remove_leftovers(folder)
    durable.write_file(
        folder / _FILE, partial(save_file, dict(frozen), metadata={"collapipe": json.dumps(dict(setup_values))})
    )


def read(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
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
        with safe_open(path, framework="np") as file:
            setup_values = json.loads((file.metadata() or {})["collapipe"])
            return dict(setup_values), {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a node's set-up, {error}; start the run again") from error
