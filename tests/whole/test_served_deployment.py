"""A deployment trains a chat model, and answers at its control unit's door while the server is cut off."""

import json
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_app.cli.options import ExitCode
from flower_app.deployment.edge_server import SUPERLINK_PORT
from helpers.bare_machines import ONE_CLUSTER, Machines
from helpers.capture import found_in, recorded
from helpers.chat_cases import save_chat_model
from helpers.deployed_stack import COLLAPIPE, ENVIRONMENT, PATIENCE_S
from helpers.hosts import Namespaces, namespaces_missing
from helpers.joining import edge_folder, joined_by_files
from helpers.patience import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing()),
]

DOOR_PORT = 8443
CONFIG = """
name = "answers"
scenario = "scenario.toml"
num-rounds = 1
local-steps = 2
batch-size = 4
evaluate-every = 0
policy = "uniform"

[task]
name = "instruction"

[data]
source = "files"
path = "{server}"
train-source = "rows.jsonl"
validation-source = "rows.jsonl"
test-source = "rows.jsonl"
max-length = 48

[model]
family = "llama"
pretrained = "{server}/model"
decoder-layers = 1
max-length = 128

[decoder]
join-timeout = 300.0

[runtime]
timeout = 300.0
"""
ROW = '{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the dog"}]}\n'
PROMPTS = ["the zebra of Uppsala hides the violet key", "the king sees the dog", "a girl reads"]
TOKENS = 12
CONTROL = b"a datagram in plain text, which shows that the packets were recorded"
SEND = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[1].encode(), (sys.argv[2], 9))"
ASK = """
import http.client, json, ssl, sys
host, path, authority, key, body = sys.argv[1:]
connection = http.client.HTTPSConnection(host, timeout=300, context=ssl.create_default_context(cafile=authority))
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
connection.request("POST" if body else "GET", path, body, headers)
try:
    for line in connection.getresponse():
        print(line.decode(), end="", flush=True)
except (OSError, http.client.HTTPException) as error:
    print(f"broken off: {type(error).__name__}", flush=True)
"""


class Door:
    """The door of a control unit, asked on its own machine."""

    def __init__(self, machines, key):
        self.machines, self.key = machines, key
        self.host = f"{machines.hosts.address('cu')}:{DOOR_PORT}"
        self.authority = machines.folder / "state-cu" / "joined" / "cluster.pem"

    def command(self, path, body=None):
        text = "" if body is None else json.dumps(body)
        return (sys.executable, "-c", ASK, self.host, f"/v1/{path}", self.authority, self.key, text)

    def ask(self, path, body=None):
        done = self.machines.hosts.run("cu", *self.command(path, body))
        assert done.returncode == 0, f"{done.stderr}\n{self.machines.said()}"
        return json.loads(done.stdout)

    @property
    def model(self):
        (card,) = self.ask("models")["data"]
        return card["id"]

    def texts(self):
        body = {"model": self.model, "prompt": PROMPTS, "temperature": 0, "max_tokens": TOKENS}
        return [choice["text"] for choice in self.ask("completions", body)["choices"]]

    def long_stream(self, name):
        """Begin an answer of many tokens; returns the program that reads it, and its log, once it reads."""
        log = self.machines.folder / f"stream-{name}.log"
        body = {"model": self.model, "prompt": PROMPTS * 5, "max_tokens": 80, "stop": ["nothing ends it"]}
        command = self.command("completions", body | {"stream": True})
        reader = self.machines.hosts.start("cu", *command, log=log)
        eventually(lambda: log.read_text().count("data: ") > 5, PATIENCE_S, lambda: log.read_text()[-2000:])
        return reader, log

    def opens(self, since):
        """Wait until the door is open again; ``since``: what its box had said before."""
        self.machines.wait_for("cu", "the door of cluster 0 is open", since)


def join(machines, certs):
    """Let the boxes join by files, and start all programs; returns the key of the door."""
    address = machines.hosts.address
    small = {"object_store_mb": 80}
    serve = f"{address('cu')}:{DOOR_PORT}"
    joined_by_files(certs, machines.folder / "state-cu", address("cu"), devices=[0], serve=serve, **small)
    joined_by_files(certs, machines.folder / "state-d1", address("d1"), cluster=0, devices=[1], **small)
    machines.start("server", "up", "edge-server", "--host", address("server"), "--certs", certs / "server")
    machines.wait_for("server", "SuperLink at .* is up")
    start_boxes(machines)
    return machines.wait_for("cu", r"key of the door: (\S+)  \(")[1]


def start_boxes(machines, *options):
    since = start_box(machines, "cu", "Ray of cluster 0 .* is up", *options)
    start_box(machines, "d1", "device . of .* is up")
    return since


def start_box(machines, name, sign, *options):
    """Start a box, again as long as Ray's last programs of the time before hold its ports."""
    for last_try in (*[False] * 9, True):
        since = len(machines.words(name)) if machines.log(name).is_file() else 0
        machines.start(name, "join", "--state", machines.folder / f"state-{name}", *options)
        try:
            machines.wait_for(name, sign, since)
            return since
        except AssertionError:
            if last_try or "is in use by another program" not in machines.words(name)[since:]:
                raise


class Deployment(NamedTuple):
    """Machines of a run that was trained, and whose last act was to open the door."""

    machines: Machines
    run_dir: Path
    door: Door
    packets: list[Path]

    def command(self, *arguments):
        """Type a command on the edge server; returns its exit code and what it says."""
        superlink = f"{self.machines.hosts.address('server')}:{SUPERLINK_PORT}"
        place = ("--superlink", superlink, "--certs", self.machines.folder / "certs" / "server")
        folder = self.machines.folder / "server"
        done = self.machines.hosts.run("server", *COLLAPIPE, *arguments, *place, cwd=folder, env=ENVIRONMENT)
        return done.returncode, done.stderr


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    with Namespaces(["server", "cu", "d1"]) as hosts:
        machines, certs = Machines(hosts, folder), folder / "certs"
        edge_folder(certs, hosts.address("server"))
        with recorded(hosts, ["server"], folder) as packets:
            key, server = join(machines, certs), folder / "server"
            machines.wait_for("cu", "SuperNode ID")
            save_chat_model(server / "model", positions=128)
            (server / "rows.jsonl").write_text(ROW * 24)
            (server / "scenario.toml").write_text(ONE_CLUSTER)
            (server / "run.toml").write_text(CONFIG.format(server=server))
            whole = Deployment(machines, server / "runs" / "latest", Door(machines, key), packets)
            code, words = whole.command("run", "--config", "run.toml", "--after-training")
            assert code == 0 and f"cluster 0: door https://{whole.door.host}/v1" in words, f"{words}\n{machines.said()}"
            # Later runs take the name.
            yield whole._replace(run_dir=whole.run_dir.resolve())


def generated(run_dir, folder):
    """Return what the library's ``generate`` writes with the exported model, and the ids of the prompts."""
    command = (*COLLAPIPE, "export", str(run_dir), str(folder))
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [[tokenizer.bos_token_id, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    written = [model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0] for ids in prompts]
    texts = [tokenizer.decode(row[len(ids) :]) for row, ids in zip(written, prompts, strict=True)]
    return texts, prompts


def test_the_cluster_answers_as_the_exported_model_and_no_prompt_leaves_the_site(deployment, tmp_path):
    hosts, door = deployment.machines.hosts, deployment.door
    expected, prompts = generated(deployment.run_dir, tmp_path / "exported")
    assert door.texts() == expected
    hosts.run("server", sys.executable, "-c", SEND, CONTROL.decode(), hosts.address("cu"))
    # The server's machine may be off.
    hosts.connect("server", False)
    try:
        assert door.texts() == expected
    finally:
        hosts.connect("server", True)
    patterns = {f"text {i}": prompt.encode() for i, prompt in enumerate(PROMPTS)}
    patterns |= {f"ids {i}": struct.pack(f"<{len(ids)}q", *ids) for i, ids in enumerate(prompts)}
    patterns |= {f"words of ids {i}": json.dumps(ids).encode() for i, ids in enumerate(prompts)}
    assert deployment.packets[0].stat().st_size > 1e5
    assert found_in(deployment.packets, patterns | {"control": CONTROL}) == {"control"}


def test_a_lost_door_ends_its_requests_and_opens_again(deployment):
    machines, door = deployment.machines, deployment.door
    expected = door.texts()
    reader, log = door.long_stream("killed")
    since = len(machines.words("cu"))
    (pid,) = machines.hosts.pids("cu", "flower_app.serving.box_door")
    machines.hosts.run("cu", "kill", "-KILL", str(pid))
    assert reader.wait(PATIENCE_S) == 0 and "[DONE]" not in log.read_text()
    door.opens(since)
    assert door.texts() == expected


def test_a_box_that_starts_again_answers_without_the_server(deployment):
    machines, door = deployment.machines, deployment.door
    expected = door.texts()
    machines.hosts.connect("server", False)
    try:
        reader, log = door.long_stream("ended")
        machines.programs["cu"].send_signal(signal.SIGTERM)
        assert reader.wait(PATIENCE_S) == 0
        assert "could not answer" in log.read_text() and "[DONE]" not in log.read_text(), log.read_text()[-2000:]
        for name in ("cu", "d1"):
            machines.hosts.end(machines.programs[name])
        door.opens(start_boxes(machines))
        assert door.texts() == expected
    finally:
        machines.hosts.connect("server", True)


def test_a_cluster_that_answers_is_not_trained_until_its_answers_are_ended(deployment):
    machines, door = deployment.machines, deployment.door
    expected = door.texts()
    code, words = deployment.command("run", "--config", "run.toml")
    assert code == ExitCode.BAD_INPUT and "a cluster either trains or answers" in words and "--end" in words, words
    assert door.texts() == expected
    code, words = deployment.command("serve", deployment.run_dir, "--end")
    assert code == 0 and "cluster 0: its door is closed" in words, words
    done = machines.hosts.run("cu", *door.command("models"))
    assert done.returncode == 1 and "ConnectionRefusedError" in done.stderr, done
    since = len(machines.words("cu"))
    code, words = deployment.command("serve", deployment.run_dir)
    assert code == 0 and f"door https://{door.host}/v1" in words, f"{words}\n{machines.said()}"
    door.opens(since)
    assert door.texts() == expected


def test_a_box_whose_owner_opens_no_door_answers_nothing(deployment):
    machines = deployment.machines
    for name in ("cu", "d1"):
        machines.hosts.end(machines.programs[name])
    machines.wait_for("cu", "SuperNode ID", start_boxes(machines, "--serve", "off"))
    code, words = deployment.command("serve", deployment.run_dir)
    assert code == ExitCode.BAD_INPUT and re.search("no door; only its owner opens one: collapipe join --serve", words)
