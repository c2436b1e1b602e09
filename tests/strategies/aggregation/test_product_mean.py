"""The mean of adapters by their products: against dense matrices, and where it is refused."""

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, RecordDict

from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.training.network import training_scenario
from helpers.tiny_models import tiny_spec
from strategies.aggregation.adapter_products import Factors, leading_factors, mean_product
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.product_mean import arrays_of_cluster
from strategies.aggregation.rules import build_aggregator
from strategies.planned_strategy import start_from
from strategies.records import reply_content, to_arrays, to_tensors
from strategies.registry import STRATEGIES, stock_strategies, traits_by_name

OUT, IN = 11, 7
PRODUCTS = LoraConfig(rank=3, average="products")


def factors(rank, seed, scale=1.0):
    draw = np.random.default_rng(seed)
    return Factors(scale * draw.standard_normal((OUT, rank)), draw.standard_normal((rank, IN)))


def dense(pair):
    return pair.b @ pair.a


def best(matrix, rank):
    """The nearest matrix of a rank, by numpy's own decomposition."""
    left, values, right = np.linalg.svd(matrix)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (0.2, 0.3, 0.5)])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_mean_is_the_best_matrix_of_its_rank_to_the_mean_of_products(shares, rank):
    start = factors(rank, 0)
    trained = [(share, factors(rank, 1 + n)) for n, share in enumerate(shares)]
    joined, truncated = mean_product(start, trained, [start] * len(trained))
    exact = sum(share * dense(pair) for share, pair in trained)
    np.testing.assert_allclose(dense(joined), best(exact, rank), atol=1e-9)
    assert joined.rank == rank
    lost = np.linalg.norm(exact - best(exact, rank)) / np.linalg.norm(exact)
    assert truncated == pytest.approx(lost, abs=1e-9)
    # The factors' means multiply to something else, unless there is one cluster.
    means = [sum(share * pair[i] for share, pair in trained) for i in range(2)]
    assert np.allclose(means[0] @ means[1], exact) == (len(shares) == 1)


def test_a_cluster_of_a_lower_rank_says_nothing_of_what_it_has_not_seen():
    start = factors(4, 0)
    begun = [start, leading_factors(start, 2)]
    np.testing.assert_allclose(dense(begun[1]), best(dense(start), 2), atol=1e-9)
    # Nobody has trained: the start comes back, though one cluster has a part of it alone.
    joined, truncated = mean_product(start, [(0.5, begun[0]), (0.5, begun[1])], begun)
    np.testing.assert_allclose(dense(joined), dense(start), atol=1e-9)
    assert truncated == pytest.approx(0, abs=1e-9)
    trained = [factors(4, 1, scale=0.1), factors(2, 2, scale=0.1)]
    joined, _ = mean_product(start, [(0.5, trained[0]), (0.5, trained[1])], begun)
    exact = dense(start) + 0.5 * (dense(trained[0]) - dense(start)) + 0.5 * (dense(trained[1]) - dense(begun[1]))
    np.testing.assert_allclose(dense(joined), best(exact, 4), atol=1e-9)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_directions_that_no_product_uses_go_on_as_they_were(used):
    """Updates of a lower rank than the factors leave rows of A free: those of the start stay, and B begins at 0."""
    start, trained = factors(3, 0), factors(3, 1)
    trained = Factors(trained.b * (np.arange(3) < used), trained.a)
    joined, truncated = mean_product(start, [(1.0, trained)], [start])
    np.testing.assert_allclose(dense(joined), dense(trained), atol=1e-9)
    assert truncated == pytest.approx(0, abs=1e-9)
    # All of the cluster's A is in the row space, for the next round to go on with.
    np.testing.assert_allclose(joined.a @ np.linalg.pinv(trained.a) @ trained.a, joined.a, atol=1e-9)
    assert np.linalg.matrix_rank(joined.a) == 3 and np.linalg.matrix_rank(joined.b, tol=1e-9) == used


def test_rows_of_a_are_as_long_as_they_were_where_the_mean_says_nothing_of_them():
    start = factors(3, 0)
    leading = leading_factors(start, 2)
    length = np.linalg.norm(start.a) / np.sqrt(3)
    np.testing.assert_allclose(np.linalg.norm(leading.a, axis=1), [length] * 2, rtol=1e-9)
    assert leading_factors(start, 3) is start
    # One product by two clusters with opposite factors: their means are 0.
    one = factors(3, 1)
    joined, _ = mean_product(start, [(0.5, one), (0.5, Factors(-one.b, -one.a))], [start] * 2)
    np.testing.assert_allclose(dense(joined), dense(one), atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(joined.a, axis=1), [length] * 3, rtol=1e-9)


def layer(rank, seed):
    pair = factors(rank, seed)
    name = "blocks.0.query.lora_{}.default.weight"
    arrays = {name.format("A"): torch.from_numpy(pair.a).float(), name.format("B"): torch.from_numpy(pair.b).float()}
    return arrays | {"blocks.0.norm.weight": torch.full((4,), float(seed))}


def replies(updates):
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    return [
        Message(reply_content(arrays, weight=1 + i, loss=1.0, steps=1, wall_s=0.0, report={}), reply_to=asked)
        for i, arrays in enumerate(updates)
    ]


def aggregator(lora):
    return build_aggregator(AggregatorConfig(), ServerOptimizerConfig(), num_clusters=2, adapters=lora)


def test_a_round_joins_adapters_of_different_ranks_and_averages_all_else(flower_process):
    rule = aggregator(LoraConfig(rank=3, average="products", cluster_ranks="3,2"))
    start = to_arrays(layer(3, 0))
    start_from(rule, start)
    sent = [to_tensors(arrays_of_cluster(rule, n, start)) for n in range(2)]
    name_a, name_b, norm = sent[0]
    assert [arrays[name_a].shape[0] for arrays in sent] == [3, 2]
    assert all(array.dtype == torch.float32 for arrays in sent for array in arrays.values())
    updates = [layer(3, 1), layer(2, 2)]
    arrays, metrics = rule.aggregate_train(1, replies(updates))
    joined = to_tensors(arrays)
    assert list(joined) == list(sent[0]) and metrics is not None
    changes = [u[name_b] @ u[name_a] - s[name_b] @ s[name_a] for u, s in zip(updates, sent, strict=True)]
    exact = sent[0][name_b] @ sent[0][name_a] + changes[0] / 3 + changes[1] * 2 / 3
    np.testing.assert_allclose(joined[name_b] @ joined[name_a], best(exact.numpy(), 3), atol=1e-4)
    np.testing.assert_allclose(joined[norm], torch.full((4,), (1 * 1 + 2 * 2) / 3.0), rtol=1e-6)
    assert 0 < rule.truncated < 1
    assert rule.aggregate_train(2, []) == (None, None)


def test_a_cluster_of_a_lower_rank_has_the_same_scale_and_a_specification_of_its_own():
    spec = ModelSpec(family="bert", head="masked-lm", lora=LoraConfig(rank=8, average="products", cluster_ranks="8, 2"))
    assert ModelSpec.from_json(spec.to_json()) == spec
    own = ModelSpec.from_json(spec.to_json()).of_cluster(1).lora
    assert (own.rank, own.alpha / own.rank) == (2, 16 / 8)
    assert tiny_spec("bert").of_cluster(1) == tiny_spec("bert")
    # As older runs have it.
    assert "average" not in ModelSpec(family="bert", head="masked-lm", lora=LoraConfig()).to_json()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"average": "sums"}, "lora.average: expected one of factors, products, found 'sums'"),
        (
            {"average": "products", "cluster_ranks": "8,9"},
            "lora.cluster-ranks: expected whole numbers from 1 to lora.r",
        ),
        ({"average": "products", "cluster_ranks": "8,,2"}, "lora.cluster-ranks: expected whole numbers .* '8,,2'"),
        ({"cluster_ranks": "8,4"}, 'lora.cluster-ranks: 8,4: .*set lora.average = "products"'),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_key(settings, said):
    with pytest.raises(ValueError, match=said):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        (
            {"strategy": "FedAdam", "lora.cluster-ranks": "8,4"},
            "lora.cluster-ranks: strategy = FedAdam averages arrays",
        ),
        ({"strategy": "FedAvg"}, "lora.average: strategy = FedAvg averages arrays of one shape"),
        ({"strategy": "vanilla-fl"}, "lora.average: strategy = vanilla-fl averages arrays of one shape"),
        ({"lora.cluster-ranks": "8,4,2"}, "lora.cluster-ranks: expected a rank for each of the 2 clusters, found 3"),
        ({"model.trainable": "full"}, "lora.average: products is of adapters, found model.trainable = 'full'"),
        ({"aggregator.name": "median"}, "lora.average: products .* found aggregator.name = median"),
        ({"server-optimizer.name": "fedadam"}, "lora.average: products .* found server-optimizer.name = fedadam"),
    ],
)
def test_who_does_not_heed_products_and_ranks_refuses_them_by_name(flat, said):
    base = {"lora.average": "products", "model.trainable": "lora", "scenario": "two-clusters"}
    config = RunConfig.from_flat(base | flat)
    with pytest.raises(ValueError, match=said):
        make_planner(config, training_scenario(config))


@pytest.mark.parametrize(
    "strategy", [*stock_strategies(), *(name for name in STRATEGIES if not traits_by_name(name).takes_aggregator)]
)
def test_every_strategy_without_aggregator_refuses_ranks_of_clusters_by_its_name_and_what_was_found(strategy):
    flat = {"lora.average": "products", "lora.cluster-ranks": "8,4", "model.trainable": "lora", "strategy": strategy}
    config = RunConfig.from_flat({"scenario": "two-clusters", **flat})
    said = (
        f"lora.cluster-ranks: strategy = {strategy} averages arrays of one shape, number by number, found 8,4; leave "
    )
    with pytest.raises(ValueError, match=said):
        make_planner(config, training_scenario(config))


def test_noise_of_the_server_excludes_it():
    privacy = PrivacyConfig(update_clip=1.0, update_noise=1.0, update_mechanism="server-fixed")
    with pytest.raises(ValueError, match="lora.average: products .* found privacy"):
        build_aggregator(AggregatorConfig(), ServerOptimizerConfig(), privacy, num_clusters=3, adapters=PRODUCTS)
