"""The checker of histories finds in hand-made ones what cannot be, and nothing in those that can."""

from dataclasses import replace

import pytest


def line(round_, trained, failed=()):
    return {
        "round": round_,
        "clusters": [{"cluster": cluster} for cluster in trained],
        "failed": [{"cluster": cluster, "reason": "gone"} for cluster in failed],
    }


@pytest.fixture
def good(history_checker):
    """Three clusters, of which one is lost in round 2, comes back in round 4, and fails in round 5 after its steps."""

    def file(round_, steps):
        return history_checker.ClusterFile(run="r", round=round_, drawn=8 * steps, steps=(steps,))

    return history_checker.Evidence(
        run="r",
        num_clusters=3,
        local_steps=2,
        batch_size=8,
        lines=[
            line(1, [0, 1, 2]),
            line(2, [0, 2], [1]),
            line(3, [0, 2]),
            line(4, [0, 1, 2]),
            line(5, [0, 2], [1]),
        ],
        committed=5,
        decoder_steps=(10,),
        clusters={0: file(5, 10), 1: file(5, 6), 2: file(5, 10)},
    )


def test_a_history_that_can_be_has_no_problems(history_checker, good):
    assert history_checker.problems(good) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: {"lines": [*h.lines, line(5, [0])]}, "round 5 was committed 2 times"),
        (lambda h: {"lines": [h.lines[0], *h.lines[2:]]}, "rounds are missing: [2]"),
        (lambda h: {"lines": [h.lines[1], h.lines[0], *h.lines[2:]]}, "rounds stand out of order"),
        (lambda h: {"lines": [*h.lines[:4], line(5, [0, 2, 2], [1])]}, "round 5: cluster 2 counts 2 times"),
        (lambda h: {"lines": [*h.lines[:4], line(5, [0, 2], [0, 1])]}, "round 5: clusters [0] have trained and failed"),
        (lambda h: {"lines": [*h.lines[:4], line(5, [0, 2, 7], [1])]}, "round 5: there is no cluster 7"),
        (lambda h: {"committed": 4}, "the run has finished 5 rounds and committed 4"),
        (lambda h: {"committed": 6}, "the checkpoint is of round 6, the last line of round 5"),
        (lambda h: {"decoder_steps": (11,)}, "the decoder has taken 11 steps in 5 rounds, expected 10"),
        (lambda h: {"decoder_steps": (9,)}, "the decoder has taken 9 steps in 5 rounds, expected 10"),
        (lambda h: {"decoder_steps": (9, 10)}, "parts of the decoder have taken different numbers of steps: [9, 10]"),
        (
            lambda h: with_file(h, 0, steps=(12,)),
            "cluster 0: an optimizer has taken 12 steps up to round 5",
        ),
        (
            lambda h: with_file(h, 1, steps=(10,)),
            "cluster 1: an optimizer has taken 10 steps up to round 5",
        ),
        (lambda h: with_file(h, 2, drawn=96), "cluster 2: it has drawn 96 examples up to round 5 in 5 rounds"),
        (lambda h: with_file(h, 2, drawn=81), "cluster 2: it has drawn 81 examples"),
        (lambda h: with_file(h, 2, run="other"), "cluster 2: its checkpoint is of run other, expected r"),
        (lambda h: with_file(h, 2, round=9), "cluster 2: its checkpoint is of round 9, the server's of 5"),
    ],
)
def test_what_cannot_be_is_found(history_checker, good, change, said):
    problems = history_checker.problems(replace(good, **change(good)))
    assert any(text.startswith(said) for text in problems), problems


def with_file(history, cluster, **values):
    return {"clusters": {**history.clusters, cluster: replace(history.clusters[cluster], **values)}}


def test_a_round_that_all_clusters_lost_may_have_left_some_steps_in_the_decoder(history_checker, good):
    lines = [*good.lines[:4], line(5, [], [0, 1, 2])]
    for steps, fits in ((8, True), (9, True), (10, True), (11, False), (7, False)):
        found = history_checker.problems(replace(good, lines=lines, decoder_steps=(steps,), clusters={}))
        assert (found == []) is fits, (steps, found)
