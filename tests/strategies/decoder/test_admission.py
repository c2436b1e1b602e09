"""Admission to the decoder frame by frame: the reception itself, with streams that are no more than their contexts."""

import time

import pytest

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.frames import PROTOCOL_VERSION, FrameError, encode
from helpers.decoder_cases import trainer_of
from strategies.decoder.limits import Allowance, HelloGuard, TooManyHellos
from strategies.decoder.reception import Reception
from strategies.decoder.tokens import RoundTokens


class Stream:
    """One peer's stream: it is open until it is cancelled."""

    def __init__(self, peer="ipv4:10.0.0.1:50"):
        self._peer, self.cancelled, self.at_end = peer, 0, []

    def peer(self):
        return self._peer

    def peer_identities(self):
        return None

    def is_active(self):
        return not self.cancelled

    def cancel(self):
        self.cancelled += 1

    def add_callback(self, callback):
        self.at_end.append(callback)
        return not self.cancelled


class Door:
    """The reception of a round, with its clusters' tokens."""

    def __init__(self, clusters=(0, 1), round_=5, codec="none", **trainer):
        self.trainer = trainer_of(**trainer)
        self.trainer.open_round(round_, clusters, 1)
        self.reception = Reception(self.trainer, ActivationCodec(codec), len(clusters))
        self.round, self.tokens = round_, self.reception.open_round(round_, clusters)

    def frame(self, cluster=0, kind="hello", **change):
        header = {"version": PROTOCOL_VERSION, "token": self.tokens.get(cluster, "x"), "round": self.round}
        if kind != "hello":
            del header["version"]
        return encode({"kind": kind, **header, "cluster": cluster, **change})

    def greet(self, cluster=0, context=None, **change):
        return self.reception.greet(iter([self.frame(cluster, **change)]), context or Stream())


@pytest.fixture
def door():
    return Door()


def test_a_first_stream_is_the_clusters_own_and_a_second_one_replaces_it(door):
    first, second, other = Stream(), Stream(), Stream()
    stream = door.greet(context=first)
    assert (stream.round, stream.cluster, stream.number) == (5, 0, 0) and len(stream.resume) == 43
    assert door.greet(1, context=other).number == 0 and door.reception.num_streams == 2
    again = door.greet(context=second, token=stream.resume)
    assert (again.number, again.resume) != (0, stream.resume)
    assert again.number == 1 and [s.cancelled for s in (first, second, other)] == [1, 0, 0]
    assert door.reception.num_streams == 3
    for callback in first.at_end:
        callback()
    assert door.reception.num_streams == 2
    # The next round breaks off all that are open.
    door.reception.open_round(6, [0])
    assert [s.cancelled for s in (first, second, other)] == [1, 1, 1]


def test_a_stream_that_ended_while_it_was_admitted_is_not_counted(door):
    gone = Stream()
    gone.cancel()
    door.greet(context=gone)
    assert door.reception.num_streams == 0
    assert "its stream broke off" in door.trainer.finish_round().clusters[0].departure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": PROTOCOL_VERSION + 1}, f"protocol version: expected {PROTOCOL_VERSION}, found"),
        ({"codec": "int8"}, "codec of the activations: expected none, found int8"),
        ({"kind": "news", "text": "x"}, "expected a hello frame first, found news"),
    ],
)
def test_a_hello_that_is_not_understood_counts_as_a_wrong_one(door, change, message):
    with pytest.raises(FrameError, match=message):
        door.greet(**change)
    assert door.reception.hellos.take_refused() == {"not admitted": 1}
    assert door.reception.num_streams == 0 and door.reception.hellos.num_waiting == 0
    assert Door(codec="int8").greet(codec="int8").number == 0


def test_bytes_that_are_no_frame_and_streams_that_end_at_once_are_told_apart(door):
    with pytest.raises(FrameError):
        door.reception.greet(iter([b"x" * 20]), Stream())
    with pytest.raises(FrameError, match="expected a hello frame, found the end of the stream"):
        door.reception.greet(iter(()), Stream())
    # A hello has at most 16 KiB.
    with pytest.raises(FrameError):
        door.greet(token="x" * (16 * 2**10))
    with pytest.raises(PermissionError):
        door.greet(token="x" * (15 * 2**10))
    assert door.reception.hellos.take_refused() == {"malformed": 2, "no hello came": 1, "not admitted": 1}
    assert door.reception.hellos.num_waiting == 0


@pytest.mark.parametrize("change", [{"token": "x"}, {"round": 4}, {"round": 6}, {"cluster": 1}, {"cluster": 7}])
@pytest.mark.parametrize("kind", ["hello", "leave", "news"])
def test_a_token_opens_its_own_clusters_round_and_nothing_else(door, kind, change):
    more = {"leave": {"reason": "gone"}, "news": {"text": "x"}}.get(kind, {})
    data = door.frame(kind=kind, **{"token": door.tokens[0], **more, **change})
    with pytest.raises(PermissionError, match="or the round has ended"):
        if kind == "news":
            with door.reception.news(data, Stream()):
                pass
        else:
            door.reception.greet(iter([data]), Stream())
    [(_, count)] = door.reception.hellos.take_refused().items()
    assert count == 1 and door.trainer.current.open


def test_a_leave_frame_with_the_token_takes_the_cluster_out(door):
    assert door.greet(1, kind="leave", reason="its process\nended") is None
    assert door.reception.hellos.take_refused() == {}
    departure = door.trainer.finish_round().clusters[1].departure
    assert "its process" in departure and "\n" not in departure
    with pytest.raises(FrameError, match="expected token, round and cluster"):
        door.reception.greet(iter([encode({"kind": "leave", "reason": "x"})]), Stream())
    door.reception.close_round()
    with pytest.raises(PermissionError):
        door.greet()


def count_until(refusal, call):
    """Return how often a call was let through before it was refused, and the seconds that this took."""
    start = time.monotonic()
    for count in range(200):
        try:
            call()
        except refusal:
            return count, time.monotonic() - start
    raise AssertionError("never refused")


def test_a_cluster_has_four_streams_at_a_time_and_32_in_a_row(door):
    last = door.greet()
    streams = [last]

    def again():
        streams.append(door.greet(token=streams[-1].resume))

    assert count_until(TooManyHellos, again)[0] == 3
    # One that has ended makes place for one.
    door.reception.release(streams[0])
    assert count_until(TooManyHellos, again)[0] == 1
    assert door.greet(1).number == 0
    door.reception.release(None)
    door.reception.release(streams[-1])

    def one_after_the_other():
        again()
        door.reception.release(streams[-1])

    start = time.monotonic()
    count, seconds = count_until(TooManyHellos, one_after_the_other)
    assert 32 - 5 <= count <= 32 - 5 + seconds
    # From here on, one a second.
    while time.monotonic() < start + 1.6:
        time.sleep(0.1)
        count += count_until(TooManyHellos, one_after_the_other)[0]
    assert 32 - 5 + 1 <= count <= 32 - 5 + time.monotonic() - start
    # Neither kind is a guess.
    assert door.reception.hellos.take_refused() == {}


def test_news_are_let_through_twice_as_many_at_once_as_in_a_second(door):
    def tell(cluster=0):
        with door.reception.news(door.frame(cluster, kind="news", text="x"), Stream()) as header:
            assert header["text"] == "x"

    count, seconds = count_until(TooManyHellos, tell)
    assert 16 <= count <= 16 + 8 * seconds
    tell(1)
    with (
        pytest.raises(FrameError, match="expected a news frame, found hello"),
        door.reception.news(door.frame(), Stream()),
    ):
        pass
    # What is wrong with the text is wrong of the peer.
    with pytest.raises(ValueError), door.reception.news(door.frame(1, kind="news", text="x"), Stream()):
        raise ValueError("no news")
    assert door.reception.hellos.take_refused() == {"wrong news": 2}


def test_so_many_streams_are_served_as_the_clusters_and_those_in_waiting_need():
    assert Door(range(3)).reception.hellos.most_waiting == 3 + 2
    assert Door(range(3)).reception.most_streams == 4 * 3 + 2 * (3 + 2)


def test_a_seat_is_left_by_a_refusal_and_kept_for_a_while_by_a_cut():
    door = Door((0,))
    stream = door.greet()
    seat = door.reception.seat(stream, Stream())
    stream.break_off()
    assert door.trainer.current.open and seat is not None
    again = door.greet(token=stream.resume)
    door.reception.heard(again)
    with pytest.raises(PermissionError):
        door.greet(token=stream.resume)
    gone = Stream()
    gone.cancel()
    door.reception.seat(again, gone)
    newest = door.greet(token=again.resume)
    door.reception.seat(newest, Stream())
    again.refuse("an older stream says nothing for its cluster")
    newest.refuse("it sent nonsense")
    assert door.trainer.finish_round().clusters[0].departure == "it sent nonsense"


def test_a_refusal_before_the_seat_takes_the_cluster_out_too():
    door = Door((0,))
    door.greet().refuse("too many")
    assert door.trainer.finish_round().clusters[0].departure == "too many"
    door = Door((0,))
    stream = door.greet()
    door.reception.seat(stream, Stream())
    later = door.greet(token=stream.resume)
    # The second has no seat yet, and a stream that is not the first can come back.
    later.break_off()
    assert door.trainer.finish_round().clusters[0].departure != "its stream broke off"


# Limits by the clock.


def test_an_allowance_fills_with_the_time_up_to_its_burst():
    now = [100.0]
    allowance = Allowance(2.0, 3.0, lambda: now[0])
    assert allowance.full and not allowance.empty
    assert [allowance.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert allowance.empty and not allowance.full
    now[0] += 1.25
    # Two and a half tokens more than the two on credit.
    assert allowance.empty
    now[0] += 0.25
    assert not allowance.empty and not allowance.full
    assert allowance.take() == 0.0
    now[0] += 60
    assert allowance.full
    assert [allowance.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_peer_has_32_wrong_hellos_and_one_more_a_second():
    now = [0.0]
    guard = HelloGuard(4, lambda: now[0])
    for _ in range(31):
        guard.wrong("a", "guess")
    guard.check("a")
    guard.wrong("a", "guess")
    for seconds, is_let_in in ((0.0, False), (0.5, False), (0.5, True)):
        now[0] += seconds
        if is_let_in:
            guard.leave(guard.enter("a", int))
        else:
            with pytest.raises(TooManyHellos):
                guard.enter("a", int)
    assert guard.take_refused() == {"guess": 32, "too many wrong hellos": 2}
    assert guard.take_refused() == {}


def test_the_peer_whose_wrong_hellos_are_oldest_is_forgotten_first():
    guard = HelloGuard(4, lambda: 0.0)
    for peer in ("a", "b"):
        for _ in range(32):
            guard.wrong(peer, "guess")
    for i in range(1022):
        guard.wrong(str(i), "guess")
    for peer in ("a", "b"):
        with pytest.raises(TooManyHellos):
            guard.check(peer)
    # A place more, and the first has none; one that comes again is the newest.
    guard.wrong("b", "guess")
    guard.wrong("one more", "guess")
    guard.check("a")
    for i in range(1022):
        guard.wrong(f"another {i}", "guess")
    with pytest.raises(TooManyHellos):
        guard.check("b")
    guard.wrong("the last", "guess")
    guard.check("b")


def test_places_are_numbers_of_their_own_and_the_crowd_gives_way():
    guard, ended = HelloGuard(3), []
    places = [guard.enter(peer, lambda p=peer: ended.append(p)) for peer in ("a", "b", "b")]
    assert len(set(places)) == 3 and guard.num_waiting == 3
    guard.count("no hello came")
    newest = guard.enter("c", int)
    assert ended == ["b"] and guard.num_waiting == 3
    assert [guard.leave(place) for place in (*places, newest, newest)] == [True, False, True, True, False]
    assert guard.take_refused() == {"gave way to a newer stream": 1, "no hello came": 1}


# Tokens.


def test_tokens_of_a_round_are_good_once_and_those_of_a_cut_until_the_next_is_known():
    tokens = RoundTokens()
    assert tokens.round == 0
    first = tokens.open(3, [0, 1])
    assert tokens.round == 3 and len(set(first.values())) == 2
    zero = tokens.admit(0, 3, first[0])
    with pytest.raises(PermissionError, match="the token of cluster 0 has been used in round 3"):
        tokens.admit(0, 3, first[0])
    tokens.check(0, 3, first[0])
    one = tokens.admit(0, 3, zero.resume)
    two = tokens.admit(0, 3, zero.resume)
    assert [a.number for a in (zero, one, two)] == [0, 1, 2]
    # The welcome of the second was lost.
    with pytest.raises(PermissionError):
        tokens.admit(0, 3, one.resume)
    tokens.hear(3, 0, 1)
    tokens.hear(2, 0, 2)
    tokens.hear(3, 1, 2)
    three = tokens.admit(0, 3, zero.resume)
    tokens.hear(3, 0, 3)
    with pytest.raises(PermissionError):
        tokens.admit(0, 3, zero.resume)
    for round_, token in ((2, three.resume), (3, "x"), (3, None), (3, first[1])):
        with pytest.raises(PermissionError):
            tokens.admit(0, round_, token)
    assert tokens.admit(0, 3, three.resume).number == 4
    assert tokens.admit(1, 3, first[1]).number == 0
    tokens.close()
    for token in (first[0], three.resume):
        with pytest.raises(PermissionError):
            tokens.admit(0, 3, token)
