"""``compression.cache-gb``: where activations change, or the server is not sent them, it is refused by name."""

import pytest

from client_pipeline.link.compression import CompressionConfig
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner
from flower_app.training.network import training_scenario
from flower_app.training.prepared_run import prepare

FROZEN = {
    "task.name": "causal-lm",
    "model.family": "llama",
    "model.trainable": "lora",
    "lora.first-block": 12,
    "compression.cache-gb": 1.0,
}


def planner_of(values):
    config = RunConfig.from_flat(values)
    return make_planner(config, training_scenario(config))


def test_it_is_taken_where_all_tebs_are_frozen():
    assert planner_of(FROZEN) is not None
    assert planner_of(FROZEN | {"lora.first-block": 0, "compression.cache-gb": 0.0}) is not None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lora.first-block": 1}, r"found lora\.first-block = 1; set model\.trainable = \"lora\" and .* the \d+ TEBs"),
        ({"model.trainable": "full"}, r"found lora\.first-block = 0; set model\.trainable"),
        (
            {"split.labels": "cluster"},
            r"found split\.labels = cluster; leave it out: only a server that has the labels",
        ),
        ({"strategy": "FedAvg"}, r"found strategy = FedAvg; leave it out"),
        ({"task.name": "masked-lm", "model.family": "bert"}, r"found task\.name = masked-lm; leave it out: each step"),
        ({"costs": "measured"}, r"found costs = measured; set costs = \"model\""),
    ],
)
def test_other_settings_are_refused_with_the_key_at_fault(values, reason):
    with pytest.raises(ValueError, match=rf"compression\.cache-gb: 1 keeps activations that never change, {reason}"):
        planner_of(FROZEN | values)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"compression\.cache-gb: expected a number of 0 or more, found"):
        CompressionConfig(cache_gb=value)


def test_dropout_would_draw_one_mask_for_all_steps(tmp_path):
    values = FROZEN | {"model.family": "gpt2", "model.dropout": 0.1, "lora.first-block": 12}
    config = RunConfig.from_flat(values | {"scenario": "table2", "runs-dir": str(tmp_path)})
    with pytest.raises(ValueError, match=r"compression\.cache-gb = 1: expected a model without dropout, .* set compr"):
        prepare(config, tmp_path / "run")
