"""Classes from outside, in one process: what they decide, and what is said of those that do not fit.

``test_outside.py`` trains with the classes of the files ``outside_*.py``.
"""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from typer.testing import CliRunner

from client_pipeline.families.families import build_parts, max_length
from client_pipeline.families.registry import family_named
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.scenario import load_scenario
from flower_app import client_app
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.deployment.control_unit_box import ControlUnitBox
from flower_app.node.config import NodeConfig
from flower_app.saved_model import load_model, save_model
from flower_app.tasks import beam_search
from flower_app.tasks.base import TaskConfig, task
from helpers.outside_family import Convolutions
from helpers.repository import ROOT
from strategies.aggregation.config import AggregatorConfig, ServerOptimizerConfig
from strategies.aggregation.rules import build_aggregator
from strategies.aggregation.update_rule import UpdateRule
from strategies.dssda.answer import Answer
from strategies.planned_strategy import start_from
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy
from strategies.planning.policy import RoundPolicy
from strategies.records import ARRAYS, CONFIG, SETUP, reply_content, to_arrays, to_tensors
from strategies.registry import strategy_class

FAMILY = "helpers.outside_family:Convolutions"
RULE = "helpers.outside_rule:SignVote"
POLICY = "helpers.outside_policy:InTurn"
TASK = "helpers.outside_task:LengthTask"
HERE = __name__
SMALL = ["data.num-examples=60", "data.evaluation-examples=20", "data.vocab-size=300", "model.width=8"]


def rule(name):
    return build_aggregator(AggregatorConfig(name=name), ServerOptimizerConfig(), num_clusters=3)


def family(name):
    return family_named(name).HEADS


KINDS = {
    "policy": (make_policy, POLICY),
    "task.name": (lambda name: task(TaskConfig(name=name)), TASK),
    "model.family": (family, FAMILY),
    "aggregator.name": (rule, RULE),
    "strategy": (strategy_class, "helpers.outside_strategy:TradedModels"),
}


class Nameless(RoundPolicy):
    def plan(self, round_):
        return Answer("feasible", ())


class Empty(Nameless):
    name = "empty"


class Headless(Convolutions):
    HEADS = ("headline",)


class OfTheMean(UpdateRule):
    def join(self, updates, weights, malicious):
        return updates[0]


class Crooked(OfTheMean):
    def join(self, updates, weights, malicious):
        return {"w": np.zeros(2)}


class Fewer(OfTheMean):
    def join(self, updates, weights, malicious):
        return {}


class More(OfTheMean):
    def join(self, updates, weights, malicious):
        return updates[0] | {"v": np.zeros(3)}


class NoChange(OfTheMean):
    def join(self, updates, weights, malicious):
        return None


class Diverged(OfTheMean):
    def join(self, updates, weights, malicious):
        return {"w": np.array([1.0, math.nan, 0.0])}


# What is said of names that are none, for each kind of class.


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "no_such_module:Thing",
            "cannot import no_such_module: No module named .*; expected module:Class, importable by",
        ),
        (":Thing", "cannot import : Empty module name"),
        ("fractions:Fractoin", "expected module:Class, found None in fractions, whose classes are .*Fraction"),
        ("fractions:gcd", "expected module:Class, found None in fractions"),
        ("fractions:Fraction", "expected a class of .*, found one that (lacks|is not derived from it)"),
    ],
)
def test_a_name_that_names_no_such_class_is_refused_by_its_key(key, name, expected):
    make, _ = KINDS[key]
    with pytest.raises(ValueError, match=f"^{re.escape(key)}: {name!r}: {expected}"):
        make(name)


# Policy


def test_commands_that_plan_take_a_policy_and_a_network_from_outside(tmp_path):
    text = (ROOT / "configs" / "scenarios" / "table2.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("clusters = 3", "clusters = 5"))
    network = ["--scenario", str(tmp_path / "mine.toml")]
    planned = CliRunner().invoke(app, ["plan", *network, "--planner", POLICY, "--rounds", "2", "--json"])
    assert planned.exit_code == 0 and planned.stdout.count('"selected": true') == 2 * 4
    compared = CliRunner().invoke(app, ["compare", *network, "--policies", f"uniform,{POLICY}", "--rounds", "4"])
    assert compared.exit_code == 0 and "in-turn" in compared.stdout


# Family and task


def prepared(*sets):
    config = load_config(None, [*SMALL, f"task.name={TASK}", f"model.family={FAMILY}", *sets])
    return config, task(config.task).prepare(config.data, config.model, config.seed, 2)


def test_a_family_finds_the_sizes_of_the_model_and_of_its_tokenizer():
    config, found = prepared("model.encoder-layers=3", "model.max-length=80", "data.max-length=80")
    assert (found.spec.family, family_named(FAMILY).num_blocks(found.spec), family_named(FAMILY).width(found.spec)) == (
        FAMILY,
        3,
        8,
    )
    assert (max_length(found.spec), family_named(found.spec.family).num_classes(found.spec)) == (80, 2)
    assert ModelSpec.from_json(found.spec.to_json()) == found.spec
    assert found.evaluator.evaluate(found.build(config.seed)).metrics.keys() == {"loss", "accuracy", "macro_f1"}


def test_a_family_that_lacks_the_tasks_head_is_refused():
    with pytest.raises(ValueError, match="a model.family with the head masked-lm, found 'helpers.outside.* with seq"):
        config = load_config(None, [f"model.family={FAMILY}", "task.name=masked-lm"])
        task(config.task).check(config.data, config.model, 0, 2)
    with pytest.raises(ValueError, match="HEADS: expected a tuple of sequence-classification, .* found \\('headline',"):
        family_named(f"{HERE}:Headless")


def test_a_folder_has_no_class_imported_that_the_configuration_does_not_name(tmp_path):
    _, found = prepared()
    parts = found.build(0)
    save_model(tmp_path, found.spec, parts.weights(), found.tokenizer_json, {})
    read = load_model(tmp_path, FAMILY).parts.weights()
    assert all(torch.equal(read[name], value) for name, value in parts.weights().items())
    for asked in ("", "bert"):
        with pytest.raises(ValueError, match="a class that is imported where model.family names it alone"):
            load_model(tmp_path, asked)
    # Another run may start from it: its configuration names the family.
    _, further = prepared(f"model.from={tmp_path}")
    assert torch.equal(further.weights["head.classifier.weight"], parts.weights()["head.classifier.weight"])


def test_any_decoder_translates_as_the_classic_one_does():
    from client_pipeline.families import transformer

    spec = transformer.spec(vocab_size=20, width=8, num_heads=2, feed_forward=16, encoder_layers=1, max_length=30)
    head = build_parts(spec, seed=3).head.eval()
    generator = torch.Generator().manual_seed(1)
    memory, mask = torch.randn(4, 6, 8, generator=generator), torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    limits = [9, 1, 5, 12]
    with torch.no_grad():
        for bias in (-1.0, 1.0):
            # Once no sentence ends by itself, once most do.
            head.output_bias[2] = bias
            wanted = beam_search.greedy(head, memory, mask, limits)
            assert beam_search.plain_greedy(head, memory, mask, limits, 2) == wanted


# Rule

START = {"w": torch.tensor([1.0, 2.0, 3.0])}


def joined(aggregator, vectors):
    asked = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    start_from(aggregator, to_arrays(START))
    contents = [reply_content({"w": v}, weight=9, loss=1.0 + i, steps=1, wall_s=0.0, report={}) for i, v in vectors]
    return aggregator.aggregate_train(1, [Message(content, reply_to=asked) for content in contents])


def moved(*changes):
    return list(enumerate(START["w"] + torch.tensor(change) for change in changes))


def test_a_rule_joins_what_each_cluster_changed(flower_process):
    arrays, metrics = joined(rule(RULE), moved([1.0, -2.0, 0.5], [9.0, -1.0, -0.5], [-5.0, -1.0, 0.0]))
    np.testing.assert_allclose(to_tensors(arrays)["w"], [1.01, 1.99, 3.0], rtol=1e-6)
    assert to_tensors(arrays)["w"].dtype == torch.float32
    assert metrics["loss"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Crooked", r"w: expected finite numbers \[3\], found \[2\]$"),
        ("Diverged", r"w: .* found \[3\] with NaN or Inf"),
        ("Fewer", r"expected a change for each of the 1 arrays by name, found \[\]"),
        ("More", r"expected a change for each of the 1 arrays by name, found \['v', 'w'\]"),
        ("NoChange", "expected a change for each of the 1 arrays by name, found None"),
    ],
)
def test_a_rule_that_makes_no_encoder_is_named(name, message, flower_process):
    with pytest.raises(ValueError, match=f"aggregator.name: {HERE}:{name}: round 1: join: {message}"):
        joined(rule(f"{HERE}:{name}"), moved([1.0, 1.0, 1.0]))


# What the documentation shows


@pytest.fixture
def documented(tmp_path, monkeypatch):
    """The examples of the pages as files of those names, which can be imported."""
    for page in ("training", "models", "planning"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"```(?:python|toml)\n(.*?)```", text, re.DOTALL):
            if named := re.match(r"# (my[\w-]+\.(?:py|toml))", block):
                (tmp_path / named[1]).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_examples_of_the_documentation_are_taken(documented, flower_process):
    scenario = load_scenario(str(documented / "my-network.toml"))
    decision = RoundPlanner(scenario, make_policy("my_policies:Even")).plan(1, [math.inf] * 4)
    assert sum(decision.selected) == 3
    arrays, _ = joined(rule("my_rules:SignVote"), moved([1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [2.0, -1.0, 0.0]))
    np.testing.assert_allclose(to_tensors(arrays)["w"], [1.01, 1.99, 3.0], rtol=1e-6)
    config = load_config(None, [*SMALL, "task.name=sequence-classification", "model.family=my_family:Mixer"])
    found = task(config.task).prepare(config.data, config.model, config.seed, 2)
    assert found.evaluator.evaluate(found.build(0)).metrics["loss"] > 0


# What a control unit imports


@pytest.mark.parametrize("key", ["task.name", "model.family"])
def test_a_control_unit_imports_what_its_owner_has_allowed_alone(key):
    flat = {key: "their_package.code:Thing"}
    for modules in ("", "their", "their_package.code.more", "other,their_pack"):
        node = NodeConfig(cluster=1, modules=modules)
        with pytest.raises(
            ValueError, match=f"{key}: 'their_package.code:Thing': .* --allow-module their_package.code"
        ):
            node.check_classes(flat)
    for modules in ("their_package", "other,their_package.code"):
        NodeConfig(cluster=1, modules=modules).check_classes(flat)
    NodeConfig(cluster=1, simulated=True).check_classes(flat)
    NodeConfig(cluster=1).check_classes(RunConfig().to_flat())


@pytest.mark.parametrize("key", ["task.name", "model.family"])
def test_an_order_that_names_another_module_is_answered_before_it_is_imported(
    key, tmp_path, monkeypatch, flower_process
):
    (tmp_path / "refused_module.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    flat = RunConfig().to_flat() | {key: "refused_module:Thing", "run-dir": str(tmp_path)}
    spec = ModelSpec(family="refused_module:Thing", head="seq2seq").to_json()
    record = ConfigRecord({"spec": spec, "num-clusters": 1, "run-name": "x"})
    order = Message(RecordDict({CONFIG: record, ARRAYS: ArrayRecord()}), dst_node_id=1, message_type=SETUP)
    context = SimpleNamespace(run_config=flat, node_config={"partition-id": 0}, run_id=1, state=RecordDict())
    answer = json.loads(client_app.answer_setup(order, context).content.config_records[CONFIG]["json"])
    assert answer["error"].startswith(f"{key}: 'refused_module:Thing': the control unit of cluster 0 imports no module")
    training = Message(RecordDict({CONFIG: record}), dst_node_id=1, message_type=MessageType.TRAIN)
    assert "imports no module" in client_app.answer_training(training, context).error.reason
    assert not (tmp_path / "imported").exists()


def test_the_owner_names_modules_when_the_control_unit_starts(tmp_path):
    from flower_app.deployment.credentials import CuFiles

    options = {"cluster": 0, "host": "127.0.0.1", "server": "127.0.0.1", "certs": CuFiles(tmp_path), "state": tmp_path}
    box = ControlUnitBox(**options, allowed_modules=["their_package", "other.code"])
    assert box.node_config().modules == "their_package,other.code"
    for wrong in ("their-package", "a:B", "", "a..b", "a,b"):
        with pytest.raises(ValueError, match="--allow-module: expected the name of a module or package, found"):
            ControlUnitBox(**options, allowed_modules=[wrong])
