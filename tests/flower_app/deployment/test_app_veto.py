"""A control unit's veto: which app bundles reach its SuperNode, and what its log says of others."""

import hashlib
import io
import resource
import zipfile
from multiprocessing import get_context

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_from_proto, fab_to_proto
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import _try_obtain_trusted_entities, _validate_public_keys_ed25519
from flwr.supernode.start_client_internal import _verify_fab

from flower_app.deployment.app_digest import app_digest, release_digest
from flower_app.deployment.app_proxy import GET_APP, KEY_ID, AppProxy, write_credentials
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.deployment.reverse_proxy import Bounds
from flower_app.launch.app_folder import assemble_app
from helpers.proxies import HOST, Behind, Credentials, RunningProxy, status_of


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


def test_the_files_of_a_bundle_are_bounded_together(monkeypatch):
    monkeypatch.setattr("flower_app.deployment.app_digest.MAX_UNPACKED_BYTES", 150)
    assert app_digest(bundle([("a.py", "x" * 100)]))
    with pytest.raises(ValueError, match="app bundle: expected at most 150 bytes unpacked, found 200"):
        app_digest(bundle([("a.py", "x" * 100), ("b.py", "x" * 100)]))


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
    child.join(120)
    assert "expected at most 67108864 bytes unpacked, found 268435456" in answer


GOOD, ALLOWED, BAD = (bundle([("client.py", name)]) for name in ("good", "allowed", "bad"))


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    """Files of a proxy, as a control unit makes them at each start."""
    return write_credentials(tmp_path_factory.mktemp("proxy"), HOST)


@pytest.fixture
def server(tmp_path, trusted):
    """A server that sends ``app``, and a control unit's proxy before it."""
    credentials = Credentials(tmp_path)
    behind = Behind(credentials)
    key = ed25519.Ed25519PrivateKey.from_private_bytes(trusted.signing_key.read_bytes())
    digests = [app_digest(GOOD), app_digest(ALLOWED)]
    proxy = RunningProxy(lambda **options: AppProxy(digests, key, **options), behind.port, credentials, Bounds())

    def app_of(content, status=200, **verifications):
        fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, verifications))
        behind.answers[GET_APP] = (status, GetFabResponse(fab=fab).SerializeToString())
        answer = proxy.ask(f"POST {GET_APP} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".encode())
        body = answer.partition(b"\r\n\r\n")[2]
        return status_of(answer), fab_from_proto(GetFabResponse.FromString(body).fab) if b" 200 " in answer else body

    app_of.behind, app_of.proxy = behind, proxy
    yield app_of
    proxy.close()
    behind.close()


def is_taken(fab, trusted):
    """Tell whether Flower's SuperNode takes an app, started as a control unit starts it."""
    entities = _try_obtain_trusted_entities(trusted.trusted)
    _validate_public_keys_ed25519(entities)
    return bool(fab.verifications.get("valid_license")) and _verify_fab(fab, entities)


def test_flowers_supernode_takes_the_apps_that_may_run_and_receives_no_file_of_another(server, trusted):
    for content in (GOOD, ALLOWED, GOOD):
        status, fab = server(content)
        assert (status, fab.content, is_taken(fab, trusted)) == (200, content, True)
    status, fab = server(BAD)
    assert (status, fab.content, is_taken(fab, trusted)) == (200, b"", False)
    (line,) = server.proxy.said
    assert app_digest(BAD) in line and "--allow-app" in line and app_digest(GOOD) in line


def test_a_server_can_neither_sign_an_app_nor_use_another_ones_signature(server, trusted):
    _, good = server(GOOD)
    _, fab = server(BAD, **good.verifications)
    assert not is_taken(fab, trusted)
    assert not _verify_fab(Fab(good.hash_str, BAD, good.verifications), _try_obtain_trusted_entities(trusted.trusted))
    # Nor does it name the app that is looked at.
    _, fab = server(GOOD, **{KEY_ID: "{}", "other": "no JSON"})
    assert set(fab.verifications) == {"valid_license", KEY_ID} and is_taken(fab, trusted)


def test_what_is_no_app_is_refused_and_errors_are_passed_on(server, trusted):
    for junk in (b"", b"junk", BAD[:-10]):
        status, fab = server(junk)
        assert (status, fab.content, is_taken(fab, trusted)) == (200, b"", False)
    assert server(GOOD, status=403)[0] == 403
    server.behind.answers[GET_APP] = (200, b"\xff\xff\xff")
    assert server.proxy.status(GET_APP) == 502
    # Two apps in one answer are read as Flower reads them: the last one's files count.
    two = [GetFabResponse(fab=fab_to_proto(Fab("", content, {}))).SerializeToString() for content in (GOOD, BAD)]
    server.behind.answers[GET_APP] = (200, b"".join(two))
    answer = server.proxy.ask(f"POST {GET_APP} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".encode())
    assert GOOD not in answer and BAD not in answer


def test_all_other_answers_of_the_server_are_passed_on_as_they_are(server):
    server.behind.answers["/v1/fleet/pull-object"] = (200, BAD)
    data = b"POST /v1/fleet/pull-object HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\nabc"
    assert server.proxy.ask(data).endswith(BAD) and server.behind.requests[-1][3] == 3


def test_an_allowed_app_is_named_by_its_digest(tmp_path):
    options = {"cluster": 0, "host": "127.0.0.1", "server": "127.0.0.1", "certs": None, "state": tmp_path}
    for wrong in ("abc", "g" * 64, "../" + "a" * 61):
        with pytest.raises(ValueError, match="--allow-app: expected a digest of 64 hexadecimal digits"):
            ControlUnitBox(**options, allowed_apps=[wrong])
