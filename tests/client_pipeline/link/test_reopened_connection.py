"""A call to the decoder that ends as a test says: what is sent again, what is given up, and what is told of it."""

import queue
import threading
import time
from dataclasses import replace

import grpc
import pytest

from client_pipeline.link import reopened_connection as module
from client_pipeline.link.address import DecoderAddress, LinkCertificates
from client_pipeline.link.base import LinkError, NotFiniteLink
from client_pipeline.link.frames import decode, encode
from client_pipeline.link.reopened_connection import DecoderConnection, Journal

ADDRESS = DecoderAddress(target="10.0.0.1:50", token="first", round=3, cluster=1, join_timeout_s=20.0)
CODES = grpc.StatusCode
SECONDS = 30.0


class Ended(grpc.RpcError):
    """How gRPC ends a call."""

    def __init__(self, code, details="why"):
        self._code, self._details = code, details

    def code(self):
        return self._code

    def details(self):
        return self._details


def welcome(**more):
    return encode({"kind": "welcome", "version": 1, "decoder_sync": "step", **more})


class Call:
    """What comes out of one call: frames, then an error, or nothing until somebody ends it."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.sent = []
        self.closed = False
        self._over = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.answers:
            self._over.wait(SECONDS)
            raise Ended(CODES.CANCELLED)
        answer = self.answers.pop(0)
        if answer is None:
            raise StopIteration
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, data):
        self.sent.append(data)

    def end(self):
        self._over.set()

    def cancel(self):
        self._over.set()

    def close(self):
        self.closed = True
        self._over.set()


@pytest.fixture
def connect(monkeypatch):
    """Connect with calls that are handed out one after the other."""
    made = []

    def open_(*calls, **changes):
        left = list(calls)
        monkeypatch.setattr(module, "_Call", lambda address, certificates: left.pop(0))
        monkeypatch.setattr(module, "_PAUSES_S", (0.0,))
        made.append(
            DecoderConnection(replace(ADDRESS, **changes), LinkCertificates(), lambda token: f"hello {token}".encode())
        )
        made[-1].unused = left
        return made[-1]

    yield open_
    for one in made:
        one.abort("the test is over")


def until(holds):
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


# What is noted.


def test_a_journal_gives_what_is_not_confirmed_in_the_order_in_which_it_was_sent():
    journal = Journal()
    for step, data in ((2, b"c"), (1, b"a"), (1, b"b"), (3, b"d")):
        journal.add(step, data)
    assert journal.since(0) == [b"a", b"b", b"c", b"d"]
    assert journal.since(2) == [b"c", b"d"] and journal.since(4) == []
    journal.forget(2)
    journal.forget(9)
    assert journal.since(1) == [b"a", b"b", b"d"]
    journal.confirm(1)
    assert journal.since(0) == [b"d"]


# A call that goes well, and one that is refused.


def test_answers_come_in_their_order_and_an_end_is_told_to_everyone_who_asks(connect):
    one = connect(Call(b"a", b"b", None))
    assert [one.take(SECONDS) for _ in range(2)] == [b"a", b"b"]
    for _ in range(2):
        error = one.take(SECONDS)
        assert isinstance(error, LinkError) and "the stream has ended" in str(error)
    assert one.failure is not None and not one.closed


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (CODES.PERMISSION_DENIED, LinkError, r"refused \(permission denied\): why"),
        (CODES.OUT_OF_RANGE, NotFiniteLink, r"refused \(out of range\): why"),
    ],
)
def test_a_refusal_is_told_with_its_reason_and_is_not_tried_again(connect, code, kind, text):
    call = Call(Ended(code))
    error = connect(call).take(SECONDS)
    assert type(error) is kind and call.sent == [b"hello first"]
    with pytest.raises(kind, match=rf"^decoder at 10\.0\.0\.1:50 \(round 3, cluster 1\): {text}$"):
        raise error


def test_a_refusal_without_a_reason_says_so(connect):
    assert "no reason given" in str(connect(Call(Ended(CODES.NOT_FOUND, None))).take(SECONDS))


def test_nothing_comes_in_time(connect):
    with pytest.raises(queue.Empty):
        connect(Call()).take(0.01)


def test_a_dropped_step_is_not_sent_again_and_wakes_who_waits(connect):
    one = connect(Call())
    one.put(b"x", 2)
    one.put(b"y", 3)
    one.drop(2)
    assert one.take(SECONDS) is None and one.journal.since(0) == [b"y"]


def test_confirmed_steps_never_go_back(connect):
    one = connect(Call())
    for step in (1, 2, 3):
        one.put(b"x%d" % step, step)
    one.confirm(2)
    one.confirm(1)
    assert one.confirmed == 2 and one.journal.since(0) == [b"x3"]


# A busy decoder.


@pytest.mark.parametrize("code", [CODES.RESOURCE_EXHAUSTED, CODES.CANCELLED])
def test_a_hello_that_was_turned_away_is_said_again(connect, code):
    turned_away, served = Call(Ended(code)), Call(b"a")
    one = connect(turned_away, served)
    assert one.take(SECONDS) == b"a"
    assert turned_away.closed and served.sent == [b"hello first"]


def test_who_was_answered_once_does_not_begin_anew(connect):
    one = connect(Call(b"a", Ended(CODES.RESOURCE_EXHAUSTED)), Call(b"never"))
    assert one.take(SECONDS) == b"a"
    assert "resource exhausted" in str(one.take(SECONDS)) and len(one.unused) == 1


def test_hello_is_said_no_longer_than_the_round_waits(connect):
    one = connect(Call(Ended(CODES.RESOURCE_EXHAUSTED)), Call(b"never"), join_timeout_s=-1.0)
    assert "resource exhausted" in str(one.take(SECONDS)) and len(one.unused) == 1


# A cut.

CUTS = (CODES.UNAVAILABLE, CODES.INTERNAL)


@pytest.mark.parametrize("code", CUTS)
def test_after_a_cut_what_the_decoder_has_not_confirmed_goes_again(connect, code):
    first = Call(b"a", Ended(code))
    later = Call(welcome(resume="third", step=3, closed=0), b"b")
    cut = threading.Event()
    held = HeldCall(first, cut)
    one = connect(held, later)
    one.resume_with("second")
    assert one.take(SECONDS) == b"a"
    for step, data in ((1, b"x1"), (2, b"x2"), (3, b"x3"), (3, b"y3"), (4, b"x4")):
        one.put(data, step)
    cut.set()
    assert one.take(SECONDS) == b"b"
    assert first.sent == [b"hello first", b"x1", b"x2", b"x3", b"y3", b"x4"] and first.closed
    assert later.sent == [b"hello second", b"x3", b"y3", b"x4"]
    assert one.confirmed == 2 and one.journal.since(0) == [b"x3", b"y3", b"x4"]
    [mended] = one.cuts
    assert mended.resent_bytes == 6 and 0 <= mended.seconds < SECONDS
    # From here on frames go out at once again, and the next cut is answered with the new token.
    one.put(b"x5", 5)
    assert later.sent[-1] == b"x5" and one._resume == "third"


class HeldCall(Call):
    """A call that is cut when a test says so, after its first answers."""

    def __init__(self, call, cut):
        self._call, self._cut = call, cut

    def __getattr__(self, name):
        return getattr(self._call, name)

    def __next__(self):
        if len(self._call.answers) == 1:
            assert self._cut.wait(SECONDS)
        return next(self._call)

    def put(self, data):
        self._call.put(data)

    def end(self):
        self._cut.set()
        self._call.end()

    cancel = end

    def close(self):
        self._cut.set()
        self._call.close()


def test_a_step_that_the_decoder_has_closed_is_not_sent_again_though_it_is_not_confirmed(connect):
    cut = threading.Event()
    held = HeldCall(Call(b"a", Ended(CODES.UNAVAILABLE)), cut)
    later = Call(welcome(resume="third", step=3, closed=1), b"b")
    one = connect(held, later)
    one.resume_with("second")
    for step in (2, 3, 4):
        one.put(b"x%d" % step, step)
    cut.set()
    assert [one.take(SECONDS) for _ in range(2)] == [b"a", b"b"]
    assert later.sent == [b"hello second", b"x4"]
    assert one.journal.since(0) == [b"x3", b"x4"]


def reopened(connect, *calls, **changes):
    """A stream that was answered and cut, and what it came to with the calls after that."""
    cut = threading.Event()
    one = connect(HeldCall(Call(b"a", Ended(CODES.UNAVAILABLE, "gone")), cut), *calls, **changes)
    one.resume_with("second")
    assert one.take(SECONDS) == b"a"
    cut.set()
    return one


def test_an_attempt_without_a_welcome_is_followed_by_another(connect):
    bad = [Call(Ended(CODES.UNAVAILABLE)), Call(Ended(CODES.RESOURCE_EXHAUSTED)), Call(None), Call(b"no frame")]
    other = Call(encode({"kind": "step_applied", "round": 3, "step": 1}))
    one = reopened(connect, *bad, other, Call(welcome(resume="third", step=1), b"b"))
    assert one.take(SECONDS) == b"b"
    assert all(call.closed and call.sent == [b"hello second"] for call in [*bad, other])
    assert len(one.cuts) == 1


def test_a_stream_that_the_decoder_does_not_take_back_has_its_reason(connect):
    one = reopened(connect, Call(Ended(CODES.FAILED_PRECONDITION, "left behind")), Call(b"never"))
    assert "refused (failed precondition): left behind" in str(one.take(SECONDS))
    assert len(one.unused) == 1 and one.cuts == []


def test_without_a_token_a_cut_stream_is_not_opened_again(connect):
    one = connect(Call(b"a", Ended(CODES.UNAVAILABLE, "gone")), Call(b"never"))
    assert one.take(SECONDS) == b"a"
    assert "cannot be reached, or went away: gone" in str(one.take(SECONDS)) and len(one.unused) == 1


def test_a_decoder_that_is_away_for_too_long_is_given_up(connect):
    one = reopened(connect, step_timeout_s=-1.0)
    assert "cannot be reached, or went away: gone" in str(one.take(SECONDS))
    assert one.cuts == []


def test_streams_that_bring_nothing_are_opened_again_five_times(connect):
    fruitless = [Call(welcome(resume=f"token {i}", step=1), Ended(CODES.UNAVAILABLE, f"gone {i}")) for i in range(9)]
    one = reopened(connect, *fruitless)
    assert "went away: gone 4" in str(one.take(SECONDS))
    assert len(one.unused) == 4 and len(one.cuts) == 5


def test_a_stream_that_brings_something_may_be_cut_as_often_as_it_likes(connect):
    calls = [Call(welcome(resume=f"token {i}", step=1), b"%d" % i, Ended(CODES.UNAVAILABLE)) for i in range(9)]
    one = reopened(connect, *calls, Call(welcome(resume="last", step=1), b"end"))
    assert [one.take(SECONDS) for _ in range(10)] == [*(b"%d" % i for i in range(9)), b"end"]


def test_frames_between_a_cut_and_its_end_are_noted_and_go_once(connect):
    welcomed = threading.Event()
    later = HeldCall(Call(welcome(resume="third", step=1)), welcomed)
    one = reopened(connect, later)
    until(lambda: later._call.sent)
    one.put(b"x", 1)
    assert later._call.sent == [b"hello second"]
    welcomed.set()
    until(lambda: len(one.cuts) == 1)
    assert later._call.sent == [b"hello second", b"x"]


def test_a_cut_on_purpose_lasts_as_long_as_it_is_to(connect):
    later = Call(welcome(resume="third", step=1), b"b")
    first = Call(b"a")
    one = connect(first, later)
    one.resume_with("second")
    assert one.take(SECONDS) == b"a"
    began = time.monotonic()
    one.cut(0.2)
    assert one.take(SECONDS) == b"b"
    assert time.monotonic() - began >= 0.2


# The end.


def test_a_stream_that_is_broken_off_says_so_once_and_is_closed(connect):
    call = Call()
    one = connect(call)
    one.abort("no more" * 100)
    one.abort("again")
    assert one.closed and call.closed
    [hello, leave] = call.sent
    assert hello == b"hello first"
    assert decode(leave).header["reason"] == ("no more" * 100)[:300]
