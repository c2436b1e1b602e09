"""An encoder whose TEBs are elsewhere gives the states that the whole model gives."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.serving.encoding import encoded, encoder_engine
from client_pipeline.serving.stages import LocalStages
from helpers.tiny_models import CLASSIC, VOCABULARY, evaluation, tiny_spec

LENGTHS = (5, 1, 9, 5)


def small(family):
    return evaluation(build_parts(CLASSIC if family == "transformer" else tiny_spec(family), seed=0))


def check_states(parts, stages):
    """Sources of unequal lengths at once."""
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    engine = encoder_engine(parts, stages)
    try:
        with ThreadPoolExecutor(len(sources)) as threads:
            found = list(threads.map(lambda ids: encoded(engine, ids), sources))
    finally:
        engine.close()
    for ids, states in zip(sources, found, strict=True):
        batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.bool)}
        with torch.no_grad():
            torch.testing.assert_close(states, parts.encode(batch))


@pytest.mark.parametrize("family", ["transformer", "t5", "bart", "pegasus"])
def test_sources_of_several_requests_are_encoded_as_each_alone(family):
    parts = small(family)
    stages = LocalStages(parts)
    check_states(parts, stages)
    assert stages._kept.nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["transformer", "t5"])
def test_devices_encode_what_one_process_does(local_ray, family):
    from client_pipeline.runtime.config import RuntimeConfig
    from client_pipeline.runtime.devices.answering_devices import DeviceStages
    from client_pipeline.runtime.devices.pipeline import Pipeline
    from client_pipeline.runtime.stage.learning_rate import OptimizerConfig

    parts = small(family)
    pipeline = Pipeline(
        name=f"encode-{family}", spec=parts.spec, optimizer=OptimizerConfig(name="sgd"), runtime=RuntimeConfig()
    )
    plan, weights = ClusterPlan(delta=(3, 2), order=(0, 1), m=1), parts.weights()
    stages = DeviceStages(pipeline, lambda devices: plan, 2, {i: block_weights(weights, i) for i in range(5)})
    try:
        check_states(parts, stages)
    finally:
        stages.close()
