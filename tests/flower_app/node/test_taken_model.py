"""A trained model that a node takes for the door of its box: who may, and what the door says of it."""

import json
import threading
from dataclasses import replace

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.serving.saved_parts import answering_parts
from flower_app.config.run_config import RunConfig
from flower_app.node import taken_model
from flower_app.node.config import NodeConfig
from flower_app.node.door_folder import DoorFolder
from flower_app.node.taken_model import refuse_while_serving, take_model
from flower_app.saved_model import load_model, read_model
from flower_app.tasks.base import Prepared
from helpers.decoder_only import small_spec
from helpers.patience import eventually
from strategies.clusters import ClusterState

CONFIG = RunConfig()


def given():
    """Return what the server sends: values and weights of a model."""
    spec = small_spec("llama")
    state = ClusterState(cluster=0, node_id=0, devices=(), block_memory=0.0, num_examples=0)
    values = {
        "name": "talk",
        "spec": spec.to_json(),
        "tokenizer": "",
        "task": "{}",
        "base": "",
        "network": json.dumps([state.to_dict()]),
    }
    return values, {name: value.numpy() for name, value in build_parts(spec, 0).weights().items()}


def door_that_tells(folder, **status):
    """Stand in for the door's program: tell the same of the first order."""

    def answer():
        door = DoorFolder(folder)
        order = eventually(door.order)
        door.tell(order["id"], **status)

    threading.Thread(target=answer, daemon=True).start()


def test_a_box_without_a_door_takes_no_model():
    with pytest.raises(ValueError, match=r"cluster 0: .* no door; only its owner opens one: collapipe join --serve"):
        take_model(CONFIG, NodeConfig(cluster=0), *given())


def test_a_door_that_opens_has_the_whole_model(tmp_path):
    door_that_tells(tmp_path, address="http://127.0.0.1:8443/v1")
    values, weights = given()
    answer = take_model(CONFIG, NodeConfig(cluster=0, door=str(tmp_path)), values, weights)
    assert answer == {"cluster": 0, "door": "http://127.0.0.1:8443/v1"}
    order = DoorFolder(tmp_path).order()
    assert order["name"] == "talk" and RunConfig.as_sent(order["config"]) == CONFIG
    saved = load_model(tmp_path).parts.weights()
    assert all((saved[name].numpy() == weight).all() for name, weight in weights.items())


def test_frozen_weights_are_those_that_the_training_has_left_on_the_box(tmp_path):
    build_parts(small_spec("llama"), seed=3).reference.save_pretrained(tmp_path / "server")
    spec, weights = load_pretrained_weights(str(tmp_path / "server"), "causal-lm", server_layers=1)
    spec = replace(spec, lora=LoraConfig(rank=2, alpha=6.0))
    parts = Prepared(spec=spec, tokenizer_json="", evaluator=None, cluster_sizes=(1,), weights=weights).build(seed=5)
    values = given()[0] | {"spec": spec.to_json(), "base": parts.base.to_json()}
    adapters = {name: value.numpy() for name, value in parts.weights().items()}
    node = NodeConfig(cluster=0, door=str(tmp_path / "door"), state_dir=str(tmp_path))
    node.weight_cache.mkdir()
    (tmp_path / "server").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="model.pretrained: .* is no folder with safetensors files"):
        take_model(CONFIG, node, values, adapters)
    (name,) = (file.name for file in parts.base.by_digest(node.weight_cache).files)
    (tmp_path / "elsewhere" / "model.safetensors").rename(node.weight_cache / name)
    door_that_tells(tmp_path / "door", address="http://127.0.0.1:8443/v1")
    take_model(CONFIG, node, values, adapters)
    stored = read_model(tmp_path / "door")
    model = answering_parts(stored.spec, stored.weights, stored.base)
    assert model.weights[0] and set(stored.weights) == set(adapters)


def test_a_door_that_does_not_open_keeps_no_order(tmp_path):
    door_that_tells(tmp_path, error="no memory for the TEBs")
    with pytest.raises(ValueError, match="cluster 0: its door does not open: no memory for the TEBs"):
        take_model(CONFIG, NodeConfig(cluster=0, door=str(tmp_path)), *given())
    assert DoorFolder(tmp_path).order() == {}


def test_a_door_that_says_nothing_in_time_keeps_no_order(tmp_path, monkeypatch):
    monkeypatch.setattr(taken_model, "_OPEN_S", 0.0)
    with pytest.raises(ValueError, match="cluster 0: its door did not open within 0 s; the box's log says why"):
        take_model(CONFIG, NodeConfig(cluster=0, door=str(tmp_path)), *given())
    assert DoorFolder(tmp_path).order() == {}


def test_a_model_that_is_replaced_is_ordered_no_more(tmp_path):
    """An earlier order stood beside files of the next model, and a door that started then answered with them."""
    DoorFolder(tmp_path).give({"name": "earlier"})
    values, weights = given()
    with pytest.raises(ValueError):
        take_model(CONFIG, NodeConfig(cluster=0, door=str(tmp_path)), values | {"task": "{"}, weights)
    assert DoorFolder(tmp_path).order() == {}


def test_a_cluster_that_the_run_does_not_have_takes_no_model(tmp_path):
    with pytest.raises(ValueError, match="cluster 3: the run has the clusters 0 to 0"):
        take_model(CONFIG, NodeConfig(cluster=3, door=str(tmp_path)), *given())


def test_a_cluster_trains_once_its_answers_are_ended(tmp_path):
    node = NodeConfig(cluster=0, door=str(tmp_path))
    refuse_while_serving(node)
    DoorFolder(tmp_path).give({"name": "talk"})
    with pytest.raises(
        ValueError, match=r"answers with the model of run 'talk'.* collapipe serve --superlink .* --end"
    ):
        refuse_while_serving(node)
    assert take_model(CONFIG, node, {"end": True}, {}) == {"cluster": 0, "closed": True}
    refuse_while_serving(node)


def test_a_status_of_another_order_says_nothing(tmp_path):
    door = DoorFolder(tmp_path)
    first = door.give({"name": "talk"})
    door.tell(first, address="http://127.0.0.1:1/v1")
    assert door.status(first)["address"] and door.status(door.give({"name": "talk"})) == {}
