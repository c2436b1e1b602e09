"""Parts on an accelerator: what computes there, what comes back to the host, and who is refused."""

from dataclasses import replace

import pytest
import torch

from client_pipeline.families.families import build_block, build_head, build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights, frozen_parameters, own_parameters, target_weight, targets
from client_pipeline.partition.spec import LoraConfig
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.stage import accelerator
from client_pipeline.runtime.stage.accelerator import HOST, AcceleratorKind, find_accelerator, training_bytes
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.moved_block import MovedBlock
from client_pipeline.runtime.stage.stage import Stage
from helpers.apart_device import ApartTensor, apart_device
from helpers.recovery_cases import SPEC, THREE, assert_equal, control_unit, initial, once, train, within
from helpers.thread_ray import run_in_threads
from helpers.tiny_models import NUM_BLOCKS, tiny_batch, tiny_spec

__all__ = ["apart_device"]

# Some gradients are zero but for rounding (of keys' biases), and AdamW would make steps of that.
ADAMW = OptimizerConfig(name="adamw", lr=0.01, eps=1e-3)
STEP = StepId(seed=0, round=1, step=1, cluster=0)
LORA = LoraConfig(rank=2, targets="all-linear")


def everywhere(tensors, kind):
    """Tell whether all tensors are of a kind of device."""
    kinds = {tensor.device.type for tensor in tensors}
    assert kinds == {kind}, kinds
    return True


def stage_of(spec, device=HOST, recompute=False):
    """All TEBs of a fresh model in one stage."""
    parts, stage = build_parts(spec, seed=1), Stage(spec, ADAMW, recompute, accelerator=device)
    weights, frozen = parts.weights(), parts.frozen_weights()
    for index in range(NUM_BLOCKS):
        stage.place(index, MovedBlock(block_weights(weights, index), {}, block_weights(frozen, index)))
    return stage, parts


def one_step(stage, parts, batch, number=1):
    """Forward, backward and the optimizers' step; returns what the stage gave."""
    step, mask_BT = replace(STEP, step=number), batch["attention_mask"]
    y_BTD = stage.forward(step, 0, parts.embedding(batch).detach(), mask_BT)
    x_gradient = stage.backward(step, 0, torch.cos(y_BTD), mask_BT)
    gradients = stage.gradients()
    stage.apply(number, scale=0.5)
    return y_BTD, x_gradient, gradients


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "modernbert", "deberta-v2-relative", "t5", "bart"])
def test_tebs_on_an_accelerator_learn_as_on_the_host_and_give_nothing_that_is_not_there(name, lora, apart_device):
    spec = replace(tiny_spec(name, dropout=0.0), lora=lora)
    (here, parts), (there, _) = stage_of(spec), stage_of(spec, apart_device)
    batch = tiny_batch(spec)
    for number in (1, 2):
        expected, outcome = one_step(here, parts, batch, number), one_step(there, parts, batch, number)
        torch.testing.assert_close(outcome, expected, rtol=1e-3, atol=1e-4)
        assert everywhere([outcome[0], outcome[1], *outcome[2][0].values()], "cpu")
    block = there.blocks[0]
    inside = [*block.module.parameters(), *block.module.buffers()]
    assert everywhere(inside, apart_device.type) and all(isinstance(tensor, ApartTensor) for tensor in inside)
    means = [state["exp_avg"] for state in block.optimizer._state.values()]
    assert means and everywhere(means, apart_device.type)
    assert there.held_bytes() > 0 and there.gradient_norm_sq() == 0.0
    for state in (there.states()[1], there.take(1)):
        assert everywhere([tensor for part in state for tensor in part.values()], "cpu")
    torch.testing.assert_close(there.weights()[0], here.weights()[0], rtol=1e-3, atol=1e-4)
    assert everywhere(there.weights()[0].values(), "cpu")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_teb_goes_on_on_the_host_from_where_an_accelerator_left_it(recompute, apart_device):
    spec = tiny_spec("bert", dropout=0.0)
    batch = tiny_batch(spec)
    (expected, parts), (there, _) = stage_of(spec, recompute=recompute), stage_of(spec, apart_device, recompute)
    one_step(expected, parts, batch)
    one_step(there, parts, batch)
    back, again = Stage(spec, ADAMW, recompute), Stage(spec, ADAMW, recompute, accelerator=apart_device)
    for index, state in there.states().items():
        # As a snapshot of a lost device does.
        back.place(index, MovedBlock.from_arrays(state.as_arrays()), version=1)
    one_step(expected, parts, batch, 2)
    one_step(back, parts, batch, 2)
    for index, state in back.states().items():
        again.place(index, state, version=2)
    outcome = one_step(again, parts, batch, 3)
    torch.testing.assert_close(outcome, one_step(expected, parts, batch, 3), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(again.weights(), expected.weights(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_a_decoder_on_an_accelerator_learns_as_on_the_host(name, apart_device):
    spec = tiny_spec(name)
    batch, parts = tiny_batch(spec), build_parts(spec, seed=1)
    hidden_BTD = parts.encode(batch).detach()
    tied = {own: parts.embedding.get_parameter(of).detach() for own, of in parts.tied.items()}
    results = []
    for device in (HOST, apart_device):
        head = build_head(spec)
        head.load_state_dict(parts.head.state_dict())
        trainer = HeadTrainer(head, ADAMW, unit=NUM_BLOCKS, accelerator=device).copy()
        gradient, loss_sum = trainer.gradient(
            STEP, 0, hidden_BTD, batch["attention_mask"], targets(batch), target_weight(targets(batch)), tied
        )
        outside = [gradient, *trainer.tied_gradient(0).values(), *trainer.gradients(0).values()]
        assert everywhere(outside, "cpu") and len(outside) > len(tied)
        assert everywhere(own_parameters(trainer.head).values(), device.type)
        norm_sq = trainer.gradient_norm_sq(0)
        trainer.apply([Contribution(cluster=0, weight=1.0)], 1)
        assert everywhere(trainer.optimizer.state().values(), "cpu")
        results.append((loss_sum, norm_sq, outside, {n: p.detach().cpu() for n, p in trainer.parameters.items()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_cluster_trains_on_accelerators_as_on_processors(lost, apart_device, monkeypatch):
    weights = []
    for kind in ("cpu", "cuda"):
        threads = run_in_threads(monkeypatch)
        unit = control_unit(f"on-{kind}", runtime={"accelerator": kind})
        if lost:
            name, actors = f"{unit.setup.actor_name}/device-1", threads.actors
            once(unit, round_=2, step=2, kind="G", micro_batch=1, act=lambda a=actors, n=name: a[n].end_process())
        try:
            weights.append(within(60.0, train, unit, initial(SPEC), (1, 2), THREE)[0])
            kinds = {answer["accelerator"] for answer in unit.pipeline.status().values()}
            assert kinds == {"cpu" if kind == "cpu" else str(apart_device)}
        finally:
            unit.close()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    assert everywhere(weights[1].values(), "cpu")


def test_the_processor_is_the_default_and_computes_the_same_bit_for_bit_as_one_that_was_found(monkeypatch):
    assert RuntimeConfig().accelerator == "cpu" and find_accelerator("cpu") == HOST
    monkeypatch.setattr(accelerator, "ACCELERATOR_KINDS", {})
    weights = []
    for kind in ("cpu", "auto"):
        run_in_threads(monkeypatch)
        unit = control_unit(f"found-{kind}", runtime={"accelerator": kind})
        try:
            weights.append(within(60.0, train, unit, initial(SPEC), (1,), THREE)[0])
        finally:
            unit.close()
    assert_equal(weights[1], weights[0])


def kinds(**free_bytes):
    """Kinds whose accelerators have so many free bytes."""
    return {
        name: AcceleratorKind(
            lambda sizes=sizes: [torch.device("meta", number) for number in range(len(sizes))],
            lambda device, sizes=sizes: sizes[device.index],
            f"get {name}",
        )
        for name, sizes in free_bytes.items()
    }


@pytest.mark.parametrize(
    ("free_bytes", "needed", "expected"),
    [
        ({"cuda": [], "mps": []}, 0.0, "cpu"),
        ({"cuda": [5.0, 9.0, 7.0], "mps": [50.0]}, 9.0, "meta:1"),
        ({"cuda": [5.0, 9.0], "mps": [50.0]}, 9.5, "meta:0"),
        ({"cuda": [5.0], "mps": [8.0]}, 9.5, "cpu"),
    ],
)
def test_auto_takes_the_first_kind_with_enough_memory(free_bytes, needed, expected, monkeypatch):
    monkeypatch.setattr(accelerator, "ACCELERATOR_KINDS", kinds(**free_bytes))
    assert str(find_accelerator("auto", needed)) == expected
    assert sum(map(len, free_bytes.values())) == 0 or accelerator.accelerators_here()


def test_what_a_part_needs_counts_gradient_and_states_of_what_is_trained():
    spec = tiny_spec("bert")
    whole, adapted = build_block(spec, 0), build_block(replace(spec, lora=LORA), 0)
    trained = sum(p.numel() for p in own_parameters(whole).values())
    adapters = sum(p.numel() for p in own_parameters(adapted).values())
    frozen = sum(p.numel() for p in frozen_parameters(adapted).values())
    assert training_bytes(whole) - accelerator.LIBRARIES_BYTES == 16 * trained
    assert training_bytes(adapted) - accelerator.LIBRARIES_BYTES == 16 * adapters + 4 * frozen


no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@no_cuda
def test_a_machine_without_the_accelerator_says_what_it_has_and_what_to_do():
    expected = r"runtime.accelerator: expected cuda, found the processor alone \(torch .*\); install .*, or set runtime"
    with pytest.raises(ValueError, match=expected):
        find_accelerator("cuda")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"accelerator": "gpu"}, "runtime.accelerator: expected one of cpu, auto, cuda, mps, found 'gpu'"),
        (
            {"accelerator": "auto", "memory_limit": "scenario"},
            "runtime.memory-limit: scenario limits .*: expected runtime.accelerator = \"cpu\", found 'auto'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, refusal):
    with pytest.raises(ValueError, match=refusal):
        RuntimeConfig(**settings)
