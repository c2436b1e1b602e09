"""Rights of a control unit at a real SuperLink, and of the server at a real SuperNode."""

import functools
import hashlib
import os
import subprocess
import sys

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from flower_app.deployment.app_digest import installed_digest
from flower_app.deployment.app_proxy import write_credentials
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.programs import listens
from flower_app.launch.processes import MARK, RunProcesses
from flower_app.launch.superlink import flower_environment
from helpers.joining import control_units
from helpers.patience import eventually
from helpers.running_programs import HOST, free_port

pytestmark = pytest.mark.slow

PATIENCE_S = 240


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

    def wait_for(self, name, words):
        said = functools.partial(self.said, name)
        eventually(
            lambda: words in said(), PATIENCE_S, lambda: f"{name} did not say {words}: {said()[-3000:]}", poll_s=0.2
        )

    def close(self):
        for child, mark in self._children:
            RunProcesses(mark).end()
            child.wait(120)


class Federation:
    """An edge server as ``collapipe up edge-server`` starts it, and SuperNodes as ``collapipe join`` does."""

    def __init__(self, folder):
        self.folder, self.programs = folder, Programs(folder)
        self.certs = folder / "certs"
        self.units = control_units(self.certs)
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.release = installed_digest()

    def start_server(self):
        options = ["--host", HOST, "--port", str(self.port), "--certs", self.certs / "server", "--state", "state"]
        command = [sys.executable, "-m", "flower_app.cli", "up", "edge-server", *options]
        environment = os.environ | {MARK: f"trust-{os.getpid()}"}
        self.programs.start("server", command, environment)
        self.programs.wait_for("server", f"SuperLink at {self.address} is up")

    def start_supernode(self, cluster):
        """Start the SuperNode of a cluster; its Ray is not needed here."""
        state = self.folder / f"state-{cluster}"
        box = ControlUnitBox(
            cluster=cluster,
            host=HOST,
            server=self.address,
            certs=self.units[cluster],
            state=state,
            runtime_port=free_port(),
        )
        (state / "flower").mkdir(parents=True, exist_ok=True)
        files, proxy = write_credentials(state / "proxy", HOST), f"{HOST}:{free_port()}"
        environment = flower_environment(state / "flower")
        self.programs.start(f"proxy-{cluster}", box.proxy_command(proxy, files, self.release), environment)
        return self.programs.start(f"cu-{cluster}", box.supernode_command(proxy, files), environment)

    def control(self, port):
        """Flower's own client of the Control API."""
        root = (self.certs / "server" / "ca.pem").read_bytes()
        return ControlHttpClient.from_server_address(f"{HOST}:{port}", False, root, interceptors=[])


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("federation"))
    try:
        federation.start_server()
        yield federation
    finally:
        federation.programs.close()


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
    eventually(answer.exists, PATIENCE_S, lambda: federation.programs.said("server")[-3000:], poll_s=0.2)
    assert not spoils.exists(), spoils.read_text()
    reason = answer.read_text()
    assert reason == "The FAB could not be verified."
    said = federation.programs.said("proxy-0")
    assert "this control unit does not run this app, whose digest is" in said and federation.release in said
    assert "install the same release on the server and all control units" in said
    # Not a file of it has reached the disk, and the SuperNode goes on to take orders.
    assert not list((federation.folder / "state-0" / "flower").rglob("*stranger*"))
    assert child.poll() is None
