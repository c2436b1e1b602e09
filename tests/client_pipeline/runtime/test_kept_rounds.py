"""Control units whose TEBs are all frozen: devices run forward alone, and not at all once the server has it."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.federated_rounds import PLANS, control_units, federated_round
from helpers.tiny_models import NUM_BLOCKS, tiny_batch, tiny_spec
from strategies.decoder.kept_activations import KeptActivations

ADAMW = OptimizerConfig(name="adamw", lr=1e-2, clip_norm=1.0)
ROUNDS = 3


def trained(served, spec, run, room=None, plans=PLANS):
    """Weights, results and the service's received amounts after some rounds of two clusters; ``room`` of a store."""
    batches = [tiny_batch(spec, size=7, length=9, seed=1), tiny_batch(spec, size=5, length=6, seed=2)]
    forward_only = room is not None
    more = {"kept": KeptActivations(room)} if forward_only else {}
    service, weights = served(ADAMW, "step", spec, **more)
    base = build_parts(spec, seed=1).frozen_weights()
    units = control_units(batches, ADAMW, run, 2, spec, frozen=base, forward_only=forward_only)
    results = []
    try:
        for number in range(1, ROUNDS + 1):
            weights, of_round = federated_round(units, service, weights, number, 2, plans=plans)
            results.append(of_round)
    finally:
        for unit in units:
            unit.close()
    return weights, results, service


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), [("llama", "causal-lm"), ("bert", "sequence-classification")])
def test_rounds_are_the_same_and_activations_travel_once(served, family, head):
    spec = replace(tiny_spec(family, head, dropout=0.0), lora=LoraConfig(rank=2, first_block=NUM_BLOCKS))
    expected, sent, _ = trained(served, spec, f"sends-{family}")
    weights, kept, service = trained(served, spec, f"keeps-{family}", 1 << 20)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for number, (of_sent, of_kept) in enumerate(zip(sent, kept, strict=True), start=1):
        for one, other in zip(of_sent, of_kept, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-5)
            assert other.weights == {} and (other.weight, other.steps) == (one.weight, one.steps)
            # Of six steps the first one of all sends activations.
            assert other.report["computed_steps"] == (1 if number == 1 else 0)
            assert "computed_steps" not in one.report
            payload = other.report["payload_bytes"]
            assert payload["up"] == (one.report["payload_bytes"]["up"] / 2 if number == 1 else 0)
            assert payload["down"] == 0 < one.report["payload_bytes"]["down"]
            assert (other.report["timeline"] == []) == (number > 1)
            # Of two steps one sends activations, and no gradient comes back.
            assert other.report["link_bytes"] == (one.report["link_bytes"] / 4 if number == 1 else 0)
    assert [service.sent[n].examples for n in (0, 1)] == [7, 5]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_devices_run_forward_alone_where_nothing_is_kept(served, schedule):
    spec = replace(tiny_spec("llama", "causal-lm", dropout=0.0), lora=LoraConfig(rank=2, first_block=NUM_BLOCKS))
    plans = [replace(plan, schedule=schedule, token_slices=2) for plan in PLANS]
    expected, sent, _ = trained(served, spec, f"both-{schedule}", plans=plans)
    weights, forward, service = trained(served, spec, f"forward-{schedule}", 0, plans=plans)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    for one, other in ((o, f) for pair in zip(sent, forward, strict=True) for o, f in zip(*pair, strict=True)):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.report["computed_steps"] == 2
        assert other.report["payload_bytes"] == one.report["payload_bytes"] | {"down": 0}
        assert 2 * other.report["link_bytes"] == one.report["link_bytes"] > 0
        assert {kind for kind, *_ in other.report["timeline"]} == {"F"}
        assert len(other.report["timeline"]) == sum(kind == "F" for kind, *_ in one.report["timeline"])
        for device, figures in other.report["devices"].items():
            assert figures["held_bytes"] < one.report["devices"][device]["held_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("first_block", [3, NUM_BLOCKS])
def test_a_control_unit_goes_on_from_its_checkpoint_where_tebs_are_frozen(served, tmp_path, first_block):
    spec = replace(tiny_spec("llama", "causal-lm", dropout=0.0), lora=LoraConfig(rank=2, first_block=first_block))
    batches = [tiny_batch(spec, size=7, length=9, seed=1)]
    base = build_parts(spec, seed=1).frozen_weights()
    found = []
    for resumes in (False, True):
        service, weights = served(ADAMW, "step", spec)
        for number in (1, 2):
            if number == 1 or resumes:
                more = {"checkpoints": tmp_path / str(resumes), "resume_round": number - 1}
                (unit,) = control_units(
                    batches, ADAMW, f"frozen-{first_block}-{resumes}-{number}", 2, spec, frozen=base, **more
                )
            weights, _ = federated_round([unit], service, weights, number, 2)
            assert unit.restored == (number == 2 and resumes)
            if number == 2 or resumes:
                unit.close()
        found.append(weights)
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
