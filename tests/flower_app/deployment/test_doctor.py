"""``collapipe doctor`` names each planted mistake, and what to do about it."""

import contextlib
import datetime
import http.server
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client_pipeline.runtime.ray.ray_folder import short_folder
from client_pipeline.runtime.transport.node_tls import NodeTls
from flower_app.cli.main import app
from flower_app.deployment import certificate_authority, machine_checks, network_checks
from flower_app.deployment.certificate_authority import Authority, write_public, write_secret
from flower_app.deployment.credentials import AuthorityFiles, DeviceFiles, ServerFiles
from flower_app.deployment.edge_server import EdgeServer
from flower_app.deployment.ray_node import RayNode, ray_environment
from flower_app.launch.superlink import flower_environment, is_healthy, program_path
from helpers.joining import edge_folder, joined_by_files
from helpers.repository import ROOT
from helpers.running_programs import HOST, free_block, free_port, running, taken_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Folders of an edge server, and of a control unit and a device that have joined it."""
    folder = tmp_path_factory.mktemp("deployment")
    edge_folder(folder / "certs")
    joined_by_files(folder / "certs", folder / "cu", object_store_mb=80)
    joined_by_files(folder / "certs", folder / "device", cluster=0, object_store_mb=80)
    return folder


@pytest.fixture(scope="module")
def certs(deployment):
    return deployment / "certs"


@pytest.fixture(scope="module")
def superlink(certs, tmp_path_factory):
    """Address of a real SuperLink."""
    state = tmp_path_factory.mktemp("state")
    server = EdgeServer(host=HOST, certs=ServerFiles(certs / "server"), state=state, port=free_port())
    environment, ca = flower_environment(state / "flower"), server.certs.ca
    with (
        running(
            server.superlink_command(), environment, state / "superlink.log", lambda: is_healthy(server.control, ca)
        ),
        running(server.proxy_command(), environment, state / "proxy.log", lambda: is_healthy(server.address, ca)),
    ):
        yield server.address


@pytest.fixture(scope="module")
def open_superlink(certs, tmp_path_factory):
    """Address of a SuperLink with one port for all."""
    state, files = tmp_path_factory.mktemp("open"), ServerFiles(certs / "server")
    tls = {"--ssl-certfile": files.certificate, "--ssl-keyfile": files.key, "--ssl-ca-certfile": files.ca}
    options = {"--host": HOST, "--port": free_port()} | tls
    command = [str(program_path("flower-superlink")), "--enable-supernode-auth"]
    command += [str(word) for pair in options.items() for word in pair]
    address = f"{HOST}:{options['--port']}"
    environment = flower_environment(state / "flower")
    with running(command, environment, state / "superlink.log", lambda: is_healthy(address, files.ca)):
        yield address


@pytest.fixture(scope="module")
def ray_head(certs, tmp_path_factory):
    """Address of a real Ray head; no device has joined."""
    temp = Path(short_folder()) / f"collapipe-doctor-{os.getpid()}"
    node = RayNode(host=HOST, first_port=free_block(), object_store_mb=80, temp=temp)
    environment = ray_environment(
        flower_environment(temp / "flower"), DeviceFiles(certs.parent / "device" / "joined").ray_token
    )
    log = tmp_path_factory.mktemp("ray") / "head.log"
    try:
        with running(node.command(), environment, log, lambda: "Ray runtime started" in log.read_text()):
            yield f"{HOST}:{node.first_port}"
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def folder(deployment, tmp_path):
    """A copy of all folders, to spoil."""
    return Path(shutil.copytree(deployment, tmp_path / "deployment"))


class Machine:
    """A machine that ``collapipe doctor`` examines, with good values to begin with."""

    def __init__(self, folder, superlink="127.0.0.1:1", head="127.0.0.1:1"):
        self.folder = folder
        data = folder / "data"
        data.mkdir()
        (data / "train.en").write_text("a\n")
        block = free_block()
        self.place = {
            "cu": {"superlink": superlink, "data": str(data), "runtime_port": free_port(), "ray_port": block},
            "device": {"cu": head, "ray_port": block},
        }
        self.server = {"--host": HOST, "--certs": folder / "certs" / "server", "--port": free_port()}

    def doctor(self, role, **changes):
        if role == "edge-server":
            options = self.server | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
        else:
            self.write(role, changes)
            role, options = "box", {"--state": self.folder / role}
        arguments = [str(word) for pair in options.items() for word in pair]
        done = CliRunner().invoke(app, ["doctor", role, *arguments, "--json"])
        assert done.exit_code in (0, 1), done.output
        found = json.loads(done.stdout)
        assert found["passed"] == (done.exit_code == 0)
        return found["findings"]

    def write(self, role, changes):
        """Change what a box has kept of its place and its options."""
        file = self.folder / role / "joined" / "box.json"
        box = json.loads(file.read_text())
        for key, value in (self.place[role] | changes).items():
            (box["options"] if key in box["options"] else box)[key] = value
        file.write_text(json.dumps(box))


def named(findings, check, words, remedy, status="failed"):
    """The finding that names the mistake; it also says what to do."""
    hits = [f for f in findings if f["check"] == check and f["status"] == status and words in f["found"]]
    assert hits, [f for f in findings if f["status"] != "ok"]
    assert remedy in hits[0]["remedy"], hits[0]
    return hits[0]


def failures(findings):
    return [f for f in findings if f["status"] == "failed"]


def reissue(folder, days=365, hosts=(HOST,), by=None):
    """Another certificate of the server."""
    signer = by or Authority.load(AuthorityFiles(folder / "certs" / "authority"))
    certificate, key = signer.issue_server(hosts, days)
    files = ServerFiles(folder / "certs" / "server")
    write_public(files.certificate, certificate)
    write_secret(files.key, key)


def test_a_good_edge_server_passes(folder):
    assert failures(Machine(folder).doctor("edge-server")) == []


def test_an_expired_certificate(folder, monkeypatch):
    monkeypatch.setattr(certificate_authority, "_BACKDATED", datetime.timedelta(days=10))
    reissue(folder, days=-2)
    (found,) = failures(Machine(folder).doctor("edge-server"))
    assert "server.pem expired on " in found["found"] and "collapipe up edge-server --name HOST" in found["remedy"]


def test_a_certificate_that_expires_soon_is_a_warning(folder):
    reissue(folder, days=5)
    findings = Machine(folder).doctor("edge-server")
    named(findings, "certificate", "server.pem expires in 4 days", "collapipe up edge-server --name HOST", "warning")
    assert failures(findings) == []


def test_a_certificate_for_another_host(folder):
    reissue(folder, hosts=["10.9.8.7"])
    (found,) = failures(Machine(folder).doctor("edge-server", host="127.0.0.2"))
    assert "is not for 127.0.0.2, but for 10.9.8.7" in found["found"]
    assert "collapipe up edge-server --name HOST" in found["remedy"]


def test_a_key_that_is_another_certificates(folder):
    shutil.copy(folder / "cu" / "joined" / "cu.key", folder / "certs" / "server" / "server.key")
    (found,) = failures(Machine(folder).doctor("edge-server"))
    assert "server.key does not belong to" in found["found"]


def test_an_authority_that_did_not_sign(folder, superlink):
    stranger = Authority.create()
    write_public(folder / "cu" / "joined" / "ca.pem", stranger.pem)
    findings = Machine(folder, superlink).doctor("cu")
    named(findings, "authority", "was not signed by", "collapipe join CODE")
    named(findings, "superlink", "its certificate is refused", "is of another authority")


@pytest.mark.parametrize(("option", "purpose"), [("port", ""), ("control_port", ", the SuperLink's control,")])
def test_a_port_in_use(folder, option, purpose):
    with taken_port() as port:
        (found,) = failures(Machine(folder).doctor("edge-server", **{option: port}))
    assert f"port {port} of {HOST}{purpose} is in use" in found["found"] and f"sport = :{port}" in found["remedy"]


def test_an_address_that_is_another_machines(folder):
    reissue(folder, hosts=["192.0.2.1"])
    findings = Machine(folder).doctor("edge-server", host="192.0.2.1")
    named(findings, "ports", "192.0.2.1 is no address of this machine", "give --host one")


def test_a_superlink_that_cannot_be_reached(folder):
    (found,) = failures(Machine(folder).doctor("cu"))
    assert found["check"] == "superlink" and "nobody answers at 127.0.0.1:1" in found["found"]
    assert "firewall" in found["remedy"]


def test_a_good_control_unit_passes(folder, superlink):
    assert failures(Machine(folder, superlink).doctor("cu")) == []


def test_a_superlink_that_takes_orders_from_anyone(folder, open_superlink):
    found = named(Machine(folder, open_superlink).doctor("cu"), "control", "can start runs", "collapipe up edge-server")
    assert open_superlink in found["found"]


def test_a_clock_that_is_wrong(folder, superlink, monkeypatch):
    real = time.time
    monkeypatch.setattr(network_checks.time, "time", lambda: real() + 3600)
    found = named(Machine(folder, superlink).doctor("cu"), "clock", "ahead of the server's", "NTP")
    (seconds,) = re.findall(r"clock is (\d+) s ahead", found["found"])
    assert int(seconds) == pytest.approx(3600, abs=3)


def test_a_supernode_key_that_is_missing(folder, superlink):
    (folder / "cu" / "joined" / "supernode.key").unlink()
    (found,) = failures(Machine(folder, superlink).doctor("cu"))
    assert "supernode.key is missing: the SuperNode's private key" in found["found"]
    assert "collapipe join CODE" in found["remedy"]


def test_no_supernode_that_may_connect(folder):
    shutil.rmtree(folder / "certs" / "server" / "supernodes")
    findings = Machine(folder).doctor("edge-server")
    named(findings, "supernode keys", "no control unit has joined", "collapipe invite", "warning")


def test_a_data_folder_that_is_missing_or_empty(folder, superlink, tmp_path):
    machine = Machine(folder, superlink)
    (found,) = failures(machine.doctor("cu", data=str(tmp_path / "elsewhere")))
    assert found["check"] == "data" and "no folder" in found["found"] and "--data" in found["remedy"]
    (tmp_path / "empty").mkdir()
    (found,) = failures(machine.doctor("cu", data=str(tmp_path / "empty")))
    assert "is empty" in found["found"] and "put the cluster's text there" in found["remedy"]


def test_a_profile_of_a_whole_network_is_read_for_its_own_cluster(folder, superlink):
    machine, network = Machine(folder, superlink), ROOT / "configs" / "scenarios" / "unequal.toml"
    (found,) = [f for f in machine.doctor("cu", device_profile=str(network)) if f["check"] == "device profile"]
    assert found["status"] == "ok" and found["found"].endswith("unequal.toml describes 3 devices of cluster 0")
    missing = machine.doctor("cu", device_profile=str(network), cluster=2)
    named(missing, "device profile", "has the clusters 0 to 1, expected cluster 2", "write it with collapipe profile")


@pytest.mark.parametrize("role", ["edge-server", "cu"])
def test_a_state_folder_that_others_may_look_into_is_a_warning(folder, tmp_path, role):
    state = folder / "cu" if role == "cu" else tmp_path / "state"
    state.mkdir(exist_ok=True)
    state.chmod(0o755)
    machine, more = Machine(folder), {} if role == "cu" else {"state": state}
    named(machine.doctor(role, **more), "state", "other users may look into", f"chmod 700 {state}", "warning")
    state.chmod(0o700)
    assert not [finding for finding in machine.doctor(role, **more) if finding["check"] == "state"]


def test_too_little_memory(folder, superlink):
    findings = Machine(folder, superlink).doctor("cu", object_store_mb=900_000_000)
    named(findings, "memory", "900001500 MB are needed", "lower --object-store-mb")


def test_a_package_of_another_version(folder, monkeypatch):
    real = machine_checks.metadata.version
    monkeypatch.setattr(machine_checks.metadata, "version", lambda name: "1.30.0" if name == "flwr" else real(name))
    findings = Machine(folder).doctor("edge-server")
    named(findings, "versions", "flwr is 1.30.0, expected flwr<", "pip install")


def test_a_key_that_others_may_read_is_a_warning(folder):
    (folder / "certs" / "server" / "server.key").chmod(0o644)
    findings = Machine(folder).doctor("edge-server")
    named(findings, "files", "other users may read", "chmod 600", "warning")


def test_a_ray_head_that_cannot_be_reached(folder):
    (found,) = failures(Machine(folder).doctor("device"))
    assert found["check"] == "ray" and "no Ray head answers at 127.0.0.1:1" in found["found"]
    assert "collapipe join" in found["remedy"]


def test_a_good_device_passes(folder, ray_head):
    assert failures(Machine(folder, head=ray_head).doctor("device")) == []


def test_a_device_of_another_authority(folder, tmp_path, monkeypatch):
    head, own = tls_of(folder / "cu"), tls_of(folder / "device")
    # On the loopback, where this test is, nothing is encrypted.
    monkeypatch.setattr(network_checks, "node_tls", lambda files, host: own)
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve_tls, args=(listener, head.server_context()), daemon=True).start()
        address = f"{HOST}:{listener.getsockname()[1]}"
        write_public(own.authority, Authority.create().pem)
        findings = Machine(folder, head=address).doctor("device")
    named(findings, "encryption", "is not of this machine's cluster", "join the same edge server")


def tls_of(state):
    """A box's certificate within its cluster."""
    files = DeviceFiles(state / "joined")
    return NodeTls(certificate=files.node_certificate, key=files.key, authority=files.cluster_ca, host=HOST)


def serve_tls(listener, context):
    context.set_alpn_protocols(["h2"])
    while True:
        try:
            raw, _ = listener.accept()
        except OSError:
            return
        with contextlib.suppress(OSError), context.wrap_socket(raw, server_side=True) as connection:
            connection.sendall(b"settings")


def test_a_secret_that_is_another_clusters(folder, ray_head):
    write_secret(folder / "device" / "joined" / "ray-token", b"0" * 64)
    (found,) = failures(Machine(folder, head=ray_head).doctor("device"))
    assert "refuses this machine's secret" in found["found"] and "collapipe join CODE" in found["remedy"]


@contextlib.contextmanager
def supernode(answers=math.inf):
    """Port of what answers as a SuperNode does, but so many times only."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            nonlocal answers
            answers -= 1
            self.send_response(200 if self.path == "/health" and answers >= 0 else 503)
            self.end_headers()

    with http.server.ThreadingHTTPServer((HOST, 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_devices_that_have_not_joined(folder, superlink, ray_head):
    port = int(ray_head.rpartition(":")[2])
    with supernode() as own:
        (found,) = failures(Machine(folder, superlink).doctor("cu", ray_port=port, runtime_port=own))
    assert found["check"] == "devices" and found["found"] == "no device has joined"
    assert "collapipe join --state" in found["remedy"]


def test_a_supernode_that_the_server_refuses(folder, superlink, ray_head):
    # It answers for a moment, each time that it is started again.
    port = int(ray_head.rpartition(":")[2])
    with supernode(answers=2) as own:
        findings = Machine(folder, superlink).doctor("cu", ray_port=port, runtime_port=own)
    named(findings, "supernode", "the SuperNode is not running", "collapipe boxes")


def test_a_supernodes_port_that_is_taken(folder, superlink):
    # It listens on the loopback, whatever --host is.
    with taken_port() as port:
        findings = Machine(folder, superlink).doctor("cu", host="127.0.0.2", runtime_port=port)
    named(findings, "ports", f"port {port} of 127.0.0.1, the SuperNode's own, is in use", "choose another port")


REWRITE = """
import json, sys
import ray
from ray._common.usage import usage_constants, usage_lib

gcs = ray._raylet.GcsClient(address=sys.argv[1])
found = usage_lib.get_cluster_metadata(gcs) | {"ray_version": "2.9.0"}
key, space = usage_constants.CLUSTER_METADATA_KEY, ray._private.ray_constants.KV_NAMESPACE_CLUSTER
gcs.internal_kv_put(key, json.dumps(found).encode(), True, space)
"""


def test_a_ray_of_another_version(folder, ray_head):
    """Last of those with this head: it calls itself another release from now on."""
    environment = ray_environment(os.environ, DeviceFiles(folder / "device" / "joined").ray_token)
    subprocess.run([sys.executable, "-c", REWRITE, ray_head], env=environment, check=True, timeout=120)
    (found,) = failures(Machine(folder, head=ray_head).doctor("device"))
    assert "has ray 2.9.0, here " in found["found"] and "install the same Python and packages" in found["remedy"]


def test_people_get_lines_with_remedies(folder):
    Machine(folder).write("device", {})
    done = CliRunner().invoke(app, ["doctor", "box", "--state", str(folder / "device")])
    assert done.exit_code == 1
    assert "failed  ray: no Ray head answers at 127.0.0.1:1\n        -> start the control unit" in done.stdout
    (folder / "device" / "joined" / "box.json").unlink()
    done = CliRunner().invoke(app, ["doctor", "box", "--state", str(folder / "device")])
    assert done.exit_code == 2 and "expected the folder of a box that has joined" in done.stderr
