"""A control unit's veto: which app bundles it runs, and what it says of others."""

import contextlib
import hashlib
import io
import resource
import time
import zipfile
from multiprocessing import get_context

import httpx
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.error.base import ApiErrorCode
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run

from flower_app.deployment.app_digest import app_digest, release_digest
from flower_app.deployment.bell import Bell
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.supernode_program import Veto, admitted, vetoed
from flower_app.launch.app_folder import assemble_app


def bundle(files, compression=zipfile.ZIP_DEFLATED, level=None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression, compresslevel=level) as archive:
        for name, text in files:
            archive.writestr(zipfile.ZipInfo(name), text, compression)
    return buffer.getvalue()


@pytest.mark.slow
def test_the_digest_is_of_what_the_app_is_made_of_however_it_is_packed(tmp_path):
    app = assemble_app(tmp_path / "app")
    assert app_digest(build_fab_from_disk(app)) == release_digest()
    files = [("a.py", "print()"), ("b/c.py", "1" * 1000)]
    packed = bundle(files)
    assert app_digest(packed) == app_digest(bundle(files[::-1])) == app_digest(bundle(files, zipfile.ZIP_STORED))
    with (app / "flower_app" / "client_app.py").open("a") as file:
        file.write("# one more line\n")
    assert app_digest(build_fab_from_disk(app)) != release_digest()
    # Names and contents cannot be shifted into each other.
    assert app_digest(bundle([("ab", "c")])) != app_digest(bundle([("a", "bc")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_bundle_that_can_be_read_in_two_ways_is_refused():
    with pytest.raises(ValueError, match="app bundle: expected each file once"):
        app_digest(bundle([("a.py", "good"), ("a.py", "bad")]))
    for junk in (b"", b"junk", bundle([("a.py", "x" * 100)])[:-10]):
        with pytest.raises(ValueError, match="app bundle: expected a zip archive"):
            app_digest(junk)


def _within_half_a_gigabyte(data, answers):
    resource.setrlimit(resource.RLIMIT_AS, (512 * 2**20, 512 * 2**20))
    try:
        answers.put(app_digest(data))
    except (ValueError, MemoryError) as error:
        answers.put(repr(error))


@pytest.mark.slow
def test_a_bundle_that_unpacks_to_more_than_it_may_is_not_unpacked():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("zeros.py", "w") as file:
        for _ in range(256):
            file.write(bytes(2**20))
    context = get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_within_half_a_gigabyte, args=(buffer.getvalue(), answers))
    child.start()
    answer = answers.get(timeout=120)
    child.join(60)
    assert "expected at most 67108864 bytes unpacked, found 268435456" in answer


class Server:
    """The server's side of Flower's connection, with an answer for each run."""

    def __init__(self, apps, kind=TaskType.CLIENT_APP):
        self.apps, self.kind, self.sent, self.confirmed = apps, kind, [], []
        self.queue = []

    def order(self, run_id):
        metadata = Metadata(run_id, f"order {run_id}", 1, 5, "", "", time.time(), 3600.0, "query")
        self.queue.append((make_message(metadata, RecordDict({"config": ConfigRecord({"a": 1})})), "tree"))

    def get_run(self, run_id):
        run = Run.create_empty(run_id)
        run.fab_hash = hashlib.sha256(self.apps[run_id][0]).hexdigest()
        run.primary_task_type = self.kind
        return run

    def get_fab(self, fab_hash, run_id):
        given = self.apps[run_id]
        return Fab(fab_hash, given.pop(0) if len(given) > 1 else given[0], {})

    @contextlib.contextmanager
    def connection(self):
        def send(message, tree, duration):
            self.sent.append(message)
            return set(), "session"

        receive = lambda: self.queue.pop(0) if self.queue else None  # noqa: E731
        confirm = lambda run_id, message_id: self.confirmed.append((run_id, message_id))  # noqa: E731
        yield 5, receive, send, self.get_run, self.get_fab, lambda run_id, piece: piece.encode(), None, confirm


GOOD, ALLOWED, BAD = (bundle([("client.py", name)]) for name in ("good", "allowed", "bad"))
VETO = {"release": app_digest(GOOD), "allowed": frozenset({app_digest(ALLOWED)})}


@pytest.fixture
def sleeps(monkeypatch):
    """How long was slept, with nothing that takes so long."""
    slept = []
    monkeypatch.setattr("flower_app.deployment.supernode_program.time.sleep", slept.append)
    return slept


def test_a_control_unit_looks_for_its_order_twice_a_second_and_leaves_flower_its_turn(sleeps):
    """Flower alone looks every three seconds: a round began one and a half seconds late, on average."""
    server = Server({1: [GOOD]})
    server.queue = [None, None]
    server.order(1)
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, *_):
        assert receive()[0].metadata.run_id == 1 and sleeps == [0.5, 0.5]
        sleeps.clear()
        assert receive() is None and sum(sleeps) == 30.0


def test_a_control_unit_without_an_order_for_a_minute_looks_every_two_seconds(sleeps, monkeypatch):
    # The clock goes by what is slept, beyond what was taken out of the list.
    before = [0.0]
    monkeypatch.setattr("flower_app.deployment.supernode_program.time.monotonic", lambda: before[0] + sum(sleeps))
    server = Server({1: [GOOD]})
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, *_):
        for _ in range(3):
            assert receive() is None
        assert sleeps == 120 * [0.5] + 60 * [2.0]
        before[0] = sum(sleeps)
        sleeps.clear()
        server.order(1)
        assert receive() is not None and receive() is None
        assert sleeps == 60 * [0.5]


def refused(code):
    """What Flower's client raises when the SuperLink answers with an error of its own."""
    request = httpx.Request("POST", "https://server/v1/fleet/activate-node")
    answer = httpx.Response(409, json={"code": code, "detail": "no"} if code else None, request=request)
    return httpx.HTTPStatusError("409", request=request, response=answer)


def test_a_supernode_whose_predecessor_has_died_waits_until_the_superlink_admits_it(sleeps):
    answers = [refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)] * 3 + ["node 7"]

    def activate(client, request):
        assert (client, request) == ("client", "request")
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    assert admitted(activate)("client", "request") == "node 7"
    assert sleeps == 3 * [2.0]


@pytest.mark.parametrize(
    "error",
    [refused(2001), refused(None), httpx.ConnectError("nobody"), ValueError("another")],
    ids=["another refusal", "no words", "nobody there", "another error"],
)
def test_a_supernode_that_is_refused_otherwise_ends_as_flowers_does(error, sleeps):
    def activate(client, request):
        raise error

    with pytest.raises(type(error)) as raised:
        admitted(activate)(None, None)
    assert raised.value is error and sleeps == []


def test_a_supernode_does_not_wait_to_be_admitted_for_ever(sleeps, monkeypatch):
    monkeypatch.setattr("flower_app.deployment.supernode_program.time.monotonic", iter(range(0, 1000, 30)).__next__)

    def activate(client, request):
        raise refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)

    with pytest.raises(httpx.HTTPStatusError):
        admitted(activate)(None, None)
    assert len(sleeps) == 3


def test_orders_of_an_app_that_is_not_allowed_are_answered_with_an_error_and_the_others_handed_on(sleeps):
    server = Server({1: [GOOD], 2: [BAD], 3: [ALLOWED]})
    for run_id in (2, 1, 2, 3):
        server.order(run_id)
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, _, _, get_fab, *_):
        received = [receive() for _ in range(5)]
        assert [one and one[0].metadata.run_id for one in received] == [None, 1, None, 3, None]
        assert get_fab("", 3).content == ALLOWED
    assert [message.error.code for message in server.sent] == [ErrorCode.INVALID_FAB] * 2
    reason = server.sent[0].error.reason
    assert app_digest(BAD) in reason and "--allow-app" in reason and app_digest(GOOD) in reason
    assert {message.metadata.reply_to_message_id for message in server.sent} == {"order 2"}
    assert server.confirmed == [(2, "order 2")] * 2


def test_work_is_announced_once_when_the_first_piece_of_an_allowed_order_is_fetched(sleeps):
    server, bell = Server({1: [GOOD], 2: [BAD]}), Bell()
    for run_id in (2, 1, 1):
        server.order(run_id)
    with vetoed(server.connection(), Veto(**VETO), bell) as (_, receive, _, _, _, pull_object, *_):
        assert receive() is None and not bell.wait(0.0)
        for _ in range(2):
            assert receive() is not None and not bell.wait(0.0)
            assert pull_object(1, "a") == b"a" and bell.wait(0.0)
            assert pull_object(1, "b") == b"b" and not bell.wait(0.0)


def test_a_server_that_shows_one_app_and_sends_another_runs_neither():
    # First the good one, then the other under its hash: what was looked at is what runs here.
    server = Server({1: [GOOD, BAD, BAD]})
    server.order(1)
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, _, _, get_fab, *_):
        assert receive() is not None and get_fab("", 1).content == GOOD
    server = Server({1: [BAD]})
    run = server.get_run(1)
    run.fab_hash = hashlib.sha256(GOOD).hexdigest()
    server.get_run = lambda run_id: run
    server.order(1)
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, *_):
        assert receive() is None
    assert "sent an app other than the run's" in server.sent[0].error.reason


def test_a_control_unit_runs_no_agents():
    server = Server({1: [GOOD]}, TaskType.AGENT_APP)
    server.order(1)
    with vetoed(server.connection(), Veto(**VETO), Bell()) as (_, receive, *_):
        assert receive() is None
    assert "runs only client apps" in server.sent[0].error.reason


def test_an_allowed_app_is_named_by_its_digest(tmp_path):
    options = {"cluster": 0, "host": "127.0.0.1", "server": "127.0.0.1", "certs": None, "state": tmp_path}
    for wrong in ("abc", "g" * 64, "../" + "a" * 61):
        with pytest.raises(ValueError, match="--allow-app: expected a digest of 64 hexadecimal digits"):
            ControlUnitBox(**options, allowed_apps=[wrong])
