"""Token slices of a run: refused by name, before anything starts, where the model or the strategy has none."""

from dataclasses import replace

import pytest

from client_pipeline.partition.plan import ClusterPlan
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import check_slices
from helpers.tiny_models import tiny_spec

LLAMA = tiny_spec("llama", dropout=0.0)
WHOLE = ClusterPlan(delta=(5,), order=(0,), m=2)


def config(number=4, **more):
    return RunConfig.from_flat({"planner.token-slices": number, **more})


def test_causal_models_without_dropout_are_cut():
    check_slices(config(), LLAMA, [WHOLE])
    check_slices(config(0), LLAMA, [replace(WHOLE, token_slices=8)])


@pytest.mark.parametrize(
    ("number", "plan", "name", "message"),
    [
        (4, WHOLE, "bert", "planner.token-slices = 4: expected a decoder-only model, .* found model.family bert"),
        (0, WHOLE, "t5", "planner.token-slices = 0: .* found model.family t5 with the head seq2seq"),
        (2, WHOLE, "gpt2", "planner.token-slices = 2: expected a model without dropout, .* attn_pdrop = 0.1; set"),
        (1, replace(WHOLE, token_slices=2), "bert", "plan: token_slices = 2: expected a decoder-only model"),
    ],
)
def test_others_are_refused_whoever_asks_for_them(number, plan, name, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_slices(config(number), tiny_spec(name), [plan])


def test_a_strategy_without_pipelines_is_refused():
    with pytest.raises(ValueError, match="planner.token-slices = 4: expected a strategy whose clusters are pipelines"):
        check_slices(config(strategy="vanilla-fl"), LLAMA, [WHOLE])
