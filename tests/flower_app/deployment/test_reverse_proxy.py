"""Attacks on the proxy that the network reaches: each gets its status, and the others are served meanwhile."""

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree

from flower_app.deployment.edge_server import EdgeServer, control_address
from flower_app.deployment.fleet_proxy import FleetProxy
from flower_app.deployment.programs import listens
from flower_app.deployment.reverse_proxy import HEAD_BYTES, Bounds
from helpers.patience import eventually
from helpers.proxies import HOST, Behind, Credentials, RunningProxy, received, status_of
from helpers.running_programs import free_port

LIMIT = 20_000
BOUNDS = Bounds(
    connections=12,
    connections_per_peer=8,
    handshake_s=30.0,
    head_s=30.0,
    idle_s=30.0,
    body_s=30.0,
    bytes_per_s=10**6,
    body_bytes=LIMIT,
    pending_bytes_per_peer=3 * LIMIT,
    pending_bytes=4 * LIMIT,
    answer_s=30.0,
)
PUSH = "/v1/fleet/push-object"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return Credentials(tmp_path_factory.mktemp("credentials"))


@pytest.fixture(scope="module")
def behind(credentials):
    behind = Behind(credentials)
    yield behind
    behind.close()


@pytest.fixture
def fleet(behind, credentials):
    behind.requests.clear()
    behind.answers.clear()
    proxy = RunningProxy(lambda **options: FleetProxy(10 * LIMIT, **options), behind.port, credentials, BOUNDS)
    yield proxy
    proxy.close()


def request(path=PUSH, *headers, method="POST"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: here", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/pull-task",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleetx/register-node",
        "/v1/control/../fleet/pull-messages",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages?x=/v1/control/start-run",
        "/v1/fleet/pull-messages;x",
        "//v1/fleet/pull-messages",
        "/v1//fleet/pull-messages",
        "/V1/FLEET/pull-messages",
        "/v1/fleet/PULL-messages",
        "https://127.0.0.1/v1/control/start-run",
        "http://127.0.0.1/v1/fleet/pull-messages",
        "*",
        "/docs",
        "/openapi.json",
        "/",
        "/healthy",
    ],
)
def test_a_path_that_is_not_of_the_fleet_is_refused_and_never_passed_on(fleet, behind, path):
    assert fleet.status(path) == 403
    assert behind.requests == [] and len(fleet.said) == 1 and "403" in fleet.said[0]


def test_what_supernodes_ask_for_passes_with_flowers_headers_alone(fleet, behind):
    headers = [("flwr-signature", "s"), ("X-Forwarded-For", "6.6.6.6"), ("Forwarded", "for=6.6.6.6"), ("Cookie", "c")]
    answer = fleet.ask(request(PUSH, "Content-Length: 5", *(f"{name}: {value}" for name, value in headers)) + b"12345")
    assert status_of(answer) == 200 and answer.endswith(b"5") and b"inside" not in answer
    ((method, path, passed, length),) = behind.requests
    assert (method, path, length) == ("POST", PUSH, 5)
    assert {name.lower() for name in passed} == {"host", "content-length", "flwr-signature"}
    assert fleet.status("/health", "GET") == 200
    assert fleet.status("/health") == 403 and fleet.status(PUSH, "GET") == 403


def test_one_connection_answers_one_request_after_the_other(fleet, behind):
    with fleet.peer() as peer:
        for _ in range(3):
            peer.sendall(request(PUSH, "Content-Length: 2") + b"ab")
            assert status_of(received(peer)) == 200
    assert len(behind.requests) == 3


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(PUSH, "Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n", 411),
        (request(PUSH, "Transfer-Encoding: chunked") + 200 * (b"1000\r\n" + 4096 * b"x" + b"\r\n"), 411),
        (request(PUSH, "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\nGET /docs", 411),
        (request(PUSH, "Transfer-Encoding: identity"), 501),
        (request(PUSH, "Transfer-Encoding : chunked"), 400),
        (request(PUSH, "Content-Length: 5", "Content-Length: 6") + b"12345", 400),
        (request(PUSH, "Content-Length: +5") + b"12345", 400),
        (request(PUSH, "Content-Length: -5") + b"12345", 400),
        (request(PUSH, "Content-Length: 0x5") + b"12345", 400),
        (request(PUSH, f"Content-Length: {LIMIT + 1}"), 413),
        (request(PUSH, f"Content-Length: {10**18}"), 413),
        (request("/v1/fleet/pull-messages", f"Content-Length: {LIMIT + 1}"), 413),
        (request(PUSH, "Connection: Upgrade", "Upgrade: websocket"), 400),
        (request(PUSH, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"), 400),
        (request(PUSH, "Expect: 100-continue", "Content-Length: 5"), 417),
        (request(PUSH, "x: " + 2 * HEAD_BYTES * "y"), 431),
        (request("/" + 2 * HEAD_BYTES * "y"), 431),
        (request(PUSH, *(f"h{number}: v" for number in range(5000))), 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST /v1/fleet/push-object HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/fleet/push\x00object HTTP/1.1\r\nHost: here\r\n\r\n", 400),
        (b"CONNECT 127.0.0.1:9093 HTTP/1.1\r\nHost: here\r\n\r\n", 403),
        (100 * b"\x16\x03\x01 no HTTP\r\n", 400),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else str(value),
)
def test_a_request_that_could_be_read_in_two_ways_or_is_too_long_is_refused(fleet, behind, data, status):
    assert status_of(fleet.ask(data)) == status
    assert behind.requests == [] and fleet.said
    assert fleet.status(PUSH, body=b"x") == 200


def test_no_http2_is_negotiated_and_no_older_tls(fleet):
    with fleet.peer() as peer:
        assert peer.selected_alpn_protocol() is None and peer.version() == "TLSv1.3"


def test_a_second_request_hidden_in_a_body_is_a_body(fleet, behind):
    hidden = request("/v1/control/start-run", "Content-Length: 0")
    assert fleet.status(PUSH, body=hidden) == 200
    assert [(path, length) for _, path, _, length in behind.requests] == [(PUSH, len(hidden))]
    # And one behind it is refused like any other.
    with fleet.peer() as peer:
        peer.sendall(request(PUSH, "Content-Length: 1") + b"x" + hidden)
        first = received(peer)
        second = received(peer)
    assert status_of(first) == 200 and b" 403 " in first + second
    assert [path for _, path, _, _ in behind.requests] == [PUSH, PUSH]


def is_closed(peer):
    """Wait for the other end to hang up."""
    with contextlib.suppress(ConnectionResetError):
        return peer.recv(10) == b""
    return True


@pytest.fixture
def impatient(behind, credentials):
    """A proxy that gives its peers half a second for everything."""
    behind.answers.clear()
    bounds = replace(BOUNDS, handshake_s=0.5, head_s=0.5, idle_s=0.5, body_s=0.5)
    proxy = RunningProxy(lambda **options: FleetProxy(10 * LIMIT, **options), behind.port, credentials, bounds)
    yield proxy
    proxy.close()


def served(proxy):
    """Tell whether another peer is served now."""
    with contextlib.suppress(OSError):
        return proxy.status(PUSH, body=b"x") == 200
    return False


def test_slow_peers_are_ended_and_the_others_are_served_meanwhile(impatient):
    with impatient.plain() as silent:
        eventually(lambda: served(impatient))
        assert is_closed(silent)
    with impatient.peer() as mute:
        eventually(lambda: served(impatient))
        assert is_closed(mute)
    for began, what in (
        (b"POST /v1/fleet/push-object HTTP/1.1\r\n", "headers"),
        (request(PUSH, "Content-Length: 9999"), "body"),
    ):
        with impatient.peer() as slow:
            slow.sendall(began)
            # A byte now and then gains no time.
            with contextlib.suppress(OSError):
                while not any(f"408: no end of the {what}" in line for line in impatient.said):
                    slow.sendall(b"x")
                    time.sleep(0.02)
            assert status_of(received(slow)) == 408
        eventually(lambda: served(impatient))


def test_a_peer_that_does_not_read_its_answer_is_ended(impatient, behind):
    behind.answers[PUSH] = (200, bytes(40 * 2**20))
    with impatient.peer() as peer:
        peer.sendall(request(PUSH, "Content-Length: 0"))
        eventually(lambda: impatient.proxy.num_connections == 0)
    behind.answers.clear()
    eventually(lambda: served(impatient))


def test_an_address_has_few_connections_and_the_next_ones_are_closed(fleet):
    peers = [fleet.plain() for _ in range(BOUNDS.connections_per_peer)]
    with fleet.plain() as one_more:
        assert is_closed(one_more)
    assert any("connections of one address" in line for line in fleet.said)
    for peer in peers:
        peer.close()
    eventually(lambda: served(fleet))


def test_when_all_places_are_taken_the_busiest_address_loses_its_oldest(behind, credentials):
    bounds = replace(BOUNDS, connections=4, connections_per_peer=4)
    proxy = RunningProxy(lambda **options: FleetProxy(LIMIT, **options), behind.port, credentials, bounds)
    try:
        flood = []
        for number in range(4):
            flood.append(
                socket.create_connection((HOST, proxy.port), 5, source_address=(f"127.0.0.{2 + number % 2}", 0))
            )
        eventually(lambda: proxy.proxy.num_connections == 4)
        assert proxy.status(PUSH, body=b"x") == 200
        assert any("the oldest goes" in line for line in proxy.said)
        for one in flood:
            one.close()
    finally:
        proxy.close()


def test_bodies_on_their_way_are_bounded_for_one_address(fleet, behind):
    peers = []

    def has_no_room():
        # One that came while another body was on its way was refused itself: one more each time.
        try:
            peers.append(fleet.peer())
            peers[-1].sendall(request(PUSH, f"Content-Length: {LIMIT}"))
            return fleet.status(PUSH, body=LIMIT * b"x") == 503
        except OSError:
            # So slow that its connections are too many before its bodies are: from the beginning.
            while peers:
                peers.pop().close()
            return False

    eventually(has_no_room)
    assert len(peers) >= 3
    for peer in peers:
        peer.close()
    eventually(lambda: fleet.status(PUSH, body=LIMIT * b"x") == 200)


def test_requests_without_pause_are_told_to_come_back(behind, credentials):
    bounds = replace(BOUNDS, requests_per_s=0.001, request_burst=3.0)
    proxy = RunningProxy(lambda **options: FleetProxy(LIMIT, **options), behind.port, credentials, bounds)
    try:
        assert [proxy.status(PUSH) for _ in range(5)] == [200, 200, 200, 503, 503]
    finally:
        proxy.close()


def test_the_lines_about_refusals_are_bounded(fleet):
    for _ in range(300):
        fleet.proxy.refuse("a peer", "a request", 403, "no")
    assert 50 <= len(fleet.said) < 100


def test_without_the_program_behind_a_supernode_is_told_to_come_back(credentials):
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    proxy = RunningProxy(lambda **options: FleetProxy(LIMIT, **options), port, credentials, BOUNDS)
    try:
        # Flower's programs ask again after 503.
        assert proxy.status(PUSH, body=b"x") == 503
    finally:
        proxy.close()


KEY = [("flwr-public-key", "one")]


def test_a_node_pushes_a_bounded_number_of_bytes_for_one_order(behind, credentials):
    behind.answers.clear()
    behind.answers["/v1/fleet/pull-messages"] = (200, b"an order")
    proxy = RunningProxy(lambda **options: FleetProxy(3000, **options), behind.port, credentials, BOUNDS)
    push = lambda key=KEY: proxy.status(PUSH, body=bytes(1000), headers=key)  # noqa: E731
    try:
        assert [push() for _ in range(4)] == [200, 200, 200, 413]
        assert "--reply-mb" in proxy.said[-1]
        # Another node has its own, and the next order is a new count.
        assert push([("flwr-public-key", "two")]) == 200
        assert proxy.status("/v1/fleet/pull-messages", headers=KEY) == 200
        assert [push() for _ in range(4)] == [200, 200, 200, 413]
    finally:
        proxy.close()


def pieces_list(num_arrays, num_pieces):
    """Body of the request by which Flower's SuperNode lists the pieces of a reply."""
    ids = (f"{number:064x}" for number in itertools.count())
    children = [ObjectTree(object_id=next(ids)) for _ in range(num_pieces - num_arrays)]
    children += [ObjectTree(object_id=next(ids), children=[ObjectTree(object_id=next(ids))]) for _ in range(num_arrays)]
    return PushMessagesRequest(message_object_trees=[ObjectTree(children=children)]).SerializeToString()


def test_a_node_lists_a_bounded_number_of_pieces_for_one_order(behind, credentials):
    """The SuperLink's database was locked for minutes by a list of 100,000 pieces."""
    behind.answers.clear()
    behind.answers["/v1/fleet/pull-messages"] = (200, b"an order")
    bounds = replace(BOUNDS, body_bytes=Bounds().body_bytes, pending_bytes_per_peer=2**24, pending_bytes=2**24)
    proxy = RunningProxy(lambda **options: FleetProxy(4096 * 10**6, **options), behind.port, credentials, bounds)
    push = lambda body, path="/v1/fleet/push-messages": proxy.status(path, body=body, headers=KEY)  # noqa: E731
    try:
        assert push(pieces_list(0, 100_000)) == 413
        assert "list of an answer's pieces takes 68" in proxy.said[-1]
        # The largest reply, in chunks of 5 MiB and as many arrays as 80 blocks with adapters have, and once again.
        largest = pieces_list(1_100, 782 + 1_100)
        assert [push(largest) for _ in range(3)] == [200, 200, 413]
        assert push(b"a piece", PUSH) == 200
        assert proxy.status("/v1/fleet/pull-messages", headers=KEY) == 200
        assert push(largest) == 200
    finally:
        proxy.close()


def test_what_the_superlink_has_not_taken_counts_for_nobody(behind, credentials):
    behind.answers.clear()
    behind.answers[PUSH] = [(401, b"")] * 9 + [(200, b"")] * 3
    proxy = RunningProxy(lambda **options: FleetProxy(3000, **options), behind.port, credentials, BOUNDS)
    try:
        assert [proxy.status(PUSH, body=bytes(1000), headers=KEY) for _ in range(9)] == [401] * 9
        assert [proxy.status(PUSH, body=bytes(1000), headers=KEY) for _ in range(4)] == [200] * 3 + [413]
    finally:
        behind.answers.clear()
        proxy.close()


def test_an_empty_answer_is_held_back_until_there_is_an_order(fleet, behind):
    behind.answers["/v1/fleet/pull-messages"] = [(200, b""), (200, b""), (200, b"an order")]
    behind.answers["/v1/fleet/pull-object"] = [(200, b"\x08\x01"), (200, b"\x08\x01"), (200, b"a piece")]
    with fleet.peer() as peer:
        peer.settimeout(10)
        for path, expected in (("pull-object", b"a piece"), ("pull-messages", b"an order")):
            peer.sendall(request(f"/v1/fleet/{path}", "Content-Length: 0", "flwr-public-key: one"))
            assert received(peer).endswith(expected)
    assert len(behind.requests) == 6


@pytest.mark.parametrize(("port", "control", "found"), [(9092, 9092, 9092), (9092, -5, -5), (65535, 0, 65536)])
def test_a_control_port_is_another_than_that_of_the_supernodes(port, control, found):
    with pytest.raises(ValueError, match=f"--control-port: expected 1 to 65535 and not --port {port}, found {found}"):
        EdgeServer(host="127.0.0.1", certs=None, state=None, port=port, control_port=control)
    assert control_address(9092) == "127.0.0.1:9093" and control_address(9092, 7000) == "127.0.0.1:7000"


@pytest.mark.slow
def test_floods_of_bodies_and_of_connections_take_little_memory(behind, credentials, tmp_path):
    port, million = free_port(), bytes(10**6)
    files = (credentials.certificate, credentials.key, credentials.authority)
    command = [sys.executable, "-m", "flower_app.deployment.fleet_proxy", f"{HOST}:{port}", f"{HOST}:{behind.port}"]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen([*command, *files, "4096"], stderr=log)
    try:
        eventually(lambda: listens(HOST, port))
        before = psutil.Process(child.pid).memory_info().rss
        peers = []
        for _ in range(20):
            raw = socket.create_connection((HOST, port), timeout=120)
            peers.append(credentials.client().wrap_socket(raw, server_hostname=HOST))
            peers[-1].sendall(request(PUSH, "Content-Length: 6000000"))
        for _ in range(5):
            for peer in peers:
                peer.sendall(million)
        # Nobody has sent the last million, and a hundred are with the program behind.
        crowd = [socket.create_connection((HOST, port), timeout=120) for _ in range(200)]
        assert psutil.Process(child.pid).memory_info().rss < before + 40 * 10**6
        for peer in peers:
            peer.sendall(million)
            assert status_of(received(peer)) == 200
        for peer in (*peers, *crowd):
            peer.close()
        assert "connections of one address" in (tmp_path / "log").read_text()
    finally:
        child.kill()
        child.wait(120)
