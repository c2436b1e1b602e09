"""An edge server that boxes can join by a code, and boxes, within a test's own process."""

import base64
import contextlib
import json
import socket
import ssl
import threading

from client_pipeline.link.hosts import HostPort
from flower_app.deployment.certificate_authority import read_certificate
from flower_app.joining.approval import approve_box, approve_file
from flower_app.joining.edge_joining import EdgeJoining, invite
from flower_app.joining.join_code import JoinCode
from flower_app.joining.join_desk import JoinDesk
from flower_app.joining.join_folder import JoinFolder
from flower_app.joining.join_service import JoinService
from flower_app.joining.joined_box import JoiningBox
from flower_app.joining.newcomer import REQUEST, BoxFolder, Wish, join_deployment
from helpers.patience import eventually

HOST = "127.0.0.1"


def edge_folder(root, name=HOST, **options):
    """The folder of an edge server that boxes can join, none of whose programs runs."""
    EdgeJoining(name=name, root=root, **options).prepare()
    return JoinFolder(root)


def joined_by_files(root, state, host=HOST, **options):
    """A box that has joined an edge server's folder without a network; a control unit unless it has a cluster."""
    if "cluster" not in options:
        options["control_unit"] = True
    invitation = state / "box.invite"
    state.mkdir(parents=True)
    invitation.write_text(str(invite(JoinFolder(root))[0]))
    box = JoiningBox(code=str(invitation), state=state, host=host, **options)
    assert box.join(lambda _: None) == {}
    approve_file(JoinFolder(root), invitation.with_suffix(REQUEST))
    box.join(lambda _: None)
    return box


class EdgeServerStandIn:
    """The service of ``collapipe up edge-server --name``, real TLS on a free port of the loopback."""

    def __init__(self, root, name=HOST):
        joining = EdgeJoining(name=name, root=root)
        joining.prepare()
        self.root, self.folder, self.words = root, joining.folder, []
        self.desk = JoinDesk(self.folder, self.words.append)
        self.service = JoinService(self.desk, self.folder, HostPort(HOST, 0))
        self.address = HostPort(HOST, self.service.port)
        threading.Thread(target=self.service.serve, daemon=True).start()

    def code(self, minutes=60.0):
        """A code that nobody has used."""
        code = JoinCode.new(self.address, read_certificate(self.folder.authority.certificate))
        self.folder.invite(code, minutes)
        return code

    def ask(self, question, source=HOST):
        """Send one line as a client of ours would, and return the answer; None where the connection ends."""
        return say_line(self.address, json.dumps(question).encode() + b"\n", source)

    def desk_error(self, question):
        """Return the error of a question that is answered without a network."""
        try:
            return f"answered: {self.desk.answer(json.dumps(question).encode())}"
        except ValueError as error:
            return str(error)


@contextlib.contextmanager
def edge_server(root, name=HOST):
    server = EdgeServerStandIn(root, name)
    try:
        yield server
    finally:
        server.service.close()


def say_line(address, line, source=HOST, timeout_s=30):
    """Send bytes under TLS to whoever is there, and return the JSON that comes back; None if nothing does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), timeout_s, (source, 0)) as raw:
            with context.wrap_socket(raw) as tls:
                tls.sendall(line)
                data = b""
                if not line.endswith(b"\n"):
                    # Who sends half a line and goes is not waited for.
                    return None
                while not data.endswith(b"\n") and (piece := tls.recv(4096)):
                    data += piece
    except (ConnectionError, ssl.SSLError):
        return None
    return json.loads(data) if data else None


def question_of(code, request, claim):
    """The question that a box asks."""
    encoded = {"token": base64.b64encode(code.token).decode(), "claim": base64.b64encode(claim).decode()}
    return {"ask": "join", "request": request.to_fields(), **encoded}


def wish(kind="control-unit", cluster=-1, devices=(), host="10.0.0.2", ray_port=6379):
    return Wish(kind=kind, cluster=cluster, devices=tuple(devices), host=host, ray_port=ray_port)


class JoiningThread:
    """A box that asks, on a thread of its own."""

    def __init__(self, folder, code, wanted, wait_s=60.0):
        self.folder, self.words = BoxFolder(folder), []
        self.box, self.error = None, None
        self._arguments = (self.folder, code, wanted, wait_s, self.words.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.box = join_deployment(*self._arguments)
        except Exception as error:
            self.error = error

    def done(self, timeout_s=60):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self


def waiting(server, number=1):
    """Return the boxes that wait for an approval, once there are ``number``."""

    def boxes():
        return [box for box in server.folder.boxes() if box.status == "waiting"]

    eventually(lambda: len(boxes()) >= number)
    return boxes()


def control_units(root, number=1, host=HOST):
    """Files of control units that have joined a new edge server's folder, cluster by cluster."""
    edge_folder(root, host)
    states = [root.parent / f"box-{cluster}" for cluster in range(number)]
    boxes = [joined_by_files(root, state, host, control_unit=True, cluster=n) for n, state in enumerate(states)]
    return [box.folder.files for box in boxes]


def joined(server, folder, wanted):
    """A box that has asked the edge server, and was let in."""
    thread = JoiningThread(folder, server.code(), wanted)
    (box,) = waiting(server)
    approve_box(server.folder, box.box_id)
    assert thread.done().error is None, thread.error
    return thread
