"""Flower's own SuperLink application behind the proxy: what a control unit's key opens, and what it does not."""

import hashlib
import socket
import threading
import time
from dataclasses import fields

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from flower_app.deployment import revocation
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.fleet_proxy import FleetProxy
from flower_app.deployment.reverse_proxy import Bounds
from flower_app.deployment.supernodes import align_register, trusted_keys
from flower_app.launch.app_folder import assemble_app
from helpers.joining import control_units, joined_by_files
from helpers.proxies import RunningProxy, ServerCredentials

HOST = "127.0.0.1"


class EdgeServer:
    """Flower's application under TLS on the loopback, and the proxy; nothing runs the server apps."""

    def __init__(self, folder):
        self.certs = folder / "certs"
        self.units = control_units(self.certs, 2)
        self.files = ServerFiles(self.certs / "server")
        control = socket.create_server((HOST, 0))
        self.control_port = control.getsockname()[1]
        self.application = create_app(lifespan_config(str(folder / "superlink.db")), SuperLinkLifespan)
        tls = {"ssl_certfile": str(self.files.certificate), "ssl_keyfile": str(self.files.key)}
        config = uvicorn.Config(self.application, lifespan="off", log_level="error", timeout_graceful_shutdown=1, **tls)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [control]})
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.proxy = RunningProxy(
            lambda **options: FleetProxy(10**6, **options), self.control_port, ServerCredentials(self.files), Bounds()
        )
        self.port = self.proxy.port

    def client(self, port):
        """Flower's own client of the Control API."""
        root = self.files.ca.read_bytes()
        return ControlHttpClient.from_server_address(f"{HOST}:{port}", False, root, interceptors=[])

    def align(self):
        return align_register(self.client(self.control_port), trusted_keys(self.files))

    def statuses(self):
        nodes = self.client(self.control_port).ListNodes(ListNodesRequest()).nodes_info
        return {node.name: node.status for node in nodes}

    def supernode(self, files):
        """A SuperNode's side of the Fleet API, as Flower signs its requests."""
        private = serialization.load_ssh_private_key(files.supernode_key.read_bytes(), None)
        return SuperNode(f"{HOST}:{self.port}", files.ca.read_bytes(), private)

    def close(self):
        self.proxy.close()
        self.server.should_exit = True
        self.thread.join(120)


class SuperNode:
    """A SuperNode of one key."""

    def __init__(self, address, root, private):
        signed = [NodeAuthHttpInterceptor(private, private.public_key())]
        self.key = public_key_to_bytes(private.public_key())
        self.client = FleetHttpClient.from_server_address(address, False, root, interceptors=signed)
        self.node = Node()

    def activate(self):
        """Connect; HTTP status of the refusal, or 200."""
        status, answered = answer(
            self.client.ActivateNode, ActivateNodeRequest(public_key=self.key, heartbeat_interval=30)
        )
        if status == 200:
            self.node = Node(node_id=answered.node_id)
        return status

    def pull(self):
        """Ask for orders; HTTP status."""
        return answer(self.client.PullMessages, PullMessagesRequest(node=self.node))[0]


def lifespan_config(database):
    """Flower's defaults, with SuperNodes' keys asked for."""
    given = dict(
        control_address=f"{HOST}:0",
        host=HOST,
        port=0,
        insecure=False,
        authn_plugin=load_control_authn_plugin(),
        enable_event_log=False,
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        simulation=False,
        database=database,
        isolation="subprocess",
        runtime_dependency_install=False,
    )
    return SuperLinkLifespanConfig(**{field.name: given.get(field.name) for field in fields(SuperLinkLifespanConfig)})


@pytest.fixture
def edge_server(tmp_path):
    server = EdgeServer(tmp_path)
    yield server
    server.close()


def own_key():
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def start_request(folder):
    bundle = build_fab_from_disk(assemble_app(folder / "app"))
    return StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})))


def answer(call, request):
    """HTTP status, and what was answered."""
    try:
        return 200, call(request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code, None


@pytest.mark.slow
def test_a_control_unit_can_neither_start_a_run_nor_change_who_may_connect(edge_server, tmp_path):
    assert edge_server.align() == ["cu-0 may connect", "cu-1 may connect"]
    admin, peer = edge_server.client(edge_server.control_port), edge_server.client(edge_server.port)
    (node, _) = admin.ListNodes(ListNodesRequest()).nodes_info
    start = start_request(tmp_path)
    supernode = edge_server.supernode(edge_server.units[1])
    assert supernode.activate() == supernode.pull() == 200
    refused = {
        peer.RegisterNode: RegisterNodeRequest(public_key=own_key()),
        peer.UnregisterNode: UnregisterNodeRequest(node_id=node.node_id),
        peer.StartRun: start,
        peer.StopRun: StopRunRequest(run_id=1),
        peer.ListNodes: ListNodesRequest(),
        peer.ListRuns: ListRunsRequest(),
    }
    assert {call.__name__: answer(call, request)[0] for call, request in refused.items()} == {
        call.__name__: 403 for call in refused
    }
    # Nor does Flower let SuperNodes register or remove anybody on their own way.
    assert answer(supernode.client.RegisterNode, RegisterNodeFleetRequest(public_key=supernode.key))[0] >= 400
    assert answer(supernode.client.UnregisterNode, UnregisterNodeFleetRequest(node_id=node.node_id))[0] >= 400
    # And no other's messages are handed to it.
    supernode.node = Node(node_id=node.node_id)
    assert supernode.pull() == 401
    assert edge_server.statuses() == {"cu-0": "registered", "cu-1": "online"}
    # The server's own machine can do all that.
    assert admin.StartRun(start).run_id
    assert len(admin.ListRuns(ListRunsRequest()).run_dict) == 1


@pytest.mark.slow
def test_a_revoked_control_unit_is_refused_and_the_others_stay(edge_server, tmp_path):
    edge_server.align()
    other, taken_over = map(edge_server.supernode, edge_server.units)
    key = (edge_server.files.supernodes / "cu-1.pub").read_bytes()
    assert taken_over.activate() == taken_over.pull() == other.activate() == 200
    revocation.revoke(edge_server.certs, 1)
    assert edge_server.align() == ["cu-1 may no longer connect", "cu-0 may connect, as before"]
    assert taken_over.pull() == 401 and taken_over.activate() >= 400
    assert other.pull() == 200
    # Its own key comes back neither by an older copy of the folder nor by a hand that puts it there.
    (edge_server.files.supernodes / "cu-1.pub").write_bytes(key)
    assert edge_server.align() == ["cu-0 may connect, as before"]
    edge_server.files.revoked_keys.unlink()
    with pytest.raises(ValueError, match="cu-1: the SuperLink does not take its key"):
        edge_server.align()
    # The cluster has another identity.
    (edge_server.files.supernodes / "cu-1.pub").unlink()
    again = joined_by_files(edge_server.certs, tmp_path / "again", cluster=1, control_unit=True)
    assert edge_server.align() == ["cu-0 may connect, as before", "cu-1 may connect"]
    assert edge_server.supernode(again.folder.files).activate() == 200
    assert taken_over.activate() >= 400


@pytest.mark.slow
def test_a_key_that_is_missing_in_the_folder_may_no_longer_connect(edge_server):
    edge_server.align()
    (edge_server.files.supernodes / "cu-0.pub").unlink()
    assert edge_server.align() == ["cu-0 may no longer connect", "cu-1 may connect, as before"]
    assert edge_server.statuses() == {"cu-0": "unregistered", "cu-1": "registered"}
