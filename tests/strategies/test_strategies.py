"""Policies, stock strategies, and the strategy's own checks."""

import pytest

from helpers.cluster_states import states
from strategies.baselines.flower_strategies import make_stock
from strategies.clusters import check_clusters
from strategies.registry import STRATEGIES, stock_strategies, strategy_class, traits_of


def test_two_nodes_of_one_cluster_are_refused():
    twice = [states()[0], states()[0]]
    twice[1].node_id = 7
    with pytest.raises(ValueError, match="nodes 100 and 7 both say they are cluster 0"):
        check_clusters(twice, 1)


def test_a_cluster_that_no_node_is_is_missed():
    with pytest.raises(ValueError, match="no node is cluster 0, 3 of 4; give the nodes the partition-ids 0 to 3"):
        check_clusters(states()[1:], 4)


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedYogi", "Krum", "FedMedian", "FedTrimmedAvg", "FedAvgM"])
def test_stock_strategies_train_on_all_clusters_and_leave_evaluation_to_the_server(name):
    strategy = make_stock(name, {}, num_clusters=3)
    assert strategy.fraction_evaluate == 0
    assert strategy.min_train_nodes == strategy.min_available_nodes == 3


def test_mistakes_in_strategy_names_and_options_are_named():
    assert {"FedAvg", "FedAdam", "Krum"} <= set(stock_strategies())
    with pytest.raises(ValueError, match="strategy: expected collapipe, .*FedAvg.* found 'FedNothing'"):
        make_stock("FedNothing", {}, 2)
    with pytest.raises(ValueError, match="FedProx: proximal_mu = 0.1, but the control units add no proximal term"):
        make_stock("FedProx", {"proximal_mu": 0.1}, 2)
    assert not any(name.startswith(("FedXgb", "Differential")) for name in stock_strategies())
    with pytest.raises(ValueError, match="strategy-options: FedAvg takes no argument 'etaa'"):
        make_stock("FedAvg", {"etaa": 1}, 2)


def test_any_strategy_is_found_by_module_and_class():
    strategy = make_stock("flwr.serverapp.strategy:FedMedian", {}, 3)
    assert type(strategy).__name__ == "FedMedian" and strategy.min_train_nodes == 3
    with pytest.raises(ValueError, match="cannot import no_such_module"):
        make_stock("no_such_module:Thing", {}, 2)
    with pytest.raises(ValueError, match="'json:JSONDecoder': expected a class of flwr.*.Strategy, found one that"):
        make_stock("json:JSONDecoder", {}, 2)


def test_activations_and_labels_go_to_the_decoder_of_collapipe_and_the_split_baselines_alone():
    names = [*STRATEGIES, *stock_strategies()]
    served = [name for name in names if traits_of(strategy_class(name)).decoder_on_server]
    assert served == ["collapipe", "splitlora", "splitfrozen"] and len(names) > 10
