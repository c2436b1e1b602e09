"""Baselines that tune adapters equal plain references of their definitions, in one process, after two rounds."""

import itertools
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.control_unit.data_order import DataOrder
from flower_app.compare.quote import quote
from flower_app.config.sources import load_config
from flower_app.config.strategy_choice import make_planner
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.runs.run_directory import read_rounds
from flower_app.tasks.base import task
from flower_app.training.network import training_scenario
from helpers.command_line import TINY
from strategies.aggregation.adapter_products import Factors
from strategies.baselines.adapters import SingularMean
from strategies.registry import STRATEGIES, strategy_class, traits_by_name, traits_of

LR, TEBS, RANK = 0.5, 4, 4
SETTINGS = {
    "scenario": "two-clusters",
    "task.name": "causal-lm",
    "model.family": "llama",
    "model.trainable": "lora",
    "lora.rank": RANK,
    "lora.head": "adapters",
    "num-rounds": 2,
    "local-steps": 2,
    "optimizer.name": "sgd",
    "optimizer.lr": LR,
    "optimizer.schedule": "constant",
    "checkpoint-every": 1,
}
CASES = {
    "splitlora": {},
    "splitfrozen": {"lora.first-block": TEBS},
    "fedlora": {},
    "flexlora": {"lora.average": "products", "lora.cluster-ranks": "4,2"},
    "local": {},
}


def config_of(name, **more):
    values = TINY | SETTINGS | CASES[name] | {"strategy": name} | more
    return load_config(None, [f"{key}={value}" for key, value in values.items()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run directories of all five, trained in one simulation."""
    folder = tmp_path_factory.mktemp("adapters")
    configs = {name: config_of(name, **{"run-dir": folder / name}) for name in CASES}
    train_series([SeriesRun(name, config) for name, config in configs.items()], folder / "session", print)
    return folder


class Reference:
    """A whole model in this process, the clusters' data, and SGD."""

    def __init__(self, config):
        shares = training_scenario(config).data_shares
        assert len(set(shares)) == 1
        chosen = task(config.task)
        prepared = chosen.prepare(config.data, config.model, config.seed, 2)
        prepared = replace(prepared, spec=config.adapted(prepared.spec))
        self.parts = prepared.build(config.seed)
        self.start = self.parts.weights()
        self.data = [chosen.cluster_data(config.data, prepared.tokenizer_json, n, 2, config.seed) for n in range(2)]
        self.orders = [DataOrder(len(d), config.batch_size, config.seed, n) for n, d in enumerate(self.data)]

    def gradient(self, cluster, weights):
        """Gradient of the sum of losses of a cluster's next batch, by name, and its number of targets."""
        batch = self.data[cluster].collate(self.orders[cluster].next_batch(), 0)
        parameters = dict(self.parts.named_parameters())
        self.parts.load(weights)
        with ExitStack() as held:
            for block in self.parts.on_demand:
                held.enter_context(block.held())
            gradients = torch.autograd.grad(self.parts.loss_sum(batch), list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True)), target_weight(targets(batch))


def stepped(weights, gradients, divisor):
    return {name: value - LR * gradients[name] / divisor for name, value in weights.items()}


def mean(models, shares):
    return {name: sum(m[name] * s for m, s in zip(models, shares, strict=True)) for name in models[0]}


def on_clients(reference, starts, join):
    """Every client steps its own copy of the model; ``join`` makes of the copies what they go on with."""
    models = list(starts)
    for _ in range(2):
        seen = [0, 0]
        for _ in range(2):
            for n in range(2):
                gradients, weight = reference.gradient(n, models[n])
                models[n], seen[n] = stepped(models[n], gradients, weight), seen[n] + weight
        models = join(models, [weight / sum(seen) for weight in seen])
    return models


def split(reference):
    """Clients step the TEBs, each by its own data; the server its part, by all; then the clients' mean."""
    weights = reference.start
    server = {name: value for name, value in weights.items() if name.startswith("head.")}
    clients = [{name: value for name, value in weights.items() if name not in server}] * 2
    for _ in range(2):
        seen = [0, 0]
        for _ in range(2):
            found = [reference.gradient(n, clients[n] | server) for n in range(2)]
            total = sum(weight for _, weight in found)
            summed = {name: sum(gradients[name] for gradients, _ in found) for name in server}
            clients = [stepped(clients[n], *found[n]) for n in range(2)]
            server = stepped(server, summed, total)
            seen = [before + weight for before, (_, weight) in zip(seen, found, strict=True)]
        clients = [mean(clients, [weight / sum(seen) for weight in seen])] * 2
    return clients[0] | server


def padded(weights, rank):
    """Factors of a lower rank, the others 0: they stay so."""
    cut = dict(weights)
    for name in weights:
        if ".lora_B." in name:
            cut[name] = weights[name] * (torch.arange(RANK) < rank)
        elif ".lora_A." in name:
            cut[name] = weights[name] * (torch.arange(RANK) < rank)[:, None]
    return cut


def redistributed(models, shares):
    """FlexLoRA: the mean of B A, decomposed as a whole matrix; each client's leading factors."""
    joined = {}
    for b_name in (name for name in models[0] if ".lora_B." in name):
        a_name = b_name.replace(".lora_B.", ".lora_A.")
        product = sum(s * m[b_name].double() @ m[a_name].double() for m, s in zip(models, shares, strict=True))
        left, values, right = np.linalg.svd(product.numpy())
        joined[b_name] = torch.from_numpy(left[:, :RANK] * values[:RANK]).float()
        joined[a_name] = torch.from_numpy(right[:RANK]).float()
    assert joined.keys() == models[0].keys()
    return joined


def products(weights):
    """What adapters add to the frozen matrices, whichever way it is factored; all else as it is."""
    return {
        name: weights[name] @ weights[name.replace(".lora_B.", ".lora_A.")] if ".lora_B." in name else weights[name]
        for name in weights
        if ".lora_A." not in name
    }


def weights_of(trained, name):
    return load_file(trained / name / "checkpoint" / "round-000002" / "weights.safetensors")


def distance(found, wanted):
    """Relative difference of one name."""
    return lambda name: float((found[name] - wanted[name]).norm() / wanted[name].norm())


def expected(name, config):
    reference = Reference(config)
    starts = [reference.start] * 2
    if name in ("splitlora", "splitfrozen"):
        return split(reference)
    if name == "local":
        models = on_clients(reference, starts, lambda models, shares: models)
        return {f"cluster-{n}/{key}": value for n, model in enumerate(models) for key, value in model.items()}
    if name == "fedlora":
        return on_clients(reference, starts, lambda models, shares: [mean(models, shares)] * 2)[0]

    def by_rank(weights):
        return [weights, padded(weights, 2)]

    return on_clients(reference, by_rank(starts[0]), lambda *trained: by_rank(redistributed(*trained)))[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_two_rounds_equal_the_definition(name, trained):
    found, wanted = products(weights_of(trained, name)), products(expected(name, config_of(name)))
    assert found.keys() == wanted.keys() and len(wanted) >= 2
    assert max(map(distance(found, wanted), wanted)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_methods_learn_different_things(trained):
    learnt = {name: products(weights_of(trained, name)) for name in ("splitlora", "fedlora", "flexlora")}
    for one, other in itertools.combinations(learnt.values(), 2):
        assert one.keys() == other.keys() and max(map(distance(one, other), one)) > 1e-3


@pytest.mark.slow
def test_what_they_cost_is_what_they_send_and_waive(trained):
    sent, taken = {}, {}
    for name in CASES:
        for line in read_rounds(trained / name)[0]:
            assert line["plan"]["policy"] == name and line["plan"]["waived"] == ["C7", "C9"]
            assert [cluster["plan"]["delta"].count(0) for cluster in line["clusters"]] == [5, 5]
            assert all(cluster["plan"]["m"] == 1 for cluster in line["clusters"])
        sent[name] = [cluster["payload_bytes"] for cluster in line["clusters"]]
        taken[name] = [cluster["pipeline_s"] for cluster in line["virtual"]["clusters"]]
    for name in ("splitlora", "splitfrozen"):
        assert all(cluster["up"] > 0 for cluster in sent[name])
    for name in ("fedlora", "flexlora", "local"):
        assert all(cluster["up"] == cluster["down"] == 0 for cluster in sent[name])
    assert [(cluster["update"], cluster["down"]) for cluster in sent["splitfrozen"]] == [(0, 0), (0, 0)]
    assert all(frozen < whole for frozen, whole in zip(taken["splitfrozen"], taken["splitlora"], strict=True))
    # The whole model's adapters beside those of the TEBs, and of half the rank.
    assert sent["fedlora"][0]["update"] > sent["splitlora"][0]["update"] > 0
    assert sent["flexlora"][1]["update"] * 2 == sent["flexlora"][0]["update"] == sent["fedlora"][0]["update"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_quote_is_what_the_run_then_took(name, trained):
    document, lines = quote(config_of(name)), read_rounds(trained / name)[0]
    clusters = [cluster for line in lines for cluster in line["virtual"]["clusters"] if cluster["selected"]]
    taken = {
        "seconds": sum(line["virtual"]["latency_s"] for line in lines),
        "joules": sum(line["virtual"]["energy_j"] for line in lines),
        "uplink_bytes": sum(cluster["uplink_bytes"] for cluster in clusters),
        "link_bytes": sum(sum(cluster["link_bytes"]) for cluster in clusters),
    }
    assert {key: document[key] for key in taken} == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_registry_says_of_a_strategy_what_its_class_does(name):
    assert traits_by_name(name) == traits_of(strategy_class(name))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *((name, {"model.trainable": "full", "lora.head": "whole"}, "(tunes|is of) adapters, found") for name in CASES),
        ("splitfrozen", {"lora.first-block": 3}, "trains none of the 4 TEBs of a cluster, found 3; set it to 4"),
        *(
            (name, {"lora.average": "products"}, 'averages the factors, found products; set it to "factors"')
            for name in ("splitlora", "splitfrozen", "fedlora")
        ),
        ("flexlora", {"lora.average": "factors", "lora.cluster-ranks": ""}, "averages the products, found factors"),
        ("splitlora", {"policy": "uniform"}, "policy: splitlora brings its own plan"),
    ],
)
def test_settings_of_another_method_are_refused(name, changes, message):
    config = config_of(name, **changes)
    with pytest.raises(ValueError, match=message):
        make_planner(config, training_scenario(config))


def test_the_mean_of_few_ranks_leaves_orthogonal_rows_to_go_on_with():
    draw = np.random.default_rng(0)
    start = Factors(draw.standard_normal((9, 4)), draw.standard_normal((7, 4)).T)
    trained = Factors(draw.standard_normal((9, 2)), draw.standard_normal((2, 7)))
    rule = SingularMean(LoraConfig(rank=4, average="products", cluster_ranks="2,2"))
    joined, lost = rule.mean(start, [(1.0, trained)])
    np.testing.assert_allclose(joined.b @ joined.a, trained.b @ trained.a, atol=1e-12)
    np.testing.assert_allclose(joined.a @ joined.a.T, np.eye(4), atol=1e-12)
    assert not joined.b[:, 2:].any() and lost == pytest.approx(0, abs=1e-12)
