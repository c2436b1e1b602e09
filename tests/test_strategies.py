"""Policies, stock strategies, and the strategy's own checks."""

import json

import pytest

from client_pipeline.partition.plan import ClusterPlan, write_plans
from client_pipeline.system.scenario import load_scenario
from strategies.clusters import ClusterState, check_clusters, declared_clusters
from strategies.policies import FixedPolicy, RoundProblem, UniformPolicy, make_policy
from strategies.stock import make_stock, stock_strategies


def states():
    found = declared_clusters(load_scenario("default"), 3)
    for state in found:
        state.node_id = 100 + state.cluster
    return found


def problem(num_blocks=4, batch_size=8):
    return RoundProblem(round=1, num_blocks=num_blocks, batch_size=batch_size, clusters=states())


def test_uniform_plans_fit_every_cluster():
    for state, plan in zip(states(), UniformPolicy().plan(problem(num_blocks=9)), strict=True):
        plan.check(
            num_blocks=9,
            batch_size=8,
            num_devices=6,
            memory=state.memories,
            block_memory=state.block_memory,
        )
        assert len(plan.segments()) == 4  # ceil(9 / 4) + 1 devices that hold 4 TEBs each


def test_cluster_states_survive_the_wire():
    for state in states():
        assert ClusterState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_two_nodes_of_one_cluster_are_refused():
    twice = [states()[0], states()[0]]
    twice[1].node_id = 7
    with pytest.raises(ValueError, match="nodes 100 and 7 both say they are cluster 0"):
        check_clusters(twice, 1)


def test_a_cluster_that_no_node_is_is_missed():
    with pytest.raises(ValueError, match="no node is cluster 0, 3 of 4; give the nodes the partition-ids 0 to 3"):
        check_clusters(states()[1:], 4)


def test_a_plan_file_is_checked_against_each_cluster(tmp_path):
    good = ClusterPlan(delta=(4, 0, 0, 0, 0, 0), order=(0,), m=2)
    write_plans(tmp_path / "short.json", [good])
    with pytest.raises(ValueError, match="has plans for 1 clusters, expected one for cluster 1"):
        FixedPolicy(tmp_path / "short.json").plan(problem())
    heavy = ClusterPlan(delta=(5, 0, 0, 0, 0, 0), order=(0,), m=2)
    write_plans(tmp_path / "heavy.json", [good, heavy, good])
    with pytest.raises(ValueError, match=r"clusters\[1\]: delta .* sums to 5, expected the model's L = 4"):
        FixedPolicy(tmp_path / "heavy.json").plan(problem())
    with pytest.raises(ValueError, match=r"clusters\[0\]: delta"):
        FixedPolicy(tmp_path / "heavy.json").plan(problem(num_blocks=5))
    write_plans(tmp_path / "memory.json", [heavy] * 3)
    with pytest.raises(ValueError, match=r"device 0 holds 5 TEBs of 0.375 GB = 1.88 GB, but has 1.5 GB \(C7\)"):
        FixedPolicy(tmp_path / "memory.json").plan(problem(num_blocks=5))


def test_policies_are_found_by_name(tmp_path):
    assert make_policy("uniform", "").name == "uniform"
    write_plans(tmp_path / "plan.json", [ClusterPlan(delta=(4,), order=(0,), m=1)])
    assert make_policy("uniform", str(tmp_path / "plan.json")).name == "fixed"
    with pytest.raises(ValueError, match="policy: fixed needs a plan file"):
        make_policy("fixed", "")
    with pytest.raises(ValueError, match="policy: expected one of uniform, fixed, found 'best'"):
        make_policy("best", "")
    with pytest.raises(FileNotFoundError, match="no file"):
        make_policy("uniform", str(tmp_path / "absent.json"))


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedYogi", "Krum", "FedMedian", "FedTrimmedAvg", "FedAvgM"])
def test_stock_strategies_train_on_all_clusters_and_leave_evaluation_to_the_server(name):
    strategy = make_stock(name, {}, num_clusters=3)
    assert strategy.fraction_evaluate == 0
    assert strategy.min_train_nodes == strategy.min_available_nodes == 3


def test_strategy_options_reach_the_constructor():
    assert make_stock("FedAdam", {"eta": 0.5}, 2).eta == 0.5


def test_mistakes_in_strategy_names_and_options_are_named():
    assert {"FedAvg", "FedAdam", "Krum"} <= set(stock_strategies())
    with pytest.raises(ValueError, match="strategy: expected collapipe or one of .*FedAvg.*, found 'FedNothing'"):
        make_stock("FedNothing", {}, 2)
    with pytest.raises(ValueError, match="FedProx: proximal_mu = 0.1, but the control units add no proximal term"):
        make_stock("FedProx", {"proximal_mu": 0.1}, 2)
    assert not any(name.startswith(("FedXgb", "Differential")) for name in stock_strategies())
    with pytest.raises(ValueError, match="strategy-options: FedAvg takes no argument 'etaa'"):
        make_stock("FedAvg", {"etaa": 1}, 2)
