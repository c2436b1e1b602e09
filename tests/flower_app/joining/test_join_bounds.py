"""Bounds on strangers at the joining service: bytes, silence, guesses, and impossible requests."""

import json
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.link.hosts import HostPort
from flower_app.deployment.certificate_authority import supernode_keys
from flower_app.joining import join_service, newcomer
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_request import MOST_REQUEST_BYTES, JoinRequest, read_line
from flower_app.joining.newcomer import _signing_request
from helpers.joining import HOST, question_of, say_line
from helpers.running_programs import free_port
from strategies.decoder.limits import WRONG_HELLOS

CLAIM = bytes(32)
CLAIM_HASH = "66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925"


def fields(**changes):
    request = {
        "kind": "control-unit",
        "cluster": 0,
        "devices": [0, 1],
        "host": "10.0.0.2",
        "ray_port": 6379,
        "signing_request": _signing_request(ec.generate_private_key(ec.SECP256R1())),
        "supernode_key": supernode_keys()[1].decode(),
        "claim_hash": CLAIM_HASH,
    }
    return request | changes


def question(code, **changes):
    asked = question_of(code, JoinRequest.from_fields(fields()), CLAIM)
    return asked | {"request": fields(**changes)}


WRONG_FIELDS = [
    ("kind", "server"),
    ("kind", ["device"]),
    ("cluster", -2),
    ("cluster", 10_000),
    ("cluster", True),
    ("cluster", 1.0),
    ("cluster", "0"),
    ("devices", [0, 0]),
    ("devices", [-1]),
    ("devices", list(range(65))),
    ("devices", "01"),
    ("host", ""),
    ("host", "10.0.0.2:6379"),
    ("host", "-x"),
    ("host", "../../etc"),
    ("host", "a\x1b[31m"),
    ("host", "a" * 300),
    ("host", 7),
    ("ray_port", 80),
    ("ray_port", 70_000),
    ("signing_request", "none"),
    ("signing_request", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"),
    ("signing_request", _signing_request(ec.generate_private_key(ec.SECP384R1()))),
    ("supernode_key", ""),
    ("supernode_key", "ssh-rsa AAAA"),
    ("supernode_key", "x" * 5000),
    ("claim_hash", "A" * 64),
    ("claim_hash", "0" * 64),
    ("claim_hash", None),
]


@pytest.mark.parametrize(("name", "value"), WRONG_FIELDS)
def test_a_request_that_cannot_be_is_refused_by_the_name_of_its_field(server, name, value):
    answer = server.desk_error(question(server.code(), **{name: value}))
    assert answer.startswith(("claim" if (name, value) == ("claim_hash", "0" * 64) else name) + ":"), answer
    assert answer.isprintable() and len(answer) < 250 and server.folder.boxes() == []


def test_a_request_has_every_field_once_and_no_other(server):
    whole = fields()
    for wrong in ({k: v for k, v in whole.items() if k != "host"}, whole | {"more": 1}, [], None, "x"):
        asked = question_of(server.code(), JoinRequest.from_fields(whole), CLAIM) | {"request": wrong}
        assert server.desk_error(asked) and server.folder.boxes() == []
    # A device has no SuperNode, and names its cluster.
    assert server.desk_error(question(server.code(), kind="device")).startswith("supernode_key:")
    assert server.desk_error(question(server.code(), kind="device", supernode_key="", cluster=-1)).startswith(
        "cluster:"
    )


def test_words_behind_a_key_are_no_words_of_ours():
    request = JoinRequest.from_fields(fields(supernode_key=supernode_keys()[1].decode() + " evil\\x1b"))
    assert request.supernode_line("cu-0").split()[2:] == [b"cu-0"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b'{"a": 1, "a": 2}\n',
        b"\xff\xfe\n",
        b"[" * 9000 + b"\n",
        b'{"a":' * 3000,
    ],
)
def test_a_line_that_is_no_question_is_an_error(server, line):
    with pytest.raises(ValueError):
        read_line(line)
    with pytest.raises(ValueError):
        server.desk.answer(line)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "a/b/c",
        "10.0.0.1:9095/AAAA/BBBB",
        "10.0.0.1:9095//",
        "h:99999/x/y",
        "é/é/é",
        "x" * 500,
    ],
)
def test_a_code_that_is_none_is_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match="CODE: expected") as refused:
        JoinCode.read(text)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("address", [HostPort("10.0.0.1", 9095), HostPort("[::1]", 1), HostPort("edge.example", 65535)])
def test_a_code_is_read_as_it_was_written(address, server):
    code = JoinCode(address=address, token=os.urandom(16), fingerprint=server.code().fingerprint)
    assert JoinCode.read(f" {code}\n") == code and len(str(code)) < 100


def test_a_peer_that_keeps_guessing_is_refused_unread_and_the_others_are_served(server):
    wrong = question(JoinCode(address=server.address, token=bytes(16), fingerprint=bytes(32)))
    answers = [server.ask(wrong) for _ in range(WRONG_HELLOS + 10)]
    reasons = [answer["reason"] for answer in answers if answer]
    assert len(reasons) < WRONG_HELLOS + 10 and set(reasons) == {"this code is none of ours"}
    assert answers[-1] is None
    assert server.ask(question(server.code()), source="127.0.0.2")["status"] == "waiting"


def test_connections_that_say_nothing_shut_nobody_out(server):
    silent = [socket.create_connection((HOST, server.service.port)) for _ in range(2 * join_service.MOST_CONNECTIONS)]
    try:
        started = time.monotonic()
        assert server.ask(question(server.code()), source="127.0.0.2")["status"] == "waiting"
        assert time.monotonic() - started < join_service.CONNECTION_S
    finally:
        for connection in silent:
            connection.close()


def test_a_line_that_comes_byte_by_byte_is_cut(server, monkeypatch):
    monkeypatch.setattr(join_service, "CONNECTION_S", 0.5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HOST, server.service.port)) as raw, context.wrap_socket(raw) as tls:
        tls.settimeout(0.05)
        deadline, ended = time.monotonic() + 60, False
        while not ended:
            assert time.monotonic() < deadline
            try:
                tls.send(b" ")
                ended = tls.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(server, monkeypatch):
    """Whoever has the address answers before a box knows whom it speaks with."""
    monkeypatch.setattr(newcomer, "_CALL_S", 0.5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.folder.server.certificate, server.folder.server.key)
    code = server.code()
    with socket.create_server((HOST, 0)) as listener:

        def drip():
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as tls:
                for _ in range(100):
                    tls.send(b" ")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        address = HostPort(HOST, listener.getsockname()[1])
        slow = JoinCode(address=address, token=code.token, fingerprint=code.fingerprint)
        with pytest.raises(OSError, match="does not end within 0.5 s|timed out"):
            newcomer.trusted_authority(slow)


def test_a_line_that_is_too_long_gets_no_answer(server):
    assert say_line(server.address, b" " * (MOST_REQUEST_BYTES + 8192) + b"\n") is None
    assert server.ask({"ask": "authority"})["authority"].startswith("-----BEGIN CERTIFICATE")


def hostile_bytes(rng, good):
    """A line that is wrong somewhere, or no line at all."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 3000)) + b"\n"
    if kind == 1:
        return rng.choice([b"[", b'{"a":', b'"', b"1"]) * rng.randrange(1, MOST_REQUEST_BYTES) + b"\n"
    if kind == 2:
        return b"A" * rng.randrange(MOST_REQUEST_BYTES, 40 * MOST_REQUEST_BYTES)
    if kind == 3:
        return good[: rng.randrange(len(good))]
    line = bytearray(good)
    for _ in range(rng.randrange(1, 20)):
        line[rng.randrange(len(line))] = rng.randrange(256)
    return bytes(line) + b"\n"


LIMITED = """
import resource, sys
from flower_app.joining import join_service

pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Stacks of as many threads as are listened to, the arenas that they allocate from, and what it may grow by.
resource.setrlimit(resource.RLIMIT_AS, (pages + {room}, pages + {room}))
join_service.main()
"""
ROOM_BYTES = 160_000_000


def memory_bytes(pid):
    """Resident memory of a process [byte]."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_hostile_bytes_take_no_memory_and_the_next_box_is_served(server, tmp_path):
    """A service of its own, under a limit of memory, at the folder of the fixture's."""
    port, rng = free_port(), random.Random(5)
    command = [sys.executable, "-c", LIMITED.format(room=ROOM_BYTES), f"{HOST}:{port}", str(server.root)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        environment = os.environ | {"MALLOC_ARENA_MAX": "2"}
        child = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        address, deadline = HostPort(HOST, port), time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if say_line(address, b'{"ask": "authority"}\n'):
                    break
            except OSError:
                assert child.poll() is None, log.read_text()
            time.sleep(0.2)
        good = json.dumps(question(JoinCode(address=address, token=bytes(16), fingerprint=bytes(32)))).encode()

        def attack(times):
            for number in range(times):
                # Many addresses: one alone is soon refused unread.
                source = f"127.0.{number % 200 + 1}.{rng.randrange(1, 250)}"
                if rng.random() < 0.2:
                    with socket.create_connection((HOST, port), 30, (source, 0)) as raw:
                        raw.sendall(rng.randbytes(rng.randrange(1, 2000)))
                    continue
                try:
                    say_line(address, hostile_bytes(rng, good), source, timeout_s=join_service.CONNECTION_S + 20)
                except TimeoutError:
                    pytest.fail("a connection is not cut")

        attack(60)
        before = memory_bytes(child.pid)
        attack(240)
        grown = memory_bytes(child.pid) - before
        assert child.poll() is None, log.read_text()[-3000:]
        assert grown < 8_000_000, grown
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
        asked = question(server.code())
        assert say_line(address, json.dumps(asked).encode() + b"\n", "127.0.0.9")["status"] == "waiting"
        print(f"300 inputs, grown by {grown / 1e6:.1f} MB")
    finally:
        child.kill()
        child.wait()
