"""Files of frozen weights that a machine lacks: pulled from the service, whole or not at all, and nothing else is."""

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
import torch

from client_pipeline import durable
from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.link import weight_pull
from client_pipeline.link.address import SERVICE, WEIGHTS_METHOD, LinkCertificates
from client_pipeline.link.frame_limits import PULLED_BYTES
from client_pipeline.link.frames import encode
from client_pipeline.link.weight_pull import WeightPull, weights_here
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit import control_unit_actor
from client_pipeline.runtime.control_unit.round_order import ClusterSetup
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.weights.base_weights import BaseFile, BaseWeights
from helpers.decoder_cases import service_of
from helpers.tiny_models import tiny_spec
from strategies.decoder.limits import WRONG_HELLOS

SIZES = {"first.safetensors": 3 * PULLED_BYTES + 17, "second.safetensors": 100}
NUM_PIECES = 5


@pytest.fixture
def base(tmp_path):
    """Two files of a server's folder; what they hold nobody looks at."""
    folder = tmp_path / "server"
    folder.mkdir()
    files = []
    for seed, (name, size) in enumerate(SIZES.items()):
        content = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        (folder / name).write_bytes(content.numpy().tobytes())
        files.append(BaseFile(name, size, durable.file_digest(folder / name)))
    return BaseWeights(source=str(folder), files=tuple(files), places={})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(weight_pull, "_PATIENCE_S", 0.5)


@pytest.fixture
def elsewhere(base, tmp_path):
    """Values and cache of a node that lacks the server's folder."""
    return replace(base, source=str(tmp_path / "nowhere"), files=base.files), tmp_path / "node" / "weights"


class Pieces:
    """Counts what is asked of a service, and may change what happens then."""

    def __init__(self, service, instead=lambda number, context, answer: answer()):
        self.asked = []
        self._piece, self._instead = service._weights.piece, instead
        service._weights.piece = self

    def __call__(self, data, context):
        self.asked.append(data)
        return self._instead(len(self.asked), context, lambda: self._piece(data, context))


@contextmanager
def serving(base, instead=lambda number, context, answer: answer(), nodes=1):
    """A service that nodes may pull from; yields what each is told, and what was asked."""
    with service_of(base=base) as service:
        pieces = Pieces(service, instead)
        with service.pulls(nodes) as addresses:
            yield addresses, pieces


def pulled(base_here, cache, address):
    return weights_here(base_here, cache, address)


def assert_complete(base, cached, cache):
    assert cached.source == str(cache)
    assert [(cache / file.name).name for file in cached.files] == [f"{file.sha256}.safetensors" for file in base.files]
    for file, original in zip(cached.files, base.files, strict=True):
        assert (cache / file.name).read_bytes() == (base.folder / original.name).read_bytes()
    assert sorted(path.suffix for path in cache.iterdir()) == [".safetensors"] * 2


def test_what_is_missing_comes_in_pieces_once_and_what_is_there_is_not_asked_for(base, elsewhere, tmp_path):
    base_here, cache = elsewhere
    with serving(base) as ((address,), pieces):
        assert pulled(base, cache, address) == base.check()
        assert not pieces.asked and not cache.exists()
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == NUM_PIECES
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == NUM_PIECES
    # A control unit that starts again has no address any more, and needs none.
    assert_complete(base, pulled(base_here, cache, None), cache)


def test_without_a_service_the_folder_that_was_expected_is_named(elsewhere):
    base_here, cache = elsewhere
    for folder in (cache, None):
        with pytest.raises(ValueError, match=r"nowhere is no folder.*expected first.safetensors of 3145745 bytes"):
            pulled(base_here, folder, None)


def test_a_pull_goes_on_behind_a_cut(base, elsewhere):
    base_here, cache = elsewhere
    cuts = {2, 3}

    def cut(number, context, answer):
        if number in cuts:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        return answer()

    with serving(base, cut) as ((address,), pieces):
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == NUM_PIECES + len(cuts)


def test_a_pull_goes_on_where_a_service_that_was_lost_left_it(base, elsewhere):
    base_here, cache = elsewhere
    with service_of(base=base) as service, service.pulls(1) as (address,):
        Pieces(service, lambda number, context, answer: answer() if number < 3 else service.stop())
        with pytest.raises(
            ValueError, match=r"2097152 of 3145745 bytes are here, then unavailable.*goes on from there"
        ):
            pulled(base_here, cache, address)
    (partial,) = cache.iterdir()
    assert partial.stat().st_size == 2 * PULLED_BYTES
    with serving(base) as ((address,), pieces):
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == NUM_PIECES - 2


def test_a_file_that_is_not_what_the_set_up_said_is_refused_and_not_kept(base, elsewhere):
    base_here, cache = elsewhere
    file = base.folder / "first.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with serving(base) as ((address,), _):
        with pytest.raises(
            ValueError, match=rf"have SHA-256 .*expected {base.files[0].sha256[:14]}.*has changed since"
        ):
            pulled(base_here, cache, address)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("held_bytes", "is_right", "num_asked"),
    [(PULLED_BYTES, True, NUM_PIECES - 1), (PULLED_BYTES, False, 3 + 4 + 1), (4 * PULLED_BYTES, False, NUM_PIECES)],
)
def test_what_a_failed_machine_has_left_is_used_if_it_is_of_the_file(base, elsewhere, held_bytes, is_right, num_asked):
    """A start that is wrong is seen by the digest of the whole, and all comes once more; too many bytes are dropped."""
    base_here, cache = elsewhere
    cache.mkdir(parents=True)
    content = (base.folder / "first.safetensors").read_bytes()[:held_bytes]
    partial = cache / f"{base.files[0].sha256}.partial"
    partial.write_bytes(content if is_right else bytes(held_bytes))
    with serving(base) as ((address,), pieces):
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == num_asked
        with WeightPull(address, LinkCertificates()) as pull:
            first = base.files[0]._replace(name=f"{base.files[0].sha256}.safetensors")
            assert pull.complete(cache, first) == cache / first.name
        assert len(pieces.asked) == num_asked


class FullDisk(durable.Disk):
    """Has room for so many bytes."""

    def __init__(self, room):
        self.room = room

    def append(self, path, data):
        super().append(path, data[: self.room])
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_disk_that_becomes_full_is_named_and_the_pull_goes_on_when_there_is_room(base, elsewhere, monkeypatch):
    base_here, cache = elsewhere
    with serving(base) as ((address,), pieces):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "disk", FullDisk(PULLED_BYTES + 1000))
            with pytest.raises(ValueError, match=r"the disk of .*weights is full: 1049576 of 3145745 .*No space left"):
                pulled(base_here, cache, address)
        assert_complete(base, pulled(base_here, cache, address), cache)
        assert len(pieces.asked) == NUM_PIECES


def test_the_folder_of_another_model_is_refused_and_not_pulled_over(base, elsewhere, tmp_path):
    base_here, cache = elsewhere
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"another model")
    with serving(base) as ((address,), pieces):
        with pytest.raises(ValueError, match=r"other/first.safetensors is not there.*collapipe join --model FOLDER"):
            pulled(replace(base_here, source=str(other)), cache, address)
        for name in SIZES:
            (other / name).write_bytes(b"another model")
        with pytest.raises(ValueError, match=r"other/first.safetensors on .* has 13 bytes with SHA-256 of other bytes"):
            pulled(replace(base_here, source=str(other)), cache, address)
        assert not pieces.asked


# A hostile server.


@contextmanager
def answering(answer, address):
    """A service of one's own that answers every request alike; yields the address with its port."""

    def handler(_):
        return grpc.unary_unary_rpc_method_handler(lambda data, context: answer, None, None)

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = grpc.method_handlers_generic_handler(SERVICE, {WEIGHTS_METHOD: handler(None)})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield replace(address, target=f"127.0.0.1:{port}")
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "expected 1048576 bytes at 0, found 0"),
        (b"\x00" * (PULLED_BYTES - 1), "expected 1048576 bytes at 0, found 1048575"),
        (b"\x00" * (PULLED_BYTES + 1), "expected 1048576 bytes at 0, found 1048577"),
        (b"\x00" * (8 * PULLED_BYTES), "0 of 3145745 bytes are here, then resource exhausted"),
    ],
)
def test_a_server_that_sends_more_or_less_than_was_asked_for_leaves_nothing(base, elsewhere, answer, message):
    base_here, cache = elsewhere
    with serving(base) as ((address,), _), answering(answer, address) as hostile:
        with pytest.raises(ValueError, match=message):
            pulled(base_here, cache, hostile)
    assert list(cache.iterdir()) == []


# A hostile client.


def asked(address, data=None, **changes):
    """Ask for a piece with bytes of one's own; returns the answer, or the code that it ends with."""
    header = {"kind": "pull", "token": address.token, "node": address.cluster, "offset": 0, "size": 10}
    data = encode(header | changes) if data is None else data
    with grpc.insecure_channel(address.target) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{WEIGHTS_METHOD}", request_serializer=None, response_deserializer=None)
        try:
            return call(data, timeout=120)
        except grpc.RpcError as error:
            return error.code().name


def test_a_node_gets_the_runs_files_with_its_own_token_until_round_1(base):
    digest = base.files[0].sha256
    with serving(base, nodes=2) as ((first, second), _):
        assert len(asked(first, sha256=digest)) == 10
        assert asked(first, sha256=digest, token="x") == "UNAUTHENTICATED"
        assert asked(first, sha256=digest, token=second.token) == "UNAUTHENTICATED"
        assert asked(first, sha256=digest, node=7) == "UNAUTHENTICATED"
    with service_of(base=base) as service:
        with service.pulls(1) as (address,):
            assert len(asked(address, sha256=digest)) == 10
        assert asked(address, sha256=digest) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "/etc/passwd"},
        {"sha256": "first.safetensors"},
        {"sha256": "0" * 64},
        {"offset": SIZES["first.safetensors"]},
        {"offset": SIZES["first.safetensors"] - 9},
        {"offset": 2**63 - 1},
        {"offset": -1},
        {"size": PULLED_BYTES + 1},
        {"size": 0},
        {"size": 2**40},
        {"path": "/etc/passwd"},
        {"data": b"\x00" * 100},
        {"data": b"\x00" * 10_000},
        {"data": encode({"kind": "bye"})},
    ],
)
def test_nothing_but_pieces_of_the_runs_files_is_given_out(base, changes):
    with serving(base) as ((address,), _):
        header = {"kind": "pull", "token": address.token, "node": 0, "offset": 0, "size": 10}
        header |= {"sha256": base.files[0].sha256}
        data = changes.get("data") or forged(header | changes)
        assert asked(address, data) == "INVALID_ARGUMENT"


def forged(header):
    """A frame whose header nobody has checked."""
    text = json.dumps({"__metadata__": {"header": json.dumps(header)}}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def test_a_node_that_pulls_without_end_and_a_peer_that_guesses_are_refused(base):
    second = base.files[1]
    small = replace(base, files=(second,))
    with serving(small, nodes=2) as ((greedy, other), _):
        codes = [asked(greedy, sha256=second.sha256, size=100) for _ in range(3)]
        assert [len(code) for code in codes[:2]] == [100, 100] and codes[2] == "RESOURCE_EXHAUSTED"
        assert len(asked(other, sha256=second.sha256)) == 10
        codes = [asked(other, sha256=second.sha256, token="x") for _ in range(WRONG_HELLOS + 20)]
        assert codes[0] == "UNAUTHENTICATED" and "RESOURCE_EXHAUSTED" in codes


# What a control unit makes of it.


def test_a_control_unit_without_the_folder_has_the_parts_that_it_would_have_with_it(tmp_path):
    model = tmp_path / "model"
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    build_parts(spec, seed=3).reference.save_pretrained(model, max_shard_size="8KB")
    _, weights = load_pretrained_weights(str(model), "causal-lm", server_layers=spec.config.get("server_layers", 0))
    base = weights.base
    with serving(base) as ((address,), _):
        setup = ClusterSetup(
            run="r",
            cluster=0,
            spec=spec,
            optimizer=OptimizerConfig(),
            runtime=RuntimeConfig(),
            seed=0,
            batch_size=1,
            local_steps=1,
            load_data=list,
            base=base.to_json(),
            base_source=str(tmp_path / "nowhere"),
            weight_cache=tmp_path / "cache",
            pull_from=address,
            certificates=LinkCertificates(),
        )
        cached = control_unit_actor._base_of(setup)
    assert len(cached.files) > 3 and cached.source == str(tmp_path / "cache")
    for name, value in base.items():
        assert torch.equal(cached[name], value)
    part = cached.part("blocks.1.")
    assert len(part) == 9 and all(torch.equal(part[name], value) for name, value in base.part("blocks.1.").items())


def test_a_pull_is_bound_to_this_machines_certificates(base):
    with serving(base) as ((address,), _):
        with pytest.raises(ValueError, match="this control unit has certificates, but the order says no TLS"):
            WeightPull(address, LinkCertificates(certificate="cu.pem", key="cu.key"))
