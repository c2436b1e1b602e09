"""Bounds of the server's proxy that hold for several addresses, or several requests, together."""

import contextlib
import socket

import pytest

from flower_app.deployment.fleet_proxy import FleetProxy
from flower_app.deployment.reverse_proxy import Bounds
from helpers.patience import eventually
from helpers.proxies import HOST, Behind, Credentials, RunningProxy, received, status_of

SIZE, SMALL = 20_000, 500
BOUNDS = Bounds(
    connections=400,
    connections_per_peer=200,
    body_bytes=SIZE,
    pending_bytes_per_peer=3 * SIZE,
    pending_bytes=4 * SIZE,
    body_s=120.0,
)
PUSH = "/v1/fleet/push-object"
PASSED = 401
"""Answer of the program behind: what it has not taken counts for nobody afterwards."""


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return Credentials(tmp_path_factory.mktemp("credentials"))


@pytest.fixture(scope="module")
def behind(credentials):
    behind = Behind(credentials)
    behind.answers[PUSH] = (PASSED, b"")
    yield behind
    behind.close()


class Peers:
    """Peers of a proxy, by their address and the key that they show."""

    def __init__(self, proxy, stack):
        self._proxy, self._stack = proxy, stack

    def begin(self, source, key, size=SIZE):
        """Send the head of a push, and nothing of its body."""
        raw = socket.create_connection((HOST, self._proxy.port), 120, (source, 0))
        peer = self._stack.enter_context(self._proxy.credentials.client().wrap_socket(raw, server_hostname=HOST))
        lines = [f"POST {PUSH} HTTP/1.1", "Host: here", f"Content-Length: {size}", f"flwr-public-key: {key}"]
        peer.sendall("\r\n".join([*lines, "", ""]).encode())
        return peer

    def status(self, source, key, size=SIZE):
        """Push a whole body."""
        peer = self.begin(source, key, size)
        peer.sendall(bytes(size))
        return status_of(received(peer))


@pytest.fixture
def peers(request, behind, credentials):
    """Peers of a proxy with the bound on an order's answer that the test asks for [byte]."""
    proxy = RunningProxy(lambda **options: FleetProxy(request.param, **options), behind.port, credentials, BOUNDS)
    with contextlib.ExitStack() as stack:
        stack.callback(proxy.close)
        yield Peers(proxy, stack)


@pytest.mark.parametrize("peers", [100 * SIZE], indirect=True)
def test_bodies_on_their_way_are_bounded_for_all_addresses_together(peers):
    def has_no_room():
        # A push that came while another body was on its way was refused itself: one more each time.
        for source in ("127.0.0.2", "127.0.0.3"):
            peers.begin(source, "one")
        return peers.status("127.0.0.4", "two") == 503

    eventually(has_no_room, 30)


@pytest.mark.parametrize("peers", [2 * SMALL], indirect=True)
def test_what_a_node_has_on_its_way_counts_for_its_order_and_a_stranger_with_its_key_for_nobody(peers):
    """A node could push any number of bytes at once, before the SuperLink had taken the first of them."""

    def has_no_room():
        peers.begin("127.0.0.2", "one", SMALL)
        return peers.status("127.0.0.2", "one", SMALL) == 413

    eventually(has_no_room, 30)
    assert peers.status("127.0.0.3", "one", 1) == peers.status("127.0.0.2", "two", 1) == PASSED
