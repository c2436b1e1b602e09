"""What a node was told before round 1, kept in its folder: a control unit that is lost starts again with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from client_pipeline.durable import put_in_place

_TOLD, _FROZEN = "setup.json", "frozen.safetensors"


def write(folder: Path, told: Mapping[str, Any], frozen: Mapping[str, Tensor]) -> None:
    """Keep the set-up's values and the frozen weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if frozen:
        aside = folder / f".{_FROZEN}"
        save_file({name: value.contiguous() for name, value in frozen.items()}, aside)
        put_in_place(aside, folder / _FROZEN)
    aside = folder / f".{_TOLD}"
    aside.write_text(json.dumps(dict(told)), encoding="utf-8")
    put_in_place(aside, folder / _TOLD)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what was kept.

    Raises
    ------
    FileNotFoundError
        If nothing was; the message names the file.
    """
    path = folder / _TOLD
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no set-up of this node's control unit; start the run again")
    frozen = folder / _FROZEN
    return json.loads(path.read_text(encoding="utf-8")), load_file(frozen) if frozen.is_file() else {}
