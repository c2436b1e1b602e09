"""Whether the Hugging Face hub answers, tried once: its client tries each file five times, for over a minute in all."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit

_TRY_S = 5.0
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_OFFLINE = "HF_HUB_OFFLINE"


def hub_host() -> str:
    """The hub's host, as the environment says."""
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "huggingface.co"


@cache
def hub_answers(host: str) -> bool:
    """Whether a connection to the hub can be opened, asked once in a process; true where a proxy would open it."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    try:
        socket.create_connection((host, 443), timeout=_TRY_S).close()
    except OSError:
        return False
    return True


def settle_offline() -> None:
    """Let the hub's client look into its cache alone where the hub does not answer, in all processes that we start."""
    if os.environ.get(_OFFLINE) or hub_answers(hub_host()):
        return
    os.environ[_OFFLINE] = "1"
    # Who is loaded has read the variable already.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if (module := sys.modules.get(name)) is not None:
            setattr(module, _OFFLINE, True)


def offline_remedy() -> str:
    """End a message about what the hub should have had; empty where the hub answers."""
    if not os.environ.get(_OFFLINE):
        return ""
    return (
        f"; {hub_host()} does not answer from here or {_OFFLINE} is set, and the cache has none: download it where "
        "there is a network, and name its folder"
    )
