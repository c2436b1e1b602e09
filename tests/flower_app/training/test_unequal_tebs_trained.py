"""The network of a run whose model has TEBs that cost differently, and the plan for it."""

import math

import pytest

from client_pipeline.families.registry import family_named
from client_pipeline.partition.spec import LoraConfig, ModelSpec
from flower_app.config.sources import load_config
from flower_app.training.network import training_scenario
from strategies.planned_strategy import plan_record
from strategies.planning.planner import RoundPlanner
from strategies.planning.policies import make_policy

MODEL = ModelSpec(
    family="glm4_moe",
    head="causal-lm",
    lora=LoraConfig(rank=2),
    config={
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["false", "true"])
def test_a_runs_planner_tells_dense_layers_from_experts(recompute):
    settings = ["scenario=table2", "costs=model", "planner.length=16", "batch-size=8", f"runtime.recompute={recompute}"]
    scenario = training_scenario(load_config(None, settings), MODEL)
    shares = scenario.costs.teb_shares
    assert len(shares) == family_named(MODEL.family).num_blocks(MODEL) == 8
    assert shares[:3] == (1.0,) * 3 and len(set(shares[3:])) == 1 and shares[3] < 0.6
    decision = RoundPlanner(scenario, make_policy("dssda")).plan(1, [math.inf] * 3)
    assert decision.answer.status in ("optimal", "feasible")
    assert all(decision.selected)
    assert plan_record("dssda", decision)["teb_costs"].endswith("the plan counts each by itself")
