"""The server's optimizer on the clusters' average: its formulas, and a memory that outlives its process."""

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from strategies.aggregation.config import SERVER_OPTIMIZERS, ServerOptimizerConfig
from strategies.aggregation.server_optimizers import averaging_strategy, memory_of, remember
from strategies.planned_strategy import start_from
from strategies.records import reply_content, to_arrays, to_tensors

START = {"b": torch.tensor([1.0, -2.0]), "a.w": torch.tensor([[0.5]]), "scale": torch.tensor(3.0)}


@pytest.fixture(autouse=True)
def flower_process(monkeypatch):
    """Messages can only be made in a process that Flower runs."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


def replies(number):
    """Return the replies of two clusters, of 1 and 3 targets."""
    generator = torch.Generator().manual_seed(number)
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    return [
        Message(
            reply_content(
                {name: value + torch.randn(value.shape, generator=generator) for name, value in START.items()},
                weight=weight,
                loss=1.0,
                steps=1,
                wall_s=0.0,
                report={},
            ),
            reply_to=asked,
        )
        for weight in (1, 3)
    ]


def after(strategy, weights, number):
    """One round as the strategy takes it."""
    start_from(strategy, to_arrays(weights))
    arrays, _ = strategy.aggregate_train(number, replies(number))
    return {name: value.float() for name, value in to_tensors(arrays).items()}


def average(number):
    light, heavy = (to_tensors(r.content["arrays"]) for r in replies(number))
    return {name: (light[name] + 3 * heavy[name]) / 4 for name in light}


def test_without_a_server_optimizer_the_average_itself_is_taken_on():
    found = after(averaging_strategy(ServerOptimizerConfig()), START, 1)
    for name, value in average(1).items():
        torch.testing.assert_close(found[name], value)


def test_fedavgm_is_sgd_with_momentum_on_the_way_to_the_average():
    strategy = averaging_strategy(ServerOptimizerConfig(name="fedavgm", lr=0.5, momentum=0.9))
    weights = {name: value.clone().requires_grad_() for name, value in START.items()}
    reference = torch.optim.SGD(weights.values(), lr=0.5, momentum=0.9)
    found = START
    for number in (1, 2, 3):
        found = after(strategy, found, number)
        for name, value in weights.items():
            value.grad = value.detach() - average(number)[name]
        reference.step()
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value.detach())


def test_fedadam_follows_its_formula():
    config = ServerOptimizerConfig(name="fedadam", lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3)
    found = after(averaging_strategy(config), START, 1)
    for name, value in START.items():
        delta = average(1)[name] - value
        rate = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
        torch.testing.assert_close(found[name], value + rate * 0.1 * delta / ((0.01 * delta**2).sqrt() + 1e-3))


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_a_strategy_with_its_memory_back_goes_on_bit_for_bit(name):
    config = ServerOptimizerConfig(name=name, lr=0.1)
    straight = averaging_strategy(config)
    weights = START
    for number in (1, 2):
        weights = after(straight, weights, number)
    memory = memory_of(straight)
    assert bool(memory) == (name != "none")
    resumed = averaging_strategy(config)
    remember(resumed, {key: value.clone() for key, value in memory.items()})
    expected, found = after(straight, weights, 3), after(resumed, weights, 3)
    forgetful = after(averaging_strategy(config), weights, 3)
    assert all(torch.equal(expected[n], found[n]) for n in expected)
    assert name == "none" or not all(torch.equal(expected[n], forgetful[n]) for n in expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "adam"}, "server-optimizer.name: expected one of none, fedavgm, fedadagrad, fedadam, fedyogi"),
        ({"lr": 0.0}, "server-optimizer.lr: expected a number above 0, found 0.0"),
        ({"momentum": 1.0}, r"server-optimizer.momentum: expected a number in \[0, 1\), found 1.0"),
    ],
)
def test_values_that_cannot_train_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServerOptimizerConfig(**given)


def test_a_baseline_takes_no_server_optimizer():
    from client_pipeline.system.scenario import load_scenario
    from flower_app.config.run_config import RunConfig
    from flower_app.config.strategy_choice import make_planner

    config = RunConfig.from_flat({"strategy": "titanic", "server-optimizer.name": "fedadam"})
    with pytest.raises(ValueError, match="server-optimizer.name: fedadam needs strategy = collapipe"):
        make_planner(config, load_scenario("default"))
