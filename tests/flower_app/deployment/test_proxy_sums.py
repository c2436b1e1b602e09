"""Bounds of the server's proxy that hold for several addresses, or several requests, together."""

import contextlib
import socket

import pytest

from flower_app.deployment.fleet_proxy import FleetProxy
from flower_app.deployment.reverse_proxy import Bounds
from helpers.patience import eventually
from helpers.proxies import HOST, Behind, Credentials, RunningProxy

SIZE = 20_000
BOUNDS = Bounds(
    connections=40, connections_per_peer=20, body_bytes=SIZE, pending_bytes_per_peer=3 * SIZE, pending_bytes=4 * SIZE
)
PUSH = "/v1/fleet/push-object"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return Credentials(tmp_path_factory.mktemp("credentials"))


@pytest.fixture(scope="module")
def behind(credentials):
    behind = Behind(credentials)
    # What it has not taken counts for nobody afterwards.
    behind.answers[PUSH] = (401, b"")
    yield behind
    behind.close()


@pytest.fixture
def proxy(behind, credentials):
    proxy = RunningProxy(lambda **options: FleetProxy(2 * SIZE, **options), behind.port, credentials, BOUNDS)
    yield proxy
    proxy.close()


@contextlib.contextmanager
def half_a_push(proxy, source, *headers):
    """Have an address send the head of a request, and nothing of its body."""
    raw = socket.create_connection((HOST, proxy.port), 120, (source, 0))
    with proxy.credentials.client().wrap_socket(raw, server_hostname=HOST) as peer:
        lines = [f"POST {PUSH} HTTP/1.1", "Host: here", f"Content-Length: {SIZE}", *headers]
        peer.sendall("\r\n".join([*lines, "", ""]).encode())
        yield


def test_bodies_on_their_way_are_bounded_for_all_addresses_together(proxy):
    with contextlib.ExitStack() as peers:
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(2):
                peers.enter_context(half_a_push(proxy, source))
        # This address has nothing on its way.
        eventually(lambda: proxy.status(PUSH, body=b"x") == 503, 30)
        assert any("too many bytes are on their way" in line for line in proxy.said)
    eventually(lambda: proxy.status(PUSH, body=b"x") == 401)


def test_what_a_node_has_on_its_way_counts_for_its_order(proxy):
    """A node could push any number of bytes at once, before the SuperLink had taken the first of them."""
    key = ("flwr-public-key", "one")

    def status(**options):
        return proxy.status(PUSH, body=bytes(SIZE // 2), **options)

    with contextlib.ExitStack() as peers:
        for _ in range(2):
            peers.enter_context(half_a_push(proxy, HOST, ": ".join(key)))
        eventually(lambda: status(headers=[key]) == 413, 30)
        assert any("--reply-mb" in line for line in proxy.said)
        assert status(headers=[("flwr-public-key", "two")]) == 401
    eventually(lambda: status(headers=[key]) == 401)


def test_a_stranger_with_a_nodes_key_takes_nothing_from_it(proxy):
    key = ("flwr-public-key", "one")
    with contextlib.ExitStack() as peers:
        for _ in range(2):
            peers.enter_context(half_a_push(proxy, "127.0.0.2", ": ".join(key)))
        eventually(lambda: sum(proxy.proxy._underway.values()) == 2 * SIZE)
        assert proxy.status(PUSH, body=bytes(SIZE), headers=[key]) == 401
