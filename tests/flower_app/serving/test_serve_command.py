"""``collapipe serve`` as a program: its key, ten streams while a device is killed, and its end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest

from flower_app.cli.options import ExitCode
from helpers.deployed_stack import COLLAPIPE
from helpers.patience import eventually
from helpers.served import WEB, chat_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240


class Door:
    """A door that was opened by the command."""

    def __init__(self, run_dir, folder, *options):
        self.log = folder / "serve.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COLLAPIPE, "serve", str(run_dir), "--port", "0", *options], cwd=folder, stdout=log, stderr=log
            )

        def address():
            match = re.search(r"API: (\S+)/v1", self.log.read_text())
            assert match or self.process.poll() is None, self.log.read_text()
            return match

        self.address = eventually(address, PATIENCE_S, self.log.read_text, poll_s=0.1)[1]
        self.key = (re.search(r"key: (\S+)  \(", self.log.read_text()) or ["", ""])[1]

    def devices(self):
        """Processes of the devices."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "DeviceActor" in "".join(child.cmdline())]

    def end(self):
        """End it as Ctrl-C does."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(120)
        gone, alive = psutil.wait_procs(children, 30)
        assert not alive, alive
        return code


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """A function that opens a door of one run; doors that are open at the end are closed."""
    run_dir = chat_run(tmp_path, monkeypatch, positions=512)
    opened = []

    def open_one(*options):
        opened.append(Door(run_dir, tmp_path, *options))
        return opened[-1]

    yield open_one
    for door in opened:
        if door.process.poll() is None:
            door.end()


def test_a_key_is_told_once_and_holds_until_another_is_drawn(doors, tmp_path):
    first = doors()
    assert len(first.key) >= 22
    headers = {"Authorization": f"Bearer {first.key}"}
    assert WEB.get(f"{first.address}/v1/models", headers=headers).status_code == 200
    kept = tmp_path / "runs" / "latest" / "serve-key.sha256"
    assert kept.stat().st_mode & 0o777 == 0o600 and first.key not in kept.read_text()
    assert first.end() == ExitCode.INTERRUPTED
    again = doors()
    assert again.key == "" and "that of the last time" in again.log.read_text()
    assert WEB.get(f"{again.address}/v1/models", headers=headers).status_code == 200
    again.end()
    new = doors("--new-key")
    assert new.key and WEB.get(f"{new.address}/v1/models", headers=headers).status_code == 401


def test_addresses_beyond_the_loopback_want_a_certificate(doors, tmp_path):
    doors()
    refused = subprocess.run(
        [*COLLAPIPE, "serve", "latest", "--host", "0.0.0.0"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 2 and "--tls-cert" in refused.stderr


def test_ten_streams_go_on_when_a_device_is_killed(doors):
    door = doors("--devices", "3")
    client = openai.OpenAI(base_url=f"{door.address}/v1", api_key=door.key, max_retries=0, timeout=PATIENCE_S)
    (model,) = (each.id for each in client.models.list())
    prompts = [f"the {word} sees the dog" for word in ("boy", "king", "cow", "tree", "girl")] * 2

    def ask(prompt):
        asked = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 60, "stop": ["nothing ends it"]}
        return "".join(event.choices[0].text for event in client.completions.create(**asked, stream=True))

    with ThreadPoolExecutor(10) as threads:
        alone = list(threads.map(ask, prompts))
        going = [threads.submit(ask, prompt) for prompt in prompts]
        time.sleep(1.0)
        killed = door.devices()[1].pid
        os.kill(killed, signal.SIGKILL)
        assert [each.result(PATIENCE_S) for each in going] == alone
    assert alone[0] == alone[5]
    # As long as somebody asked, the loss was noticed; the next question is answered by the others.
    assert ask(prompts[0]) == alone[0]
    assert "go on from their tokens" in door.log.read_text()
    assert door.end() == ExitCode.INTERRUPTED


POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer KEY\r\n"
HOSTILE = {
    "no end of the head": POST + b"X: " + b"a" * (1 << 16),
    "no head": b"",
    "half a head": POST[:40],
    "no body": POST + b"Content-Length: 1000\r\n\r\n",
    "a long body": POST + b"Content-Length: 9999999\r\n\r\n" + b"a" * (3 << 20),
    "chunks without an end": POST + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n" + b"[" * 4096 + b"\r\n",
    "a wrong length": POST + b"Content-Length: -1\r\n\r\n",
    "no http": b"\x16\x03\x01" + bytes(range(256)),
    "nobody's key": POST.replace(b"KEY", b"none") + b"Content-Length: 0\r\n\r\n",
    "deep json": POST + b"Content-Length: 500000\r\n\r\n" + b"[" * 500_000,
}


def test_a_thousand_hostile_requests_take_no_memory_and_no_turn(doors):
    """Some say too much and some nothing, some never read; a client with the key is answered all the while."""
    door = doors()
    client = openai.OpenAI(base_url=f"{door.address}/v1", api_key=door.key, max_retries=0, timeout=PATIENCE_S)
    (model,) = (each.id for each in client.models.list())
    port = int(door.address.rpartition(":")[2])

    def ask():
        asked = {"model": model, "prompt": "the dog", "temperature": 0, "max_tokens": 8}
        return client.completions.create(**asked).choices[0].text

    text = ask()
    server = psutil.Process(door.process.pid)
    before = server.memory_info().rss
    body = json.dumps({"model": model, "prompt": "the dog", "max_tokens": 400, "n": 16, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {door.key}\r\n"
    unread = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    held = []
    for number in range(1000):
        kinds = list(HOSTILE.values())
        message = unread if number % 100 == 99 else kinds[number % len(kinds)].replace(b"KEY", door.key.encode())
        connection = socket.create_connection(("127.0.0.1", port), 30)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(message)
        held.append(connection)
        if len(held) > 100:
            held.pop(0).close()
        if number % 50 == 0:
            assert ask() == text
    for connection in held:
        connection.close()
    assert ask() == text
    grown = server.memory_info().rss - before
    assert grown < 100 << 20, f"{grown >> 20} MiB"
