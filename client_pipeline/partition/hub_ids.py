"""Ids on the Hugging Face hub, told from paths: a path that is mistyped must not become a download."""

from __future__ import annotations

import re
from pathlib import Path

from client_pipeline.partition.hub_reach import settle_offline

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = (".bin", ".csv", ".gguf", ".json", ".jsonl", ".parquet", ".safetensors", ".toml", ".txt")


def check_source(value: str, key: str) -> None:
    """Refuse what looks like a path where there is nothing; a hub id is looked for in the cache if the hub is away.

    Looks like a path: what starts with ``/``, ``.`` or ``~``, ends with ``/`` or a file's ending, has more than one
    ``/``, or begins with a folder that is here.

    Parameters
    ----------
    value : a folder, or a hub id such as ``google/bert_uncased_L-2_H-128_A-2``
    key : of the configuration, for the message

    Raises
    ------
    FileNotFoundError
        Saying where it was looked for.
    """
    if Path(value).expanduser().exists():
        return
    first, slash, _ = value.partition("/")
    if not _ID.fullmatch(value) or value.endswith(_FILES) or (slash and Path(first).is_dir()):
        raise FileNotFoundError(
            f"{key}: expected a folder, or a hub id such as organisation/name; {value!r} looks like a path, and "
            f"{Path(value).expanduser().absolute()} does not exist; check the spelling or give the whole path"
        )
    settle_offline()
