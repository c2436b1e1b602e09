"""Ids on the Hugging Face hub, told from paths, and the hub's reach.

A mistyped path must not become a download. A hub that does not answer is tried once: its client tries each file five
times, for over a minute in all.
"""

from __future__ import annotations

import os
import re
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

_TRY_S = 5.0
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_OFFLINE = "HF_HUB_OFFLINE"
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
    if not os.environ.get(_OFFLINE) and not hub_answers(hub_host()):
        # The hub's client reads it at its import, here and in the processes that this one starts.
        os.environ[_OFFLINE] = "1"


def hub_host() -> str:
    """Return the hub's host, by the environment."""
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "huggingface.co"


@cache
def hub_answers(host: str) -> bool:
    """Try once in a process to open a connection to the hub; true where a proxy would open it."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        socket.create_connection((host, 443), timeout=_TRY_S).close()
    except OSError:
        return False
    return True


def is_offline() -> bool:
    """Return whether the hub's client is to look into its cache alone: the value of ``local_files_only``."""
    return bool(os.environ.get(_OFFLINE))


def offline_remedy() -> str:
    """End a message about a file that the hub should have had; empty where the hub answers."""
    if not is_offline():
        return ""
    return (
        f"; {hub_host()} does not answer from here or {_OFFLINE} is set, and the cache has none: download it where "
        "there is a network, and name its folder"
    )
