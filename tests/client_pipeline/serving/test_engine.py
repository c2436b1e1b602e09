"""Texts that are written over the parts of a model are those of the library's ``generate`` with the whole model."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import block_weights
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from client_pipeline.runtime.stage.answering import AnswerStep, KeptRequests, answer_step
from client_pipeline.serving.engine import Engine
from client_pipeline.serving.generation import AnsweringModel, GumbelNoise
from client_pipeline.serving.proof import check_answers
from client_pipeline.serving.stages import LocalStages

VOCABULARY = 97
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
FAMILIES = {
    "gpt2": GPT2,
    "llama": SIZES,
    "qwen3": SIZES,
    # Windows shorter than the texts, and layers with and without one.
    "gemma3_text": {**SIZES, "sliding_window": 6, "sliding_window_pattern": 2},
}
NO_MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def model(family, server_layers=1):
    """Parts with weights that are far from each other, so that no two scores are close."""
    config = {**FAMILIES[family], "vocab_size": VOCABULARY, **NO_MARKS, "server_layers": server_layers}
    parts = build_parts(ModelSpec(family=family, head=CAUSAL_LM, config=config), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in parts.all_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    for part in (parts.reference, parts.embedding, parts.blocks, parts.head):
        part.eval()
    return parts


def prompt(rows, length):
    """Ids and mask of prompts of unequal lengths, which end together."""
    generator = torch.Generator().manual_seed(100 * rows + length)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : min(row, length - 1)] = 0
    return ids * mask, mask


def options(**more):
    base = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    return GenerationConfig(**base, return_dict_in_generate=True, output_logits=True, **more)


def check_equal(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    differences = [(a - b).abs().max() for a, b in zip(found.logits, expected.logits, strict=True)]
    assert max(differences) < 1e-4


def written_together(engine, parts, jobs):
    """Write behind several prompts at once."""
    config = parts.reference.config

    def write(job):
        with torch.no_grad():
            return AnsweringModel(config).write(engine, *prompt(*job[:2]), generation_config=options(num_beams=job[2]))

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(write, jobs))


def written_whole(parts, job):
    ids, mask = prompt(*job[:2])
    with torch.no_grad():
        return parts.reference.generate(input_ids=ids, attention_mask=mask, generation_config=options(num_beams=job[2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_share_their_steps_write_what_each_writes_alone(family):
    """Batches of one to four, prompts of unequal length, and beams beside greedy search."""
    parts = model(family)
    engine = Engine(parts.embedding, parts.head, LocalStages(parts))
    jobs = [(1, 5, 1), (2, 9, 1), (4, 7, 1), (2, 6, 3)]
    try:
        for job, found in zip(jobs, written_together(engine, parts, jobs), strict=True):
            check_equal(found, written_whole(parts, job))
    finally:
        engine.close()


class Counted(LocalStages):
    """Counts the requests of each step, and fails at some."""

    def __init__(self, parts, failures=()):
        super().__init__(parts)
        self.sizes, self.failures, self.restored = [], set(failures), 0

    def run(self, step, x_RTD):
        self.sizes.append(len(step.requests))
        if len(self.sizes) in self.failures:
            future = Future()
            future.set_exception(RuntimeError("a device is gone"))
            return future
        return super().run(step, x_RTD)

    def bring_up(self):
        self._kept.clear()
        self.restored += 1


def test_steps_of_several_requests_are_computed_together():
    parts = model("llama")
    stages = Counted(parts)
    engine = Engine(parts.embedding, parts.head, stages)
    held = threading.Event()
    # No step begins before all have asked.
    engine._events.put(held.wait)
    threading.Timer(0.5, held.set).start()
    try:
        written_together(engine, parts, [(1, 5, 1), (1, 9, 1), (1, 7, 1)])
    finally:
        engine.close()
    # Three times 16 tokens; alone they would take as many steps.
    assert sum(stages.sizes) == 48 > len(stages.sizes) and max(stages.sizes) > 1


class Slow(Counted):
    """Takes longer for a step than a group waits for a member."""

    def run(self, step, x_RTD):
        done, future = super().run(step, x_RTD), Future()
        threading.Timer(0.1, lambda: future.set_result(done.result())).start()
        return future


def test_requests_that_begin_one_after_the_other_do_not_take_turns():
    parts = model("llama")
    stages = Slow(parts)
    engine = Engine(parts.embedding, parts.head, stages)
    try:
        written_together(engine, parts, [(1, 5, 1), (1, 9, 1)])
    finally:
        engine.close()
    # 16 tokens each: the prompts alone, then together.
    assert sum(stages.sizes) == 32 and len(stages.sizes) <= 24


def test_after_a_failure_texts_go_on_from_their_tokens():
    parts = model("llama")
    stages = Counted(parts, failures=(2, 9, 10, 17))
    said = []
    engine = Engine(parts.embedding, parts.head, stages, said.append)
    jobs = [(1, 5, 1), (2, 9, 1), (2, 6, 3)]
    try:
        for job, found in zip(jobs, written_together(engine, parts, jobs), strict=True):
            check_equal(found, written_whole(parts, job))
    finally:
        engine.close()
    assert stages.restored == len(said) == 4 and "a device is gone" in said[0]


def test_a_step_that_fails_again_and_again_ends_its_request():
    parts = model("llama")
    engine = Engine(parts.embedding, parts.head, Counted(parts, failures=range(1, 100)))
    try:
        with pytest.raises(RuntimeError, match="a device is gone"):
            written_together(engine, parts, [(1, 5, 1)])
    finally:
        engine.close()


class Unrestored(Counted):
    """Cannot be brought up again, and has lost what it would forget."""

    def bring_up(self):
        raise RuntimeError("too few devices for the TEBs")

    def drop(self, requests):
        raise KeyError(1)


def test_requests_hear_that_too_few_devices_are_left():
    parts = model("llama")
    engine = Engine(parts.embedding, parts.head, Unrestored(parts, failures=(3,)))
    with pytest.raises(RuntimeError, match="too few devices"):
        written_together(engine, parts, [(1, 5, 1), (1, 9, 1)])
    # The engine's thread had ended with the devices' own error, and whoever asked later waited for ever.
    late = engine.ask("late", torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3))
    assert late.result(60).shape[:2] == (1, 1)
    engine.close()


def test_an_engine_that_fails_itself_ends_its_requests_and_takes_no_more():
    parts = model("llama")
    engine = Engine(parts.embedding, parts.head, LocalStages(parts))
    ones = torch.ones(1, 3, dtype=torch.long)
    engine._events.put(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="the engine failed: ZeroDivisionError"):
        engine.ask("one", ones, ones).result(60)
    with pytest.raises(RuntimeError, match="the engine failed: ZeroDivisionError"):
        engine.ask("two", ones, ones)


def test_requests_end_with_the_engine():
    parts = model("llama")
    engine = Engine(parts.embedding, parts.head, LocalStages(parts))
    held = threading.Event()
    engine._events.put(held.wait)
    answer = engine.ask("one", torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3))
    threading.Timer(0.2, held.set).start()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        answer.result(120)
    with pytest.raises(RuntimeError, match="closed"):
        engine.ask("two", torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3)).result(1)


def test_nothing_is_kept_of_requests_that_have_ended():
    parts = model("gpt2")
    stages = LocalStages(parts)
    engine = Engine(parts.embedding, parts.head, stages)
    try:
        written_together(engine, parts, [(1, 5, 1), (3, 9, 1)])
    finally:
        engine.close()
    assert stages._kept.nbytes == engine._kept.nbytes == 0


def test_rows_that_come_and_go_keep_their_keys():
    """Requests join and leave a group while their tokens come one by one."""
    parts = model("llama", server_layers=0)
    kept = KeptRequests()
    blocks = dict(enumerate(parts.blocks))

    texts = {name: prompt(1, length)[0] for name, length in (("a", 12), ("b", 9), ("c", 5))}
    taken = dict.fromkeys(texts, 0)

    def take(*names, number=1):
        ids = torch.cat([texts[name][:, taken[name] : taken[name] + number] for name in names])
        width = max(taken[name] for name in names) + number
        mask = torch.stack([torch.arange(width) >= width - taken[name] - number for name in names])
        step = AnswerStep(requests=names, num_rows=(1,) * len(names), mask_RK=mask)
        with torch.no_grad():
            states = answer_step(blocks, kept, step, parts.embedding.step(ids, mask))
        for name, row in zip(names, states, strict=True):
            taken[name] += number
            with torch.no_grad():
                whole = parts.encode(
                    {
                        "input_ids": texts[name][:, : taken[name]],
                        "attention_mask": torch.ones(1, taken[name], dtype=torch.bool),
                    }
                )
            assert torch.allclose(row, whole[0, -number:], atol=1e-5), (name, taken[name])

    take("a", number=6)
    take("b", number=3)
    take("a", "b")
    take("b")
    take("c", number=2)
    take("c", "a", "b")
    kept.drop(["a"])
    taken["a"] = 0
    take("b", "c")
    take("a", number=4)
    take("c", "a")
    take("b")
    kept.drop(["a", "b", "c"])
    assert kept.nbytes == 0


def test_noise_draws_tokens_as_their_probabilities_say():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    draws = 20_000
    noise = GumbelNoise(seed=7)
    found = torch.bincount(noise(None, scores.expand(draws, -1)).argmax(-1), minlength=5) / draws
    expected = torch.softmax(scores[0], -1)
    # Five standard deviations.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()
    again = [GumbelNoise(seed=3)(None, scores) for _ in range(2)]
    assert torch.equal(*again)


def test_a_model_that_keeps_more_than_keys_is_refused():
    config = {**SIZES, "vocab_size": VOCABULARY, **NO_MARKS}
    check_answers(ModelSpec(family="llama", head=CAUSAL_LM, config=config))
    mamba = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}
    with pytest.raises(ValueError, match="'mamba' does not write token by token"):
        check_answers(ModelSpec(family="mamba", head=CAUSAL_LM, config=mamba))


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_a_device_that_is_lost_in_the_midst_changes_no_text(local_ray, signal_name):
    import os
    import signal

    from client_pipeline.runtime.config import RuntimeConfig
    from client_pipeline.runtime.devices.answering_devices import DeviceStages
    from client_pipeline.runtime.devices.pipeline import Pipeline
    from client_pipeline.runtime.stage.learning_rate import OptimizerConfig

    parts = model("llama", server_layers=0)
    pipeline = Pipeline(
        name=f"serve-{signal_name}", spec=parts.spec, optimizer=OptimizerConfig(name="sgd"), runtime=RuntimeConfig()
    )
    plans = []

    def plan_for(devices):
        delta = [0, 0, 0]
        for block in range(4):
            delta[devices[block * len(devices) // 4]] += 1
        plans.append(ClusterPlan(delta=tuple(delta), order=(0, 1, 2), m=1))
        return plans[-1]

    weights = parts.weights()
    stages = DeviceStages(pipeline, plan_for, 3, {i: block_weights(weights, i) for i in range(4)})
    said, steps = [], 0
    lost = pipeline.pool.pids[1][0]

    class Losing:
        """Stages of which one is lost after some steps."""

        num_stages = property(lambda self: stages.num_stages)
        drop, bring_up = stages.drop, stages.bring_up

        def run(self, step, x_RTD):
            nonlocal steps
            steps += 1
            if steps == 10:
                os.kill(lost, getattr(signal, signal_name))
            return stages.run(step, x_RTD)

    engine = Engine(parts.embedding, parts.head, Losing(), said.append)
    jobs = [(1, 5, 1), (2, 9, 1), (2, 6, 3)]
    try:
        for job, found in zip(jobs, written_together(engine, parts, jobs), strict=True):
            check_equal(found, written_whole(parts, job))
    finally:
        engine.close()
        stages.close()
    assert len(said) == 1 and plans[0].devices == [0, 1, 2] and plans[-1].devices == [0, 2]
