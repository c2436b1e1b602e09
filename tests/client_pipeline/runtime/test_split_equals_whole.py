"""The segmented model on real Ray actors gives the whole model's loss and gradients, tensor by tensor."""

import itertools

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import block_weights, join_weights, own_parameters
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import gradients
from client_pipeline.runtime.stage.whole import whole_step
from helpers.local_head import LocalHead
from helpers.shared_actors import SHARED_ACTORS
from helpers.tiny_models import CLASSIC, NUM_BLOCKS, tiny_batch, tiny_spec

SGD = OptimizerConfig(name="sgd", lr=0.1)

POST_NORM = transformer.spec(
    vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=NUM_BLOCKS, decoder_layers=1, norm="post"
)


@pytest.fixture(scope="module")
def pipelines(local_ray):
    """One pipeline per specification, kept over plans as in a run; its devices share the tests' actors."""
    from client_pipeline.runtime.devices.pipeline import Pipeline

    made = {}
    numbers = itertools.count()

    def get(spec, recompute=False, precision="float32"):
        key = (spec.to_json(), recompute, precision)
        if key not in made:
            while made:
                made.popitem()[1].close()
            made[key] = Pipeline(
                name=f"test-equality-{next(numbers)}",
                spec=spec,
                optimizer=SGD,
                runtime=RuntimeConfig(timeout=240, recompute="always" if recompute else "never", precision=precision),
                placement=SHARED_ACTORS.placement(0, 4),
            )
        return made[key]

    yield get
    for pipeline in made.values():
        pipeline.close()


def assert_split_equals_whole(pipeline, spec, plan, batch, step):
    precision = pipeline.runtime.precision
    parts = build_parts(spec, seed=1)
    for part in (parts.embedding, parts.blocks, parts.head):
        part.train()
    whole = whole_step(parts, step, batch, plan.m, precision)

    split = build_parts(spec, seed=1)
    split.embedding.train()
    weights = split.weights()
    pipeline.apply_plan(plan)
    pipeline.load({i: block_weights(weights, i) for i in range(NUM_BLOCKS)})
    trainer = HeadTrainer(split.head, SGD, unit=NUM_BLOCKS, precision=precision)
    link = LocalHead(trainer)
    outcome = pipeline.run_step(step, [batch], split.embedding, link)

    embedding = gradients(own_parameters(split.embedding))
    found = join_weights(embedding, pipeline.gradients(), trainer.gradients(step.cluster))
    pipeline.discard()

    assert outcome.weight == whole.weight
    assert outcome.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
    torch.testing.assert_close(
        torch.cat(link.outputs), whole.output_BTD, rtol=1e-5, atol=1e-6 if precision == "float32" else 1e-2
    )
    assert found.keys() == whole.gradients.keys()
    for name, gradient in whole.gradients.items():
        # A last bit of difference may fall on the other side of a rounding to bfloat16, and is then 2^-9 large.
        close = (1e-4, 1e-7) if precision == "float32" else (1e-2, 1e-6 + 4e-3 * float(gradient.abs().max()))
        torch.testing.assert_close(
            found[name], gradient, rtol=close[0], atol=close[1], msg=lambda m, n=name: f"{n}: {m}"
        )
    assert any(g.abs().max() > 0 for g in found.values())


GRID = [
    # delta, order, m, schedule; 7 examples, so m = 2, 3, 5 are ragged
    ((5, 0, 0, 0), (0,), 1, "gpipe"),
    ((2, 0, 3, 0), (2, 0), 3, "gpipe"),
    ((2, 0, 3, 0), (0, 2), 3, "1f1b"),
    ((1, 2, 1, 1), (3, 1, 0, 2), 5, "1f1b"),
    ((1, 2, 1, 1), (0, 1, 2, 3), 7, "gpipe"),
    ((0, 4, 0, 1), (1, 3), 2, "1f1b"),
    ((2, 0, 3, 0), (2, 0), 3, "zb-h1"),
    ((1, 2, 1, 1), (3, 1, 0, 2), 5, "zb-h1"),
]
# 7 examples in 3 and 5 micro-batches; with the second plan blocks move.
SOME_PLANS = [
    ClusterPlan(delta=(2, 3), order=(1, 0), m=3),
    ClusterPlan(delta=(4, 1), order=(0, 1), m=5, schedule="1f1b"),
    ClusterPlan(delta=(1, 4), order=(1, 0), m=5, schedule="zb-h1"),
]


@pytest.mark.parametrize(("delta", "order", "m", "schedule"), GRID)
@pytest.mark.parametrize(
    "spec",
    [
        CLASSIC,
        POST_NORM,
        tiny_spec("bert", "sequence-classification"),
        tiny_spec("bert", "token-classification"),
        tiny_spec("bert", "masked-lm"),
        # The families whose blocks are not all alike.
        tiny_spec("deberta-v2", "sequence-classification"),
        tiny_spec("deberta-v2-relative", "token-classification"),
        tiny_spec("modernbert", "token-classification"),
    ],
    ids=[
        "classic-pre",
        "classic-post",
        "bert-sequence",
        "bert-token",
        "bert-masked",
        "deberta-v2-sequence",
        "deberta-v2-relative",
        "modernbert-token",
    ],
)
def test_split_gradients_equal_the_whole_models(pipelines, spec, delta, order, m, schedule):
    plan = ClusterPlan(delta=delta, order=order, m=m, schedule=schedule)
    step = StepId(seed=3, round=2, step=1, cluster=1)
    assert_split_equals_whole(pipelines(spec), spec, plan, tiny_batch(spec), step)


@pytest.mark.parametrize("name", ["bart", "marian", "t5", "gpt2", "llama-tied", "qwen2-window", "qwen3"])
def test_split_gradients_of_decoder_families_equal_the_whole_models(pipelines, name):
    spec = tiny_spec(name)
    step = StepId(seed=3, round=2, step=1, cluster=1)
    for plan in SOME_PLANS:
        assert_split_equals_whole(pipelines(spec), spec, plan, tiny_batch(spec), step)


def test_sequence_length_may_change_from_step_to_step(pipelines):
    plan = ClusterPlan(delta=(2, 3), order=(0, 1), m=2)
    for i, length in enumerate((9, 4, 12)):
        batch = tiny_batch(CLASSIC, size=5, length=length, seed=i, padded=i != 1)
        assert_split_equals_whole(pipelines(CLASSIC), CLASSIC, plan, batch, StepId(seed=0, round=1, step=i, cluster=0))


def test_recomputed_activations_give_the_same_gradients_under_dropout(pipelines):
    for schedule in ("1f1b", "zb-h1"):
        plan = ClusterPlan(delta=(2, 3), order=(0, 1), m=3, schedule=schedule)
        step = StepId(seed=5, round=1, step=1, cluster=0)
        assert_split_equals_whole(pipelines(CLASSIC, recompute=True), CLASSIC, plan, tiny_batch(CLASSIC), step)


@pytest.mark.parametrize("name", ["classic", "bert", "bart", "t5", "llama-tied"])
def test_mixed_precision_gives_the_same_gradients_wherever_the_segments_end(pipelines, name):
    spec = CLASSIC if name == "classic" else tiny_spec(name)
    step = StepId(seed=3, round=2, step=1, cluster=1)
    for plan in SOME_PLANS:
        assert_split_equals_whole(pipelines(spec, precision="bfloat16"), spec, plan, tiny_batch(spec), step)


def test_mixed_precision_rounds_products_and_keeps_sums():
    step = StepId(seed=3, round=2, step=1, cluster=1)
    parts, batch = build_parts(CLASSIC, seed=1), tiny_batch(CLASSIC)
    exact, mixed = (whole_step(parts, step, batch, 2, precision) for precision in ("float32", "bfloat16"))
    assert mixed.output_BTD.dtype == torch.float32 and not torch.equal(exact.output_BTD, mixed.output_BTD)
    assert mixed.loss_sum == pytest.approx(exact.loss_sum, rel=0.01)
    assert all(gradient.dtype == torch.float32 for gradient in mixed.gradients.values())
    expected, found = (torch.cat([g.flatten() for g in w.gradients.values()]) for w in (exact, mixed))
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


def test_dropout_is_really_on_in_these_comparisons():
    step, other = (StepId(seed=0, round=1, step=s, cluster=0) for s in (1, 2))
    parts, batch = build_parts(CLASSIC, seed=1), tiny_batch(CLASSIC)
    assert whole_step(parts, step, batch, 2).loss_sum != whole_step(parts, other, batch, 2).loss_sum
    assert whole_step(parts, step, batch, 2).loss_sum == whole_step(parts, step, batch, 2).loss_sum
