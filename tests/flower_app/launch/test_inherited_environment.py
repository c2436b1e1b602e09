"""Relative paths and proxies of the user's environment, as a run's programs get them."""

import os
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass_environment

import httpx
import pytest

from flower_app.launch.superlink import launch_environment

PATHS = ["HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"]
PROXIES = ["http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"]


@pytest.mark.parametrize("name", [*PATHS, "PYTHONPATH", "PATH"])
def test_a_relative_path_stays_that_of_the_users_folder(tmp_path, monkeypatch, name):
    """`PYTHONPATH=. collapipe run ...` could not import: the programs of a run work in other folders."""
    monkeypatch.chdir(tmp_path)
    environment = launch_environment(Path("/home"), Path("/ray"), {name: "own"})
    assert str(tmp_path / "own") in environment[name].split(os.pathsep)


@pytest.mark.parametrize("name", PROXIES)
@pytest.mark.parametrize(
    "url",
    [
        "socks4://proxy:1080",
        "ftp://proxy:21",
        "http://proxy:port",
        "http://",
        " http://proxy:80",
        "http://1.2.3.400:80",
    ],
)
def test_a_proxy_that_flowers_client_cannot_use_reaches_no_program(name, url):
    """With `ALL_PROXY=socks5://...` Flower's HTTP client failed, though it was to reach this machine alone."""
    assert name not in launch_environment(Path("/home"), Path("/ray"), {name: url})


@pytest.mark.parametrize("proxy", ["http://[::1]:3128", "http://[fd00::1]:80", "http://user:p%40ss@proxy:80"])
@pytest.mark.parametrize(
    "excepted", ["[::1]", "::1", "fd00::/8", "[fd00::1]:80", "http://[::1]", "hub:port", "10.0.0.0/8"]
)
def test_flowers_client_starts_with_every_proxy_and_exception_of_ipv6(monkeypatch, proxy, excepted):
    """With `NO_PROXY=[::1]` or a network of IPv6 `flwr run` did not accept the app."""
    environment = launch_environment(Path("/home"), Path("/ray"), {"all_proxy": proxy, "NO_PROXY": excepted})
    monkeypatch.setattr(os, "environ", environment)
    httpx.Client().close()
    assert environment["all_proxy"] == proxy


def test_an_excepted_host_of_ipv6_stays_excepted_without_its_brackets():
    environment = launch_environment(
        Path("/home"), Path("/ray"), {"no_proxy": "[fd00::1], fe80::1,hub:8080,http://hub"}
    )
    assert environment["no_proxy"] == "fd00::1,fe80::1,hub:8080,http://hub,127.0.0.1,localhost"


@pytest.mark.parametrize("url", ["http://proxy:3128", "https://user:secret@proxy:3128", "proxy:3128"])
def test_downloads_keep_a_proxy_that_is_of_use_and_this_machine_is_reached_without(url):
    environment = launch_environment(Path("/home"), Path("/ray"), {"https_proxy": url})
    assert environment["https_proxy"] == url
    assert {"127.0.0.1", "localhost"} <= set(environment["no_proxy"].split(","))


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_hosts_that_the_user_excepts_stay_excepted(name):
    """Programs read the other spelling first, which named this machine alone."""
    environment = {"https_proxy": "http://proxy:3128", name: ".corp.example, hub.local"}
    environment = launch_environment(Path("/home"), Path("/ray"), environment)
    for host in ("hub.corp.example", "hub.local", "127.0.0.1", "localhost"):
        assert proxy_bypass_environment(host, proxies_of(environment)), host
    assert not proxy_bypass_environment("huggingface.co", proxies_of(environment))


def test_grpc_has_the_same_exceptions():
    environment = launch_environment(Path("/home"), Path("/ray"), {"no_grpc_proxy": "10.0.0.1"})
    assert {"10.0.0.1", "127.0.0.1", "localhost"} <= set(environment["no_grpc_proxy"].split(","))


def proxies_of(environment):
    """Give what Python's own client makes of an environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        for name in ("no_proxy", "NO_PROXY", "https_proxy"):
            if name in environment:
                patch.setenv(name, environment[name])
        return getproxies_environment()
