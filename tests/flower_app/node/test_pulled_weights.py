"""A node without the model's folder: its control unit is set up over pulled files, and starts again with them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flwr.app import RecordDict

from client_pipeline.families.families import build_parts
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.control_unit.control_unit_actor import ControlUnitActor
from flower_app import client_app
from flower_app.node import kept_setup
from flower_app.tasks.tokenizer import train_tokenizer
from helpers.cluster_states import states
from helpers.decoder_cases import service_of
from helpers.tiny_models import tiny_spec
from strategies.records import BASE_KEY, PULL_KEY

TEXTS = [f"a man in a blue shirt is number {number}" for number in range(12)]


@pytest.fixture
def model(tmp_path):
    """A pretrained folder that the server alone has: its specification with adapters, and its weights."""
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    build_parts(spec, seed=3).reference.save_pretrained(tmp_path / "model")
    _, weights = load_pretrained_weights(str(tmp_path / "model"), "causal-lm", server_layers=2)
    return replace(spec, lora=LoraConfig(rank=2)), weights.base


@pytest.fixture
def node(tmp_path):
    """The context of a node whose machine has neither that folder nor the server's run directory."""
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    flat = {
        "task.name": "causal-lm",
        "model.family": "llama",
        "model.trainable": "lora",
        "model.pretrained": str(tmp_path / "nowhere"),
        "data.source": "files",
        "data.path": str(tmp_path),
        "data.train-source": "train.txt",
        "data.validation-source": "val.txt",
        "data.test-source": "test.txt",
        "data.max-length": 8,
        "batch-size": 4,
        "model.max-length": 64,
    }
    node_config = {"partition-id": 0, "state-dir": str(tmp_path / "state"), "model-path": str(tmp_path / "nowhere")}
    return SimpleNamespace(run_config=flat, node_config=node_config, state=RecordDict({}), run_id=1)


@pytest.fixture
def units(monkeypatch):
    """Control units that were started, in this process."""
    started = []

    def start(setup):
        started.append(ControlUnitActor(setup))
        return started[-1].prepare() | {"machines": {}}

    monkeypatch.setattr(client_app, "start_control_unit", start)
    monkeypatch.setattr(client_app, "restart_control_unit", start)
    return started


def setup_values(spec, base, **more):
    return {
        "spec": spec.to_json(),
        "tokenizer": train_tokenizer(TEXTS, 300, False).to_json(),
        BASE_KEY: base.to_json().replace(base.source, "/nowhere"),
        "num-clusters": 2,
        "run-name": "pulled",
        "resume-round": 0,
        "network": json.dumps([state.to_dict() for state in states()]),
        "plans": "",
        **more,
    }


def test_a_control_unit_pulls_what_it_lacks_and_starts_again_without_a_token(model, node, units, tmp_path):
    spec, base = model
    with service_of(base=base) as service, service.pulls(1) as (address,):
        values = setup_values(spec, base, **{PULL_KEY: json.dumps(address.to_dict())})
        answer = client_app._setup(node, values, {}, node_id=7)
    assert answer["state"]["num_examples"] == len(units[0]._unit.data) > 0
    name = "embedding.embed_tokens.weight"
    (cached,) = (tmp_path / "state" / "weights").iterdir()
    assert cached.name == f"{base.files[0].sha256}.safetensors"
    assert torch.equal(units[0]._unit.embedding.embed_tokens.weight, base[name])
    # What its folder keeps has no token, and the control unit that stands in for it needs none.
    config = client_app.RunConfig.as_sent(node.run_config)
    folder = client_app.node_folder(config, _read_node(node), "pulled")
    kept, _ = kept_setup.read(folder)
    assert PULL_KEY not in kept and address.token not in json.dumps(kept)
    client_app._start_again(node, config, _read_node(node), num_devices=3, round_=1)
    assert torch.equal(units[1]._unit.embedding.embed_tokens.weight, base[name])


def _read_node(node):
    return client_app.NodeConfig.read(node.node_config)
