"""Adapters of the whole model, tuned by a plain Flower app: the peer in ``skills.py``.

Each client holds the whole model, trains all adapters on its cluster's data, and keeps its optimizer's state between
rounds; Flower's ``FedAvg`` averages the adapters in Flower's simulation. It takes the same configuration as ``collapipe
run``, and of it the model, the data, the optimizer, the rounds and the local steps.

    python benchmarks/fedavg_adapters.py --config smollm2-skills --set data.path=FOLDER --save FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from central import CentralTraining, move
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from client_pipeline.partition.parts import ModelParts
from client_pipeline.runtime.control_unit.round_order import TrainingData
from client_pipeline.runtime.ray.private_ray import prepare_private_ray
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.saved_model import save_model
from flower_app.tasks.base import Prepared, task


def main() -> int:
    """Train, and keep the model and what it cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()
    config = load_config(args.config, args.set)
    prepared = _prepared(config)
    args.save.mkdir(parents=True, exist_ok=True)
    parts = prepared.build(config.seed)
    trained = {name: value.detach() for name, value in parts.named_parameters() if value.requires_grad}

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
        result = strategy.start(grid, ArrayRecord(trained), num_rounds=config.num_rounds)
        torch.save(result.arrays.to_torch_state_dict(), args.save / "adapters.pt")

    prepare_private_ray()
    # A client's process imports this module by name, and keeps what it has loaded.
    from fedavg_adapters import client_app

    with tempfile.TemporaryDirectory() as states:
        client = client_app(args.config, args.set, states)
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
        run_simulation(server, client, num_supernodes=2, backend_config=resources)
    parts.load(torch.load(args.save / "adapters.pt", weights_only=True))
    weights = parts.weights() | ({} if parts.base else parts.frozen_weights())
    remembered = task(config.task).saved(config.data)
    save_model(args.save, prepared.spec, weights, prepared.tokenizer_json, remembered, base=parts.base)
    sent = sum(value.nbytes for value in trained.values())
    # Down and up, each client, each round.
    costs = {"bytes": 2 * 2 * config.num_rounds * sent}
    (args.save / "costs.json").write_text(json.dumps(costs), encoding="utf-8")
    return 0


def _prepared(config: RunConfig) -> Prepared:
    prepared = task(config.task).prepare(config.data, config.model, config.seed, num_clusters=2)
    return replace(prepared, spec=config.adapted(prepared.spec))


@lru_cache(maxsize=1)
def _model(config_name: str, sets: tuple[str, ...]) -> tuple[RunConfig, Prepared, ModelParts]:
    """Load the model, once in a process: clients are simulated one after the other."""
    config = load_config(config_name, list(sets))
    prepared = _prepared(config)
    parts = prepared.build(config.seed)
    move(parts, config.runtime.accelerator)
    return config, prepared, parts


@lru_cache(maxsize=2)
def _data(config_name: str, sets: tuple[str, ...], cluster: int) -> TrainingData:
    config, prepared, _ = _model(config_name, sets)
    return task(config.task).cluster_data(config.data, prepared.tokenizer_json, cluster, 2, config.seed)


def client_app(config_name: str, sets: list[str], states: str) -> ClientApp:
    """Make the clients' app; ``states`` is a folder where their optimizers' states wait for the next round."""
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        cluster = int(context.node_config["partition-id"])
        config, _, parts = _model(config_name, tuple(sets))
        data = _data(config_name, tuple(sets), cluster)
        parts.load(message.content["arrays"].to_torch_state_dict())
        steps = config.num_rounds * config.local_steps
        training = CentralTraining(
            parts, [data], replace(config.optimizer, total_steps=steps), config.batch_size, config.seed + cluster
        )
        state = Path(states) / f"{cluster}.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            training.step = saved.pop("step")
            training.optimizer.load_state(saved)
            for _ in range(training.step):
                training.orders[0].next_batch()
        losses = [training.train_step() for _ in range(config.local_steps)]
        torch.save({"step": training.step, **training.optimizer.state()}, state)
        trained = {name: value.detach().cpu() for name, value in parts.named_parameters() if value.requires_grad}
        metrics = MetricRecord({"train_loss": sum(losses) / len(losses), "num-examples": len(data)})
        return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)

    return client


if __name__ == "__main__":
    sys.exit(main())
