"""The SuperLink's two doors, before an application that answers everything."""

import contextlib
import http.client
import socket
import threading
import time

import pytest
import uvicorn

from flower_app.deployment import superlink_program
from flower_app.deployment.edge_server import EdgeServer, control_address
from flower_app.deployment.superlink_program import Doors, listening_socket

LIMIT = 10_000


async def answers_everything(scope, receive, send):
    """Read a body to its end, and tell how long it is."""
    assert scope["type"] == "http"
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": str(length).encode()})


@pytest.fixture(scope="module")
def starts():
    """Grows with each run that was asked for."""
    return []


@pytest.fixture(scope="module")
def doors(starts):
    """Ports of control and fleet."""
    control, fleet = listening_socket("127.0.0.1", 0), listening_socket("127.0.0.1", 0)
    application = Doors(answers_everything, control.getsockname()[:2], LIMIT, lambda: starts.append(1))
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [control, fleet]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield control.getsockname()[1], fleet.getsockname()[1]
    server.should_exit = True
    thread.join(30)


def status(port, path, method="POST", body=b"", headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in (("Host", "here"), ("Content-Length", str(len(body))), *headers):
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/pull-task",
        "/v1/fleet",
        "/v1/fleetx/register-node",
        "/v1/control/../fleet/pull-messages",
        "//v1/fleet/pull-messages",
        "/V1/FLEET/pull-messages",
        "/docs",
        "/openapi.json",
        "/",
        "/healthy",
    ],
)
def test_the_fleet_door_opens_for_supernodes_alone(doors, path):
    control, fleet = doors
    assert status(fleet, path) == 403 and status(control, path) == 200


def test_what_supernodes_ask_for_passes_and_nothing_they_say_of_themselves_opens_more(doors):
    control, fleet = doors
    assert status(fleet, "/v1/fleet/pull-messages", body=b"x" * LIMIT) == 200
    assert status(fleet, "/health", "GET") == 200 and status(fleet, "/health") == 403
    assert status(fleet, "/v1/fleet/pull-messages", "GET") == 403
    told = (
        ("X-Forwarded-Host", f"127.0.0.1:{control}"),
        ("X-Forwarded-For", "127.0.0.1"),
        ("Forwarded", f"for=127.0.0.1;host=127.0.0.1:{control}"),
        ("X-Original-URL", "/v1/control/start-run"),
    )
    assert status(fleet, "/v1/control/start-run", headers=told) == 403


def test_the_superexec_is_told_when_a_run_was_asked_for_at_the_control_door(doors, starts):
    control, fleet = doors
    starts.clear()
    for port, path in ((fleet, "/v1/control/start-run"), (control, "/v1/control/list-runs")):
        status(port, path)
    assert starts == []
    status(control, "/v1/control/start-run")
    deadline = time.monotonic() + 30
    while not starts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert starts == [1]


def test_a_body_that_is_too_long_is_not_read(doors):
    _, fleet = doors
    assert status(fleet, "/v1/fleet/push-object", body=b"x" * (LIMIT + 1)) == 413
    # Without a length, in pieces.
    with socket.create_connection(("127.0.0.1", fleet), timeout=30) as peer:
        peer.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece, answer = b"x" * 4000, b""
        # Who is refused may find the connection closed while it still sends.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(5):
                peer.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            peer.sendall(b"0\r\n\r\n")
            while data := peer.recv(1000):
                answer += data
    assert b" 200 " not in answer.split(b"\r\n", 1)[0]


def test_a_superlink_without_keys_or_certificates_does_not_start():
    class Config:
        ssl_certfile, enable_supernode_auth = None, True

    with pytest.raises(SystemExit, match="expected certificates and --enable-supernode-auth"):
        superlink_program.serve(answers_everything, Config(), ("127.0.0.1", 0))


@pytest.mark.parametrize(("port", "control", "found"), [(9092, 9092, 9092), (9092, -5, -5), (65535, 0, 65536)])
def test_a_control_port_is_another_than_that_of_the_supernodes(port, control, found):
    with pytest.raises(ValueError, match=f"--control-port: expected 1 to 65535 and not --port {port}, found {found}"):
        EdgeServer(host="127.0.0.1", certs=None, state=None, port=port, control_port=control)
    assert control_address(9092) == "127.0.0.1:9093" and control_address(9092, 7000) == "127.0.0.1:7000"
