"""Control units as named actors: their set-up, their orders, their end."""

from client_pipeline.families.families import build_parts
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.round_order import ClusterSetup, RoundOrder
from client_pipeline.runtime.devices.shared_actor import NAMESPACE
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.federated_rounds import LR, PLANS
from helpers.tiny_models import CLASSIC, tiny_batch


def setup_of(run, load_data=None, cluster=0):
    batch = tiny_batch(CLASSIC, size=7)

    class OneBatch:  # defined here so that it travels by value: the actors do not see the tests' modules
        def __len__(self):
            return len(batch["input_ids"])

        def collate(self, indices, seed=0):
            return batch

    return ClusterSetup(
        run=run,
        cluster=cluster,
        spec=CLASSIC,
        optimizer=OptimizerConfig(name="sgd", lr=LR),
        runtime=RuntimeConfig(timeout=240),
        seed=0,
        batch_size=7,
        local_steps=1,
        load_data=load_data or OneBatch,
    )


def order(number=1):
    return RoundOrder(round=number, weights=build_parts(CLASSIC, seed=1).weights(), plan=PLANS[0])


def end_named_actors(ray):
    """End the named actors that a test has left."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith("collapipe/actors-"):
            ray.kill(ray.get_actor(entry["name"], namespace=NAMESPACE))
