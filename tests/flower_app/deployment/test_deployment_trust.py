"""What a control unit can do at a real SuperLink, and what a real SuperNode lets the server do."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream, LinkCertificates
from flower_app.deployment.certs import CertsRequest, make_certificates
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.credentials import CuFiles, ServerFiles
from flower_app.deployment.deployed_run import Deployment
from flower_app.deployment.programs import listens
from flower_app.launch.processes import MARK, RunProcesses
from flower_app.launch.superlink import flower_environment
from helpers.decoder_cases import batch_of, service_of, step_id, train_step

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
PATIENCE_S = 240


def free_ports():
    """Two free ports one after the other."""
    for port in range(20_000 + os.getpid() % 500 * 20, 32_000, 2):
        if not any(listens(HOST, port + k) for k in range(2)):
            return port
    raise RuntimeError("no free ports")


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Programs:
    """Programs with all that comes out of them, until they are no longer needed."""

    def __init__(self, folder):
        self.folder = folder
        self._children = []

    def start(self, name, command, environment):
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self._children.append((child, environment[MARK]))
        return child

    def said(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, name, *words, since=0):
        """Wait until a program has said one of these words; returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (heard := [word for word in words if word in self.said(name)[since:]]):
            assert time.monotonic() < deadline, f"{name} did not say {words}: {self.said(name)[-3000:]}"
            time.sleep(0.2)
        return heard[0]

    def end(self, child):
        (mark,) = [mark for one, mark in self._children if one is child]
        child.send_signal(signal.SIGTERM)
        child.wait(60)
        RunProcesses(mark, child.pid).end()

    def close(self):
        for child, mark in self._children:
            RunProcesses(mark, child.pid).end()
            child.wait(30)


class Federation:
    """An edge server as ``collapipe up edge-server`` starts it, and SuperNodes as ``collapipe up cu`` does."""

    def __init__(self, folder):
        self.folder, self.programs = folder, Programs(folder)
        self.certs = folder / "certs"
        make_certificates(CertsRequest(servers=[HOST], clusters=2, out=self.certs))
        # What the edge server's machine has is a copy.
        shutil.copytree(self.certs / "server", folder / "server")
        self.port = free_ports()
        self.address = f"{HOST}:{self.port}"
        self.server = None

    def start_server(self):
        options = ["--host", HOST, "--port", str(self.port), "--certs", self.folder / "server", "--state", "state"]
        since = len(self.programs.said("server"))
        command = [sys.executable, "-m", "flower_app.cli", "up", "edge-server", *options]
        environment = os.environ | {MARK: f"trust-{os.getpid()}"}
        self.server = self.programs.start("server", command, environment)
        self.programs.wait_for("server", "is up", since=since)

    def stop_server(self):
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(60) == 0

    def start_supernode(self, cluster, certs=None):
        """Start the SuperNode of a cluster; its Ray is not needed here."""
        state = self.folder / f"state-{cluster}"
        box = ControlUnitBox(
            cluster=cluster,
            host=HOST,
            server=self.address,
            certs=CuFiles(certs or self.certs / f"cu-{cluster}"),
            state=state,
            runtime_port=free_port(),
        )
        (state / "flower").mkdir(parents=True, exist_ok=True)
        return self.programs.start(f"cu-{cluster}", box.supernode_command(), flower_environment(state / "flower"))

    def control(self, port):
        """Flower's own client of the Control API."""
        root = (self.certs / "server" / "ca.pem").read_bytes()
        return ControlHttpClient.from_server_address(f"{HOST}:{port}", False, root, interceptors=[])

    def statuses(self):
        """What the SuperLink holds of each SuperNode, by name."""
        nodes = self.control(self.port + 1).ListNodes(ListNodesRequest()).nodes_info
        return {node.name: node.status for node in nodes}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    try:
        federation.start_server()
        yield federation
    finally:
        federation.programs.close()


def stranger_key():
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def refused(call, request):
    """Whether the SuperLink's door refuses a request."""
    try:
        answer = call(request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code == 403
    return f"answered: {answer}"


def test_a_control_unit_reaches_no_control_at_its_port(federation):
    client = federation.control(federation.port)
    requests = {
        client.RegisterNode: RegisterNodeRequest(public_key=stranger_key()),
        client.UnregisterNode: UnregisterNodeRequest(node_id=1),
        client.StartRun: StartRunRequest(),
        client.ListNodes: ListNodesRequest(),
        client.ListRuns: ListRunsRequest(),
    }
    assert {call.__name__: refused(call, request) for call, request in requests.items()} == {
        call.__name__: True for call in requests
    }


APP = """
[project]
name = "stranger"
version = "1.0.0"
description = "Reads what is not its own."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stranger"
fab-include = ["stranger/**/*.py"]

[tool.flwr.app.components]
serverapp = "stranger.server:app"
clientapp = "stranger.client:app"
"""
SERVER = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    import time
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    content = RecordDict({"config": ConfigRecord({"read": "the text"})})
    replies = grid.send_and_receive([Message(content, node, "query") for node in nodes], timeout=120)
    lines = [reply.error.reason if reply.has_error() else "it ran" for reply in replies]
    Path(%r).write_text("\\n".join(lines) or "no reply")
"""
CLIENT = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

Path(%r).write_text("its code was imported")
app = ClientApp()


@app.query()
def query(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def write_app(folder, answer, spoils):
    (folder / "stranger").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(APP)
    (folder / "stranger" / "__init__.py").write_text("")
    (folder / "stranger" / "server.py").write_text(SERVER % str(answer))
    (folder / "stranger" / "client.py").write_text(CLIENT % str(spoils))
    return folder


def start_run(federation, app):
    """Start a run where the edge server's own machine does: at its control, or at the one port that there is."""
    fab = build_fab_from_disk(app)
    request = StartRunRequest(
        fab=fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {})), app_spec="", federation=""
    )
    port = federation.port + (1 if listens(HOST, federation.port + 1) else 0)
    return federation.control(port).StartRun(request)


def test_a_control_unit_runs_no_app_but_its_own_releases(federation):
    child = federation.start_supernode(0)
    federation.programs.wait_for("cu-0", "SuperNode ID")
    answer, spoils = federation.folder / "answer", federation.folder / "spoils"
    start_run(federation, write_app(federation.folder / "app", answer, spoils))
    deadline = time.monotonic() + PATIENCE_S
    while not answer.exists():
        assert time.monotonic() < deadline, federation.programs.said("server")[-3000:]
        time.sleep(0.2)
    assert not spoils.exists(), spoils.read_text()
    reason = answer.read_text()
    assert "this control unit does not run this app, whose digest is" in reason
    assert "install the same release on the server and all control units" in reason
    # It goes on to take orders.
    assert child.poll() is None and "is refused" in federation.programs.said("cu-0")


def test_a_revoked_control_unit_is_refused_and_the_others_are_not(federation):
    """Last of all: the edge server starts again."""
    revoked = federation.start_supernode(1)
    federation.programs.wait_for("cu-1", "SuperNode ID")
    shutil.copytree(federation.certs / "cu-1", federation.folder / "stolen")
    command = [sys.executable, "-m", "flower_app.cli", "revoke", "--cluster", "1", "--out", federation.certs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # As scp -r does it: what is no longer in the folder stays in the copy.
    shutil.copytree(federation.certs / "server", federation.folder / "server", dirs_exist_ok=True)
    assert (federation.folder / "server" / "supernodes" / "cu-1.pub").is_file()
    federation.stop_server()
    federation.start_server()
    assert "cu-1 may no longer connect" in federation.programs.said("server")
    assert revoked.wait(PATIENCE_S) is not None
    since = len(federation.programs.said("cu-1"))
    again = federation.start_supernode(1, federation.folder / "stolen")
    assert again.wait(PATIENCE_S) != 0
    assert "SuperNode ID" not in federation.programs.said("cu-1")[since:]
    expected, deadline = {"cu-0": "online", "cu-1": "unregistered"}, time.monotonic() + PATIENCE_S
    while (statuses := federation.statuses()) != expected:
        assert time.monotonic() < deadline, statuses
        time.sleep(0.5)
    check_stream(federation)


def check_stream(federation):
    """The decoder of a run refuses the revoked certificate, though it comes with the round's token."""
    server = ServerFiles(federation.folder / "server")
    deployment = Deployment(address=f"{HOST}:0", control="", certs=server)
    pairs = (pair.split("=", 1) for pair in deployment.settings(None, []))
    tls = {key.removeprefix("decoder.").replace("-", "_"): value for key, value in pairs if ".tls-" in key}
    with service_of(num_clusters=1, **tls) as service:
        address = service.open_round(1, [0], 1)[0]
        with pytest.raises(LinkError, match="the certificate of this control unit is revoked"):
            DecoderStream.open(address, link_certificates(federation.folder / "stolen"))
        with DecoderStream.open(address, link_certificates(federation.certs / "cu-0")) as stream:
            train_step(stream, step_id(0), batch_of(0, 3), 1)
        assert service.finish_round().clusters[0].steps == 1


def link_certificates(folder):
    files = CuFiles(folder)
    return LinkCertificates(certificate=str(files.certificate), key=str(files.key), root_certificate=str(files.ca))
