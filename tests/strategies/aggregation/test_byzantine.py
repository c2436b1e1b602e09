"""One hostile cluster of five or more under every rule; the long form is benchmarks/byzantine.py."""

import itertools

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, MessageType, RecordDict

from helpers.byzantine import (
    RULES,
    STREAMS,
    absent,
    aggregator_of,
    clusters_for,
    joined_by_hand,
    one_step_only,
    played,
    restarted,
    same,
)
from helpers.malformed import KINDS, with_metrics
from strategies.planned_strategy import start_from
from strategies.records import reply_content, to_arrays, to_tensors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("flower_process")]
FEW = dict(zip(RULES, list(KINDS)[:: len(KINDS) // len(RULES)], strict=False))
"""A kind of malformed reply for each rule; all kinds under all rules are the benchmark's."""


def honest(order, reply):
    return reply


@pytest.fixture(scope="module")
def undisturbed(request):
    from flwr.supercore.task_identity import TaskIdentity

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(TaskIdentity, name, 1, raising=False)
        return {"honest": played("none", honest), "absent": played("none", honest, absent)}


@pytest.mark.parametrize("rule", RULES)
def test_a_malformed_reply_leaves_the_average_that_the_others_make(rule):
    found = played(rule, KINDS[FEW[rule]])
    assert [entry["cluster"] for entry in found.failed] == [clusters_for(rule) - 1]
    assert same(found.encoder(), joined_by_hand(rule, found))


def test_decoder_steps_that_were_taken_stay_though_the_reply_is_withheld(undisturbed):
    found = played("none", KINDS["nothing"])
    assert same(found.head(), undisturbed["honest"].head())
    assert not same(found.head(), undisturbed["absent"].head())
    assert same(found.encoder(), undisturbed["absent"].encoder())


@pytest.mark.parametrize(
    ("stream", "answer"),
    [
        (one_step_only, honest),
        (one_step_only, lambda order, reply: with_metrics(reply, **{"num-examples": 8})),
        (None, lambda order, reply: with_metrics(reply, **{"num-examples": 17})),
        (None, lambda order, reply: with_metrics(reply, **{"num-examples": 64})),
    ],
)
def test_a_cluster_that_claims_what_the_decoder_has_not_seen_is_left_out(undisturbed, stream, answer):
    found = played("none", answer, **({"stream": stream} if stream else {}))
    assert [entry["cluster"] for entry in found.failed] == [4]
    assert same(found.encoder(), undisturbed["absent"].encoder())


@pytest.mark.promise
@pytest.mark.parametrize("name", STREAMS)
def test_a_cluster_whose_stream_is_refused_leaves_all_as_in_its_absence(undisturbed, name):
    """Even if it then answers as if it had trained."""
    found = played("none", honest, STREAMS[name])
    assert [entry["cluster"] for entry in found.failed] == [4]
    assert same(found.weights, undisturbed["absent"].weights)


def test_steps_that_are_begun_again_and_again_count_once(undisturbed):
    found = played("none", honest, restarted)
    assert found.failed == [] and same(found.weights, undisturbed["honest"].weights)


@pytest.mark.parametrize("sync", ["step", "round"])
def test_a_round_in_which_all_fail_after_the_decoder_has_stepped_returns_the_new_decoder(sync):
    """The round returned the arrays that it began with: the old decoder beside the new optimizer state."""
    # The first round has no rounds behind it that may be borne: it is answered.
    rounds = []

    def second_fails(order, reply):
        number = int(order.content["config"]["server-round"])
        rounds.append(number)
        return Message(Error(0, "no power"), reply_to=order) if number == 2 else reply

    once = played("none", honest, sync=sync)
    twice = played("none", second_fails, sync=sync, rounds=2, others=second_fails)
    assert sorted(rounds) == [1] * 5 + [2] * 5 and [entry["cluster"] for entry in twice.failed] == [0, 1, 2, 3, 4]
    assert same(twice.encoder(), once.encoder())
    # A decoder of each cluster's own is averaged by what counted: nothing. That of all has learned.
    assert same(twice.head(), once.head()) == (sync == "round")


VECTORS = [{"w": torch.randn(50, generator=torch.Generator().manual_seed(n))} for n in range(11)]


@pytest.mark.parametrize("rule", ["krum", "multi-krum", "trimmed-mean", "median", "bulyan"])
def test_the_largest_numbers_that_there_are_do_not_get_past_a_robust_rule(rule):
    """Their squares are beyond the largest, and distances from them no numbers."""
    num_honest = clusters_for(rule) - 1
    honest_ones = [vector["w"] for vector in VECTORS[:num_honest]]
    good = np.stack([vector.numpy() for vector in honest_ones])
    order = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    for value, place in itertools.product((3e38, -3e38, 1e20, 1e9), (0, num_honest)):
        vectors = [*honest_ones[:place], torch.full((50,), value), *honest_ones[place:]]
        aggregator = aggregator_of(rule)
        start_from(aggregator, to_arrays({"w": torch.zeros(50)}))
        replies = [
            Message(reply_content({"w": w}, weight=1, loss=1.0, steps=1, wall_s=0.0, report={}), reply_to=order)
            for w in vectors
        ]
        arrays, _ = aggregator.aggregate_train(1, replies)
        found = to_tensors(arrays)["w"].numpy()
        assert (good.min(axis=0) - 1e-5 <= found).all() and (found <= good.max(axis=0) + 1e-5).all(), (value, place)
