"""The mean array by array is Flower's own, bit for bit."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from strategies.aggregation.weighted_mean import WeightedMean
from strategies.collapipe import float32_arrays
from strategies.grid.update_spool import UpdateSpool, record_of

pytestmark = pytest.mark.usefixtures("flower_process")

KINDS = ["float16", "float32", "float64", "int8", "int32", "int64", "bool"]
SHAPES = {"matrix": (5, 7), "vector": (11,), "scalar": (), "empty": (0, 3), "columns": (4, 6)}


def values_of(generator, kind, name):
    values = np.asarray(generator.normal(scale=50.0, size=SHAPES[name])).astype(kind)
    return np.asfortranarray(values) if name == "columns" else values


def replies_of(arrays_of_clusters, weights, keep=lambda array: array):
    order = Message(RecordDict({"config": ConfigRecord()}), dst_node_id=1, message_type=MessageType.TRAIN)
    return [
        Message(
            RecordDict(
                {
                    "arrays": record_of((name, keep(Array(values))) for name, values in arrays.items()),
                    "metrics": MetricRecord({"num-examples": weight, "loss": 1.0 / weight}),
                }
            ),
            reply_to=order,
        )
        for arrays, weight in zip(arrays_of_clusters, weights, strict=True)
    ]


def same(mean, expected):
    assert list(mean) == list(expected)
    for name, array in expected.items():
        assert (mean[name].dtype, mean[name].shape, mean[name].data) == (array.dtype, array.shape, array.data), name


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_has_flowers_bits(seed, on_disk, tmp_path):
    generator = np.random.default_rng(seed)
    weights = [int(weight) for weight in generator.integers(1, 1000, size=1 + seed)]
    clusters = [
        {f"{kind} {name}": values_of(generator, kind, name) for kind in KINDS for name in SHAPES} for _ in weights
    ]
    keep = UpdateSpool(tmp_path).put_aside if on_disk else lambda array: array
    expected, metrics = FedAvg().aggregate_train(1, replies_of(clusters, weights))
    mean, mean_metrics = WeightedMean().aggregate_train(1, replies_of(clusters, weights, keep))
    same(mean, expected)
    assert dict(mean_metrics) == dict(metrics)


def test_updates_of_different_arrays_are_flowers_error_and_none_at_all_are_no_mean():
    uneven = replies_of([{"w": np.ones(2)}, {"v": np.ones(2)}], [1, 1])
    for strategy in (FedAvg(), WeightedMean()):
        with pytest.raises(Exception, match="same keys"):
            strategy.aggregate_train(1, uneven)
    assert WeightedMean().aggregate_train(1, []) == (None, None)


def test_float32_is_what_it_was_and_other_types_are_rounded_to_it(tmp_path):
    spool = UpdateSpool(tmp_path)
    exact = Array(np.array([1.0, 2.0], dtype=np.float32))
    fine = Array(np.array([1.0 + 2.0**-40, 0.1]))
    arrays = record_of([("exact", exact), ("fine", fine), ("scalar", Array(np.array(3)))])
    arrays["aside"] = spool.put_aside(exact)
    converted = float32_arrays(arrays)
    assert converted["exact"] is exact
    assert {array.dtype for array in converted.values()} == {"float32"}
    np.testing.assert_array_equal(converted["fine"].numpy(), np.array([1.0, 0.1], dtype=np.float32))
    assert converted["scalar"].shape == ()
    # What is on disk is not kept there for the rounds to come.
    assert type(converted["aside"]) is Array and converted["aside"].data == exact.data
    assert ArrayRecord(dict(converted)) == converted
