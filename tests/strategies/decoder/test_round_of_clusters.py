"""Who takes part in a round of the decoder, by a clock that a test moves: joining, leaving, and the barrier."""

from types import SimpleNamespace

import pytest
import torch

from client_pipeline.partition.micro_batches import StepId
from strategies.decoder import round as module
from strategies.decoder.member import MicroBatch, Refusal, Superseded
from strategies.decoder.round import AWAY_S, DecoderRound

JOIN_S, STEP_S = 60.0, 100.0


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=1000.0, waits=[])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def opened(clock):
    """Open a round whose waits move the clock, and let things happen at a time."""

    def make(clusters=(0, 1), sync="step", at=None, number=3, local_steps=2):
        made = DecoderRound(number, clusters, local_steps, {}, sync=sync, join_timeout_s=JOIN_S, step_timeout_s=STEP_S)
        events = dict(at or {})

        def wait(seconds):
            assert seconds > 0
            clock.waits.append(seconds)
            clock.now += seconds
            assert clock.now < 1e5, "it waits for ever"
            for when in sorted(events):
                if when <= clock.now - 1000.0:
                    events.pop(when)(made)

        made.state.wait = wait
        return made

    return make


def micro_batch(cluster, step=1, weight=4.0):
    labels = torch.ones(4, dtype=torch.int64)
    return MicroBatch(
        step=StepId(seed=0, round=3, step=step, cluster=cluster),
        micro_batch=0,
        num_micro_batches=1,
        weight=weight,
        total_weight=weight,
        hidden_BTD=torch.zeros(4, 1, 2),
        mask_BT=torch.ones(4, 1, dtype=torch.bool),
        targets={"labels": labels},
        attempt=0,
    )


def train(made, place, step=1):
    place.member.count_micro_batch(micro_batch(place.member.cluster, step), 4.0, 8.0)
    return made.close(place, step, 1.0)


def held(made, method, *arguments):
    """Call what is to be called with the round's state held."""
    with made.state:
        return getattr(made, method)(*arguments)


def left(made):
    return {n: member.departure for n, member in made.members.items()}


def stands(made):
    return {n: standing.place for n, standing in made.standings().items()}


# Coming.


def test_selected_clusters_join_once_and_no_others(opened):
    made = opened()
    place = made.join(3, 1)
    assert (place.member.cluster, place.number, place.sync, place.step, place.closed) == (1, 0, "step", 1, False)
    for round_, cluster, text in ((3, 1, "already joined"), (3, 7, "is not selected"), (2, 0, "expected round 3")):
        with pytest.raises(Refusal, match=text):
            made.join(round_, cluster)
    made.leave(place, "enough")
    with pytest.raises(Refusal, match="cluster 1 has left round 3: enough"):
        made.join(3, 1)


def test_a_round_that_is_not_open_takes_nobody(opened):
    with pytest.raises(Refusal, match="is not open"):
        opened(number=0).join(0, 0)
    made = opened()
    place = made.join(3, 0)
    made.end()
    for call in (lambda: made.join(3, 1), lambda: held(made, "check", place), lambda: made.finish(place)):
        with pytest.raises(Refusal, match="round 3 of the decoder is not open"):
            call()
    with pytest.raises(ValueError, match="no round of the decoder is open"):
        made.end()
    assert left(made) == {0: "did not finish before the round ended", 1: "did not join"}


def test_a_newer_stream_takes_the_place_of_the_older_one(opened):
    made = opened()
    with pytest.raises(Refusal, match="cluster 0 has not joined"):
        held(made, "rejoin", 3, 0, 1)
    old = made.join(3, 0)
    new = held(made, "rejoin", 3, 0, 2)
    assert new.number == 2
    for number in (1, 2):
        with pytest.raises(Superseded):
            held(made, "rejoin", 3, 0, number)
    with pytest.raises(Superseded):
        held(made, "check", old)
    with pytest.raises(Superseded):
        made.finish(old)
    # What the older one still says changes nothing.
    made.leave(old, "gone")
    made.away(old)
    assert left(made)[0] is None and stands(made)[0] == "trains"
    assert held(made, "check", new) is new.member


def test_a_step_that_was_closed_before_the_cut_is_not_begun_anew(opened):
    made = opened()
    place = made.join(3, 0)
    place.member.count_micro_batch(micro_batch(0), 4.0, 8.0)
    held(made, "rejoin", 3, 0, 1)
    with pytest.raises(Refusal, match="step 1 ended after 0 of 0 micro-batches"):
        made.close(held(made, "rejoin", 3, 0, 2), 1, 1.0)
    share = train(made, held(made, "rejoin", 3, 0, 3))
    assert (share.cluster, share.weight, share.scale) == (0, 4.0, 1.0)
    again = held(made, "rejoin", 3, 0, 4)
    assert again.closed and again.member.step_weight == 4.0


# Who is waited for before a mode is found.


def test_auto_is_step_as_soon_as_all_are_there(opened, clock):
    made = opened(sync="auto")

    def wait(seconds):
        assert seconds == JOIN_S
        clock.now += 20.0
        made.members[1].join()

    made.state.wait = wait
    assert made.join(3, 0).sync == "step"
    assert clock.now == 1020.0 and made.sync == "step"


def test_auto_is_round_when_the_time_is_over_and_not_before(opened, clock):
    made = opened(sync="auto")
    assert made.join(3, 0).sync == "round"
    assert clock.waits == [JOIN_S] and clock.now == 1000.0 + JOIN_S
    # Who comes later finds the mode.
    assert made.join(3, 1).sync == "round"


def test_who_came_and_went_was_not_there_at_the_same_time(opened, clock):
    made = opened(sync="auto")
    made.members[1].join()
    made.give_up(1, "gone")
    assert made.join(3, 0).sync == "round"


# Who is late.


def test_who_does_not_join_within_the_time_of_the_first_is_out(opened, clock):
    made = opened()
    clock.now += 10 * JOIN_S
    assert stands(made) == {0: "awaited", 1: "awaited"}
    made.join(3, 0)
    clock.now += JOIN_S - 0.5
    assert stands(made)[1] == "awaited"
    clock.now += 0.5
    assert stands(made)[1] == "lost" and left(made)[1] == "it did not join within 60 s of the first"
    assert left(made)[0] is None


def test_in_mode_round_clusters_may_come_one_after_the_other(opened, clock):
    made = opened(sync="round")
    made.join(3, 0)
    clock.now += 2 * JOIN_S
    assert stands(made)[1] == "awaited"


def test_a_stream_that_was_cut_may_come_back_for_a_while(opened, clock):
    made = opened()
    place, other = made.join(3, 0), made.join(3, 1)
    made.away(place)
    clock.now += AWAY_S - 0.5
    assert stands(made) == {0: "away", 1: "trains"}
    back = held(made, "rejoin", 3, 0, 1)
    clock.now += AWAY_S
    assert stands(made)[0] == "trains"
    made.away(back)
    clock.now += AWAY_S
    assert stands(made)[0] == "lost" and f"did not come back within {AWAY_S:g} s" in left(made)[0]
    assert left(made)[1] is None and other.member.departure is None


def test_a_stream_that_brings_nothing_is_given_up_after_twice_the_longest_wait(opened, clock):
    made = opened()
    place = made.join(3, 0)
    made.join(3, 1)
    clock.now += 2 * STEP_S - 0.5
    held(made, "check", place)
    clock.now += 0.5
    assert stands(made) == {0: "trains", 1: "lost"}
    assert left(made)[1] == "its stream has brought nothing for 200 s"


def test_who_has_finished_is_not_late(opened, clock):
    made = opened()
    place = made.join(3, 0)
    clock.now += 5.0
    made.finish(place)
    made.finish(place)
    clock.now += 10 * STEP_S
    standing = made.standings()[0]
    assert (standing.place, standing.since) == ("finished", 1005.0)
    with pytest.raises(Refusal, match="it said goodbye"):
        held(made, "check", place)
    made.leave(place, "later")
    assert left(made)[0] is None


def test_a_cluster_is_dismissed_from_its_own_round_and_by_its_newest_stream(opened):
    made = opened(clusters=(0, 1, 2))
    made.join(3, 0)
    made.dismiss(2, 0, "another round")
    made.dismiss(3, 9, "nobody")
    made.dismiss(3, 0, "an older stream", number=4)
    assert left(made) == {0: None, 1: None, 2: None}
    made.dismiss(3, 0, "its stream", number=0)
    made.dismiss(3, 1, "any stream")
    made.give_up(2, "silence")
    made.give_up(9, "nobody")
    assert left(made) == {0: "its stream", 1: "any stream", 2: "silence"}


# The barrier.


def test_the_last_one_takes_the_step_with_all_shares_and_the_others_go_on(opened, clock):
    def other(made):
        train(made, places[1])

    made = opened(at={0.5: other})
    places = [made.join(3, n) for n in (0, 1)]
    train(made, places[0])
    shares = made.wait_for_others(places[0], 1)
    assert sorted(share.cluster for share in shares) == [0, 1]
    assert clock.waits == [1.0]
    held(made, "applied", 1, shares)
    assert [member.step for member in made.members.values()] == [2, 2] and made.closed == {}
    assert made.wait_for_others(places[1], 1) == []


def test_while_a_step_is_taken_the_others_wait(opened, clock):
    taken = []

    def apply(made):
        held(made, "applied", 1, taken[0])

    made = opened(at={3.5: apply})
    places = [made.join(3, n) for n in (0, 1)]
    for place in places:
        train(made, place)
    taken.append(made.wait_for_others(places[0], 1))
    assert len(taken[0]) == 2
    assert made.wait_for_others(places[1], 1) == []
    assert clock.waits == [1.0] * 4


def test_who_does_not_close_its_step_in_time_is_out_and_the_rest_goes_on(opened, clock):
    made = opened(clusters=(0, 1, 2))
    places = [made.join(3, n) for n in (0, 1, 2)]
    train(made, places[0])
    train(made, places[2])
    shares = made.wait_for_others(places[0], 1)
    assert sorted(share.cluster for share in shares) == [0, 2]
    assert clock.now == 1000.0 + STEP_S
    assert left(made)[1].startswith("it did not close step 1 within 100 s of another cluster")
    assert made.members[1].silent and left(made)[0] is None and left(made)[2] is None


def test_a_round_that_ends_frees_who_waits(opened):
    made = opened(at={5.0: lambda made: made.end()})
    place = made.join(3, 0)
    made.join(3, 1)
    train(made, place)
    with pytest.raises(Refusal, match="is not open"):
        made.wait_for_others(place, 1)


def test_a_stream_waits_for_the_step_that_another_of_its_cluster_has_closed(opened, clock):
    made = opened(clusters=(0,), at={2.5: lambda made: held(made, "applied", 1, list(made.closed.values()))})
    train(made, made.join(3, 0))
    again = held(made, "rejoin", 3, 0, 1)
    made.wait_until_taken(again, 1)
    assert clock.waits == [1.0] * 3
    clock.now = 2000.0
    with pytest.raises(Refusal, match="step 2 was not taken within 100 s"):
        made.wait_until_taken(again, 2)
    assert clock.now == 2000.0 + STEP_S
