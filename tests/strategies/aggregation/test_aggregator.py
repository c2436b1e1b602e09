"""Rules that bear with poisoned clusters: alone, and in real rounds with one cluster that turns its update round."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, RecordDict

from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.training.network import training_scenario
from helpers.federation import answer, learned, loss_of, rounds_of, trained
from helpers.simulation import simulate
from strategies.aggregation.config import AGGREGATORS, AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.rules import build_aggregator, check_clusters_of_rule, fewest_clusters
from strategies.collapipe import weight_mismatch
from strategies.decoder.member import ClusterSummary
from strategies.planned_strategy import start_from
from strategies.records import reply_content, to_arrays, to_tensors

NO_OPTIMIZER = ServerOptimizerConfig()
POISONED, NUM_CLUSTERS = 2, 7


def replies(vectors):
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    return [
        Message(reply_content(weights, weight=1 + i, loss=1.0, steps=1, wall_s=0.0, report={}), reply_to=asked)
        for i, weights in enumerate(vectors)
    ]


def joined(config, start, vectors):
    # What a round brings may be less than it was planned for.
    aggregator = build_aggregator(config, NO_OPTIMIZER, num_clusters=max(len(vectors), fewest_clusters(config)))
    start_from(aggregator, to_arrays(start))
    arrays, _ = aggregator.aggregate_train(1, replies(vectors))
    return None if arrays is None else to_tensors(arrays)


def vectors_around(start, number, spread=0.01):
    generator = torch.Generator().manual_seed(3)
    return [
        {name: value + spread * torch.randn(value.shape, generator=generator) for name, value in start.items()}
        for _ in range(number)
    ]


START = {"w": torch.tensor([1.0, -2.0, 3.0]), "a": torch.tensor([[0.5]]), "scalar": torch.tensor(2.0)}


def stacked(vectors, name):
    return np.stack([v[name].numpy() for v in vectors])


def test_median_and_trimmed_mean_go_weight_by_weight(flower_process):
    vectors = vectors_around(START, 5, spread=1.0)
    median = joined(AggregatorConfig(name="median"), START, vectors)
    trimmed = joined(AggregatorConfig(name="trimmed-mean", trim=0.25), START, vectors)
    for name, value in START.items():
        assert median[name].shape == value.shape and median[name].dtype == torch.float32
        np.testing.assert_allclose(median[name], np.median(stacked(vectors, name), axis=0), rtol=1e-5, atol=1e-6)
        inner = np.sort(stacked(vectors, name), axis=0)[1:-1]
        np.testing.assert_allclose(trimmed[name], inner.mean(axis=0), rtol=1e-5, atol=1e-6)


def krum_scores(vectors, malicious):
    """Return the scores of Blanchard et al., in plain loops and double precision."""
    flat = [np.concatenate([v[name].double().numpy().ravel() for name in v]) for v in vectors]
    scores = []
    for i, one in enumerate(flat):
        far = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(flat) if j != i)
        scores.append(sum(far[: len(flat) - malicious - 2]))
    return scores


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_krum_takes_the_update_nearest_to_most_others_however_large_the_weights_are(flower_process, scale):
    """Told by its whole weights Flower's Krum loses the differences in the rounding of squared norms."""
    start = {name: scale * value for name, value in START.items()}
    vectors = vectors_around(start, 6, spread=0.5)
    vectors[4] = {name: value + 300 for name, value in start.items()}
    best = int(np.argmin(krum_scores(vectors, 1)))
    found = joined(AggregatorConfig(name="krum"), start, vectors)
    for name in start:
        torch.testing.assert_close(found[name], vectors[best][name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("keep", "kept"), [(0, 5), (3, 3)])
def test_multi_krum_averages_the_best_by_their_weights(flower_process, keep, kept):
    vectors = vectors_around(START, 6, spread=0.5)
    vectors[0] = {name: value - 50 for name, value in START.items()}
    chosen = np.argsort(krum_scores(vectors, 1))[:kept]
    assert 0 not in chosen
    found = joined(AggregatorConfig(name="multi-krum", keep=keep), START, vectors)
    for name in START:
        weights = np.array([1.0 + i for i in chosen])
        expected = np.tensordot(weights / weights.sum(), stacked([vectors[i] for i in chosen], name), axes=1)
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)


def test_with_too_few_answers_nothing_changes(flower_process):
    """Two of five have failed, of whom one may be malicious."""
    assert joined(AggregatorConfig(name="krum"), START, vectors_around(START, 3)) is None
    assert joined(AggregatorConfig(name="krum"), START, vectors_around(START, 4)) is not None
    assert joined(AggregatorConfig(name="median", malicious=2), START, vectors_around(START, 2)) is None
    assert joined(AggregatorConfig(name="median", malicious=2), START, []) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(AGGREGATORS) - {"mean"}))
def test_a_cluster_that_fails_is_the_one_that_the_rule_may_bear_with(flower_process, name):
    """With as few clusters as the rule needs, one that never answers used to stop all learning."""
    config = AggregatorConfig(name=name)
    vectors = vectors_around(START, fewest_clusters(config) - 1, spread=1.0)
    found = joined(config, START, vectors)
    assert found is not None
    free = joined(config, START, [*vectors, vectors[0]])
    assert found.keys() == free.keys()
    for key in START:
        stack = stacked(vectors, key)
        assert (found[key].numpy() >= stack.min(axis=0) - 1e-5).all()
        assert (found[key].numpy() <= stack.max(axis=0) + 1e-5).all()
        if name == "trimmed-mean":
            np.testing.assert_allclose(found[key], stack.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_rule_still_bears_with_the_malicious_ones_that_are_left(flower_process):
    config = AggregatorConfig(name="krum", malicious=2)
    vectors = vectors_around(START, 6, spread=0.1)
    vectors[3] = {name: value + 50 for name, value in START.items()}
    found = joined(config, START, vectors)
    assert found is not None
    best = int(np.argmin(krum_scores(vectors, 1)))
    for name in START:
        torch.testing.assert_close(found[name], vectors[best][name], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [
        ({"name": "mean"}, 1),
        ({"name": "krum"}, 5),
        ({"name": "krum", "malicious": 2}, 7),
        ({"name": "multi-krum", "keep": 6}, 7),
        ({"name": "trimmed-mean"}, 5),
        ({"name": "trimmed-mean", "trim": 0.4}, 3),
        ({"name": "trimmed-mean", "malicious": 2, "trim": 0.1}, 20),
        ({"name": "median"}, 3),
        ({"name": "bulyan"}, 7),
    ],
)
def test_a_rule_knows_how_many_clusters_it_needs(settings, fewest):
    config = AggregatorConfig(**settings)
    assert fewest_clusters(config) == fewest
    check_clusters_of_rule(config, fewest)
    if fewest > 1:
        with pytest.raises(
            ValueError, match=f"aggregator.name: .* needs {fewest} clusters in a round, found {fewest - 1}"
        ):
            check_clusters_of_rule(config, fewest - 1)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"aggregator.name": "mode"}, "aggregator.name: expected one of mean, krum"),
        ({"aggregator.malicious": 0}, "aggregator.malicious: expected at least 1"),
        ({"aggregator.trim": 0.5}, "aggregator.trim: expected a number between 0 and 0.5"),
        ({"aggregator.name": "krum"}, "krum with aggregator.malicious = 1 needs 5 clusters in a round, found 3"),
        (
            {"aggregator.name": "median", "server-optimizer.name": "fedadam"},
            "median and server-optimizer.name = fedadam",
        ),
        ({"aggregator.name": "median", "strategy": "titanic"}, "median needs strategy = collapipe"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_any_work(flat, message):
    with pytest.raises(ValueError, match=message):
        config = RunConfig.from_flat(flat)
        make_planner(config, training_scenario(config))


def poisoned(message, cluster):
    """One cluster goes a hundred times as far as it should, the other way."""
    order, start, weights, weight, loss = trained(message, cluster)
    if cluster == POISONED:
        weights = {name: start[name] - 100 * (weights[name] - start[name]) for name in weights}
    return answer(message, order, weights, weight, loss)


@pytest.mark.slow
def test_one_poisoned_cluster_breaks_the_mean_and_none_of_the_others():
    initial = learned(NUM_CLUSTERS, steps=20)

    def server(grid):
        import strategies

        return {
            name: rounds_of(
                grid,
                NUM_CLUSTERS,
                lambda n=name, **given: strategies.CollaPipe(
                    aggregator=build_aggregator(AggregatorConfig(name=n), NO_OPTIMIZER, num_clusters=NUM_CLUSTERS),
                    **given,
                ),
                initial,
            )[0]
            for name in AGGREGATORS
        }

    found = simulate(server, poisoned, num_nodes=NUM_CLUSTERS)
    good = [n for n in range(NUM_CLUSTERS) if n != POISONED]
    before, after = loss_of(initial, good), {name: loss_of(weights, good) for name, weights in found.items()}
    print({"before": before} | after)
    # Worse than a guess among four labels.
    assert not after["mean"] < math.log(4), after
    for name in set(AGGREGATORS) - {"mean"}:
        assert after[name] < 0.9 * before < 1, after


@pytest.mark.parametrize(
    ("claimed", "steps", "counts"),
    [
        (72, 3, True),
        (71, 3, True),
        (73, 3, False),
        (10**9, 3, False),
        (0, 0, False),
        (24, 0.5, False),
        (math.nan, 3, False),
        (-72, 3, False),
        (0, 3, False),
    ],
)
def test_a_cluster_that_claims_more_than_the_decoder_has_seen_of_it_does_not_count(
    flower_process, claimed, steps, counts
):
    (reply,) = replies([START])
    reply.content["metrics"]["num-examples"] = claimed
    summary = ClusterSummary(steps=steps, weight=24.0 * steps, loss=1.0, departure=None)
    assert (weight_mismatch(reply, summary) is None) == counts
    assert "left the decoder's round: cut" in weight_mismatch(reply, replace(summary, departure="cut"))
