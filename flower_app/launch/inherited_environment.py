"""The user's environment as programs can use it that work in other folders, and that speak to this machine."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

_FOLDER_LISTS = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH")
_PATHS = (
    *("HOME", "TMPDIR", "TMP", "TEMP", "FLWR_HOME", "PYTHONPYCACHEPREFIX", "MPLCONFIGDIR", "COLLAPIPE_TEST_DATA"),
    *(
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "TORCH_HOME",
        "TRANSFORMERS_CACHE",
        "SENTENCE_TRANSFORMERS_HOME",
    ),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_TOKEN_PATH"),
    *("HF_XET_CACHE", "HF_MODULES_CACHE", "WANDB_DIR", "WANDB_CACHE_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
_EXCEPTIONS = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def usable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment with its paths made absolute, and without proxies that Flower's HTTP client cannot use.

    The programs of a run work in folders of their own. Flower's client fails at a proxy that it cannot use, whomever
    it is to reach; downloads could not use it either.
    """
    usable = {name: value for name, value in environment.items() if not _is_proxy(name) or _is_usable_proxy(value)}
    for name in _PATHS:
        if usable.get(name):
            usable[name] = _absolute(usable[name])
    for name in _FOLDER_LISTS:
        if usable.get(name):
            # Python and the shell read an empty entry as the working directory.
            usable[name] = os.pathsep.join(map(_absolute, usable[name].split(os.pathsep)))
    return usable


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment for a program that speaks to this machine alone, where a proxy only stands in the way."""
    return {name: value for name, value in environment.items() if not _is_proxy(name)}


def past_proxies(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Copy an environment whose programs reach these hosts, and those that the user excepts, without a proxy."""
    excepted = [_exception(host.strip()) for name in _EXCEPTIONS for host in environment.get(name, "").split(",")]
    if "*" in excepted:
        # Python reads * as all hosts only if it stands alone; gRPC does not know it.
        environment = without_proxies(environment)
    # Some programs read one variable, some the other.
    value = ",".join(dict.fromkeys(filter(None, (*excepted, *hosts))))
    return {**environment, **dict.fromkeys(_EXCEPTIONS, value)}


def _absolute(path: str) -> str:
    # Libraries expand ~ and variables themselves.
    return path if path.startswith(("~", "$")) else os.path.abspath(path)


def _exception(host: str) -> str:
    """Return a host as all clients read it, IPv6 without brackets; empty where Flower's fails at it, as at networks."""
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and "://" not in bare:
        try:
            ipaddress.ip_address(bare)
        except ValueError:
            name, _, port = bare.rpartition(":")
            return bare if port.isdigit() and ":" not in name else ""
    return bare if "://[" not in host else ""


def _is_proxy(name: str) -> bool:
    return name.lower() in _PROXIES


def _is_usable_proxy(url: str) -> bool:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_whole = parts.port != 0 and bool(parts.hostname) and url == url.strip()
        if re.fullmatch(r"[\d.]+", parts.hostname or ""):
            ipaddress.ip_address(str(parts.hostname))
    except ValueError:
        return False
    if parts.scheme in ("socks5", "socks5h"):
        return is_whole and find_spec("socksio") is not None
    return is_whole and parts.scheme in ("http", "https")
