"""Whatever is sent to the decoder's service: no crash, nobody wrongly admitted, nothing learned, and it still serves.

Thousands of inputs that hypothesis draws go to the code that reads frames, and through real streams to a running
service; twenty thousand more are good streams with something made wrong, in a process of little memory
(``benchmarks/fuzz.py``). What each answer has to be follows from how the input was made, not from the code under test.
"""

import json
import subprocess
import sys
import threading
from collections import Counter

import grpc
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.frame_limits import MAX_HEADER_BYTES
from client_pipeline.link.frames import PROTOCOL_VERSION, Frame, FrameError, decode, encode
from helpers.decoder_cases import batch_of, first_frame, service_of, train_round
from helpers.patience import eventually
from helpers.repository import ROOT
from strategies.decoder.limits import HelloGuard

DECODED, HELLOS, STREAMED = 1_500, 500, 300
COUNTED = Counter()
"""Inputs that were really tried, by kind."""

KINDS = (
    "hello tied micro_batch step_end bye welcome gradient tied_gradient step_applied goodbye __proto__ pickle".split()
)
FIELDS = (
    "version token round cluster codec step name start micro_batch num_micro_batches weight total_weight seed scale "
    "decoder_sync loss_sum norm_sq path __metadata__ header".split()
)
NAMES = "hidden mask rows gradient target.labels target.ids target. /etc/passwd ../x __metadata__".split()
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Never UNKNOWN or INTERNAL: that is what an exception in the service looks like."""


def fuzz(number):
    """Settings of a test of exactly ``number`` inputs, the same ones on every run."""

    def decorate(test):
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
        chosen = settings(
            max_examples=number, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks
        )
        return seed(20_260_101)(chosen(test))

    return decorate


numbers = st.one_of(
    st.integers(-2, 5), st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([2**63 - 1, 2**63, 10**400, 1e308])
)
# All that UTF-8 can write: hypothesis would try each character of Unicode to find that it is all but surrogates.
characters = st.characters(exclude_categories=["Cs"])
texts = st.one_of(
    st.text(characters, max_size=12), st.sampled_from(["\ud800", "\x00", "none", "int8", "x" * 500, "%s%n", "\n[ERR]"])
)
values = st.one_of(
    numbers,
    texts,
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(texts, st.integers(), max_size=2),
)
headers = st.builds(
    lambda kind, rest: {"kind": kind, **rest},
    st.one_of(st.sampled_from(KINDS), values),
    st.dictionaries(st.one_of(st.sampled_from(FIELDS), texts), values, max_size=8),
)
entries = st.dictionaries(
    st.one_of(st.sampled_from(NAMES), texts),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(
                ["F32", "F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "C64", "F8_E4M3", "", "X"]
            ),
            "shape": st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**64)), max_size=10),
            "data_offsets": st.lists(st.one_of(st.integers(0, 64), st.integers(0, 2**64)), min_size=2, max_size=2),
        }
    ),
    max_size=4,
)


def blob(header, tensors=None, data=b"", size=None):
    """Bytes laid out as a safetensors blob, whatever is in them."""
    text = header if isinstance(header, str) else json.dumps(header)
    table = json.dumps({**(tensors or {}), "__metadata__": {"header": text}}).encode()
    return (len(table) if size is None else size).to_bytes(8, "little") + table + data


FIRST_ROUND = 1_000_000
"""Rounds have as many digits as this one, so that a frame keeps its length when it is made one of another round."""
VALID = [
    first_frame(round=FIRST_ROUND),
    encode({"kind": "step_end", "round": FIRST_ROUND, "step": 1, "scale": 0.5}),
    encode({"kind": "hello", "version": PROTOCOL_VERSION, "token": "t" * 43, "round": FIRST_ROUND, "cluster": 0}),
    encode(
        {"kind": "tied", "round": FIRST_ROUND, "step": 2, "name": "weight", "start": 0}, {"rows": torch.zeros(3, 8)}
    ),
    encode({"kind": "bye"}),
]


@st.composite
def mutated(draw, sources=tuple(VALID)):
    """A good frame with some of its bytes changed, cut out, doubled or put in."""
    data = bytearray(draw(st.sampled_from(sources)))
    for _ in range(draw(st.integers(1, 4))):
        # Most of what is interesting is in the lengths and the header, at the beginning.
        most = max(min(len(data), draw(st.sampled_from([8, 64, 600, 10_000]))) - 1, 0)
        place, kind = draw(st.integers(0, most)), draw(st.integers(0, 3))
        if kind == 0 and data:
            data[place] = draw(st.integers(0, 255))
        elif kind == 1:
            del data[place : place + draw(st.integers(1, 40))]
        elif kind == 2:
            data[place:place] = data[place : place + draw(st.integers(1, 40))]
        else:
            data[place:place] = draw(st.binary(min_size=1, max_size=12))
    return bytes(data)


frames = st.one_of(
    st.binary(max_size=300),
    mutated(),
    st.builds(blob, headers),
    st.builds(blob, headers, entries, st.binary(max_size=64)),
    st.builds(blob, texts, entries, st.binary(max_size=16)),
    st.builds(blob, headers, entries, st.just(b""), st.one_of(st.integers(0, 99), st.integers(0, 2**64 - 1))),
)


def in_its_own_words(data):
    """Header and sizes of a blob as a second reader sees them, with the standard library alone."""
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    header = json.loads(table.pop("__metadata__")["header"])
    return header, {name: entry["shape"] for name, entry in table.items()}


@fuzz(DECODED)
@given(frames)
def check_decoding(data):
    COUNTED["decoded"] += 1
    try:
        frame = decode(data, 2**20)
    except FrameError as error:
        assert str(error)
        return
    # What is taken is what is written there, and can be written again.
    assert isinstance(frame, Frame)
    header, shapes = in_its_own_words(data)
    assert frame.header == header and len(data) <= 2**20 and int.from_bytes(data[:8], "little") <= MAX_HEADER_BYTES
    assert {name: list(tensor.shape) for name, tensor in frame.tensors.items()} == shapes
    again = decode(encode(frame.header, frame.tensors), 2**21)
    assert again.header == frame.header and again.tensors.keys() == frame.tensors.keys()


@pytest.mark.slow
def test_bytes_are_a_frame_or_are_refused_with_a_reason():
    check_decoding()
    assert COUNTED["decoded"] >= DECODED


class Running:
    """A service, a channel to it, and the right tokens of its round."""

    def __init__(self, service, channel):
        self.service, self.round = service, FIRST_ROUND
        self.exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.open()

    def open(self):
        self.round += 1
        addresses = self.service.open_round(self.round, [0, 1], 2)
        self.tokens = [addresses[cluster].token for cluster in (0, 1)]

    def send(self, *sent):
        """Answers of one stream, its status, its details; frames of the first round become this round's."""
        fitting = [data.replace(b"%d" % FIRST_ROUND, b"%d" % self.round) for data in sent]
        call, answers = self.exchange(iter(fitting), timeout=120), []
        try:
            answers.extend(call)
        except grpc.RpcError as error:
            return answers, error.code(), error.details()
        return answers, grpc.StatusCode.OK, ""

    def hello(self, **change):
        header = {
            "version": PROTOCOL_VERSION,
            "token": self.tokens[0],
            "round": self.round,
            "cluster": 0,
            "codec": "none",
        }
        return {"kind": "hello", **header, **change}


@pytest.fixture
def running(monkeypatch):
    with service_of(num_clusters=2, sync="round", max_frame_bytes=2**20) as service:
        # Thousands of wrong hellos from one peer are what is tried here; the limit has tests of its own.
        monkeypatch.setattr("strategies.decoder.limits.WRONG_HELLOS", 10**9)
        service.reception.hellos = HelloGuard(4)
        before = {name: p.detach().clone() for name, p in service.trainer.copies.shared.parameters.items()}
        with grpc.insecure_channel(service.advertised) as channel:
            running = Running(service, channel)
            yield running
            after = service.finish_round().head
            assert all(torch.equal(after[name], value) for name, value in before.items()), "something was learned"
            assert_no_stream_is_left(service)
            # Two clusters train a whole round as if nothing had been.
            addresses = service.open_round(running.round + 1, [0, 1], 1)
            for cluster in (0, 1):
                train_round(addresses[cluster], [batch_of(cluster, 3)])
            summary = service.finish_round()
            assert [s.steps for s in summary.clusters.values()] == [1, 1]
            assert not all(torch.equal(summary.head[name], value) for name, value in before.items())


def assert_no_stream_is_left(service):
    eventually(lambda: not service.reception.num_streams and not service.hellos.num_waiting)
    assert not +service.reception._served, "a thread is still counted"
    assert sum(thread.name.startswith("decoder_") for thread in threading.enumerate()) <= service.reception.most_streams


NEAR = st.sampled_from(
    [
        lambda token: token[:-1],
        lambda token: token + "=",
        lambda token: token.swapcase(),
        lambda token: token[::-1],
        lambda token: " " + token,
        lambda token: token + "\x00",
        lambda token: "",
        lambda token: token[:20] + ("A" if token[20] != "A" else "B") + token[21:],
        lambda token: token.replace(token[0], "\ud800"),
    ]
)


@st.composite
def wrong_hellos(draw):
    """Return changes that make a right hello wrong, as functions of the running service."""
    kind = draw(st.integers(0, 7))
    if kind == 6:  # the token that opens a stream again, of another cluster, changed, or used already
        near, cluster = draw(NEAR), draw(st.sampled_from([0, 1]))
        return lambda run: blob(run.hello(token=(near(run.resumes[1]), run.resumes[0])[cluster], cluster=cluster))
    if kind == 7:  # a cluster is taken out of the round by whoever has its token, and by nobody else
        near, reason = draw(NEAR), draw(texts)
        where = draw(st.sampled_from([{}, {"cluster": 1}, {"cluster": 7}, {"round": 1}]))

        def leaving(run):
            token = run.tokens[0] if where else near(run.tokens[0])
            header = {"kind": "leave", "token": token, "round": run.round, "cluster": 0, "reason": reason}
            return blob(header | where)

        return leaving
    if kind == 0:
        near, cluster = draw(NEAR), draw(st.sampled_from([0, 1]))
        return lambda run: blob(run.hello(token=near(run.tokens[cluster]), cluster=cluster))
    if kind == 1:
        token = draw(st.one_of(texts, values))
        return lambda run: blob(run.hello(token=token))
    if kind == 2:  # the right token of another cluster
        cluster = draw(st.sampled_from([1, 2, -1, 10**6]))
        return lambda run: blob(run.hello(cluster=cluster))
    if kind == 3:
        return lambda run: blob(run.hello(token=run.expired))
    if kind == 4:  # the right token with something else that is not right, or not there
        change = draw(st.dictionaries(st.sampled_from(["kind", "round", "cluster", "version", "codec", "x"]), values))
        missing = draw(st.sampled_from(["kind", "round", "cluster", "version", "token"]))

        def changed(run):
            header = run.hello() | change
            good = run.hello()
            if header.keys() == good.keys() and all(type(header[n]) is type(good[n]) for n in good) and header == good:
                del header[missing]
            return blob(header)

        return changed
    data = draw(frames)
    return lambda run: data


@pytest.mark.slow
def test_nobody_is_admitted_without_the_rounds_own_token(running):
    running.expired = running.tokens[0]
    running.service.finish_round()
    running.open()
    # Cluster 1 has a stream whose token for another one is out; so has cluster 0, and has left the round.
    running.resumes = []
    for cluster, token in enumerate(running.tokens):
        (welcome,), code, _ = running.send(encode(running.hello(cluster=cluster, token=token)))
        assert code is grpc.StatusCode.OK
        running.resumes.append(decode(welcome).header["resume"])
    used = running.tokens[0]
    running.service.finish_round()
    running.open()
    assert used not in running.tokens

    @fuzz(HELLOS)
    @given(wrong_hellos())
    def check(make):
        COUNTED["hellos"] += 1
        data = make(running)
        answers, code, details = running.send(data)
        assert not answers, f"admitted: {data!r}"
        assert code in REFUSALS, (code, details, data)
        assert not any(token in details for token in running.tokens)
        assert len(details) < 1000 and details.isprintable(), details

    check()
    assert COUNTED["hellos"] >= HELLOS
    # The tokens are as good as before, once.
    for cluster, token in enumerate(running.tokens):
        right = encode(running.hello(cluster=cluster, token=token))
        answers, code, _ = running.send(right, encode({"kind": "bye"}))
        assert ([decode(answer).kind for answer in answers], code) == (["welcome", "goodbye"], grpc.StatusCode.OK)
        assert running.send(right)[1] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_nothing_is_learned_from_frames_that_are_no_step(running):
    @fuzz(STREAMED)
    @given(
        # Half of the streams begin with a good micro-batch: what follows meets a decoder at work.
        st.sampled_from([[], [VALID[0]]]),
        st.lists(st.one_of(frames, mutated(VALID[:1])), min_size=1, max_size=2),
    )
    def check(beginning, rest):
        sent = beginning + rest
        COUNTED["streams"] += 1
        answers, code, details = running.send(encode(running.hello()), *sent)
        kinds = [decode(answer).kind for answer in answers]
        COUNTED.update(kinds)
        assert kinds[:1] == ["welcome"] and set(kinds[1:]) <= {"gradient", "goodbye"}, kinds
        assert code in REFUSALS or code is grpc.StatusCode.OK, (code, details, sent)
        assert len(details) < 1000 and details.isprintable(), details
        # A step is two micro-batches and its end, and these are no more than one.
        assert running.service.finish_round().clusters[0].steps == 0, sent
        running.open()

    check()
    assert COUNTED["streams"] >= STREAMED
    # Some of them got as far as the decoder itself.
    assert COUNTED["gradient"] > 20


@pytest.mark.slow
def test_hostile_streams_take_no_memory_and_change_nothing():
    """Shapes, types, values, fields, offsets, order, tokens, under RLIMIT_AS; answers of a hostile server, too."""
    command = [sys.executable, str(ROOT / "benchmarks" / "fuzz.py"), "--number", "20000", "--json"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert child.stdout, child.stderr[-2000:]
    figures = json.loads(child.stdout)
    assert not figures["failures"] and child.returncode == 0
    assert figures["inputs"] >= 20_000
    assert figures["growth_bytes"] <= 2 * figures["frame_limit_bytes"]
    # They went everywhere: refused for their bytes, order or shapes, numbers, tokens; and some were right all the same.
    for outcome in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNAUTHENTICATED", "OK", "step_applied"):
        assert figures["outcomes"][outcome] > 20, outcome
    assert figures["outcomes"]["control unit: refused"] > 200
