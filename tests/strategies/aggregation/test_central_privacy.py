"""Noise and clips of the server's own mechanisms: who draws them, and what no cluster can claim."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.supercore.differential_privacy import KEY_NORM_BIT

from client_pipeline.link.privacy_config import UPDATE_MECHANISMS, PrivacyConfig
from strategies.aggregation.central_privacy import with_central_noise
from strategies.planned_strategy import start_from
from strategies.records import ARRAYS, METRICS, reply_content, to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")

CENTRAL = UPDATE_MECHANISMS[1:]
START = {"w": torch.ones(50, 400), "v": torch.zeros(7)}


def reply_of(node, weights, **metrics):
    order = Message(RecordDict({ARRAYS: ArrayRecord()}), dst_node_id=node, message_type=MessageType.TRAIN)
    content = reply_content(weights, weight=9, loss=1.0, steps=3, wall_s=0.1, report={})
    content.metric_records[METRICS].update({KEY_NORM_BIT: 1} | metrics)
    return Message(content, reply_to=order)


def mean_of(mechanism, replies, noise=0.0, clip=1e6):
    aggregator = with_central_noise(
        PrivacyConfig(update_mechanism=mechanism, update_clip=clip, update_noise=noise), 3 if noise == 0 else 30
    )
    start_from(aggregator, to_arrays(START))
    arrays, _ = aggregator.aggregate_train(1, replies)
    return to_tensors(arrays), aggregator


def moved(by):
    return {name: value + by for name, value in START.items()}


@pytest.mark.parametrize("mechanism", CENTRAL)
def test_no_claim_of_a_cluster_makes_it_count_more(mechanism):
    """The mean used to be weighted by the ``steps`` that a cluster says it took: its part is not bounded then."""
    replies = [reply_of(n, moved(by), steps=steps) for n, by, steps in ((1, 1.0, 1), (2, 4.0, 1000), (3, 4.0, 1))]
    found, _ = mean_of(mechanism, replies)
    torch.testing.assert_close(found["v"], torch.full((7,), 3.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["w"], torch.full((50, 400), 4.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mechanism", CENTRAL)
def test_the_noise_of_the_mean_is_no_ordinary_generators(mechanism):
    """Flower draws it from numpy's global Mersenne twister, which whoever sees 624 numbers of it can foretell."""
    outcomes = []
    for _ in range(2):
        np.random.seed(7)  # noqa: NPY002
        outcomes.append(mean_of(mechanism, [reply_of(n, moved(1e-6)) for n in (1, 2)], noise=0.5, clip=2.0))
    (one, first), (other, second) = outcomes
    assert not torch.equal(one["w"], other["w"])
    # Of those who answered, not of those who were asked.
    std = first.noise_multiplier * 2.0 / 2
    if mechanism.endswith("adaptive"):
        assert first.clipping_norm != second.clipping_norm
        std = first.noise_multiplier * float(first.clipping_norm) / 2
    assert float((one["w"] - START["w"]).std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("mechanism", CENTRAL)
def test_an_update_of_nothing_does_not_end_the_round(mechanism):
    """Its norm is zero, and Flower divides by it: one idle cluster ended the run."""
    replies = [reply_of(1, START), reply_of(2, moved(2.0))]
    found, _ = mean_of(mechanism, replies)
    torch.testing.assert_close(found["v"], torch.full((7,), 1.0), rtol=1e-5, atol=1e-5)


def test_a_flower_that_draws_its_noise_elsewhere_is_refused(monkeypatch):
    from flwr.serverapp.strategy.dp_fixed_clipping import DifferentialPrivacyFixedClippingBase

    monkeypatch.delattr(DifferentialPrivacyFixedClippingBase, "_add_noise_to_aggregated_arrays")
    with pytest.raises(RuntimeError, match="expected _add_noise_to_aggregated_arrays of Flower's"):
        mean_of("server-fixed", [reply_of(1, moved(1.0))])
