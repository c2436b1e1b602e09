"""``collapipe verify`` on real actors: it passes what is right, and it does not pass what is wrong."""

import contextlib
import math

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts, dropouts, read_library_config
from client_pipeline.families.registry import family_named
from client_pipeline.partition.plan import ClusterPlan, write_plans
from client_pipeline.runtime.control_unit import verification
from client_pipeline.runtime.control_unit.verification import SPLIT_TOLERANCE, Verification, random_batch, verify_split
from flower_app.verify import model_builder, verify
from helpers.decoder_only import small_spec
from helpers.thread_ray import run_in_threads
from helpers.tiny_models import CONFIGS, tiny_spec

TINY_BERT = dict(vocab_size=40, hidden_size=16, num_hidden_layers=12, num_attention_heads=2, intermediate_size=32)


def save_bert(folder, kind="BertForSequenceClassification", weights=True, **more):
    import transformers

    config = transformers.BertConfig(**TINY_BERT, architectures=[kind], **more)
    if weights:
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return str(folder)


@pytest.mark.promise
def test_a_bert_of_twelve_layers_cut_5_4_3_passes(local_ray, tmp_path):
    model = save_bert(tmp_path, weights=False)
    found = verify(model=model, segments=(5, 4, 3), micro_batches=11, batch_size=16, length=8)
    assert found.passed
    assert found.worst <= SPLIT_TOLERANCE
    assert found.reference is not None
    assert len(found.gradients) == 12 * 16 + 5 + 4


@pytest.mark.parametrize(("kind", "labels"), [("BertForSequenceClassification", 5), ("BertForTokenClassification", 7)])
def test_a_users_checkpoint_keeps_its_own_head(local_ray, tmp_path, kind, labels):
    model = save_bert(tmp_path, kind, num_labels=labels)
    parts = model_builder(model, seed=0)()
    assert parts.head.classifier.out_features == labels
    found = verify(model=model, segments=(6, 6), micro_batches=3, batch_size=4, length=6)
    assert found.passed


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_folder_of_any_family_passes(local_ray, tmp_path, family):
    head = family_named(family).HEADS[-1]
    build_parts(tiny_spec(family, head), seed=0).reference.save_pretrained(tmp_path)
    num_blocks = read_library_config(str(tmp_path)).num_hidden_layers
    found = verify(model=str(tmp_path), segments=(2, num_blocks - 2), micro_batches=3, batch_size=4, length=12)
    assert found.reference is not None
    assert found.passed


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_labels_that_stay_pass(local_ray, tmp_path, family, schedule):
    """Output layers of their own and tied ones; uneven micro-batches."""
    spec = tiny_spec(family, "causal-lm") if family in CONFIGS else small_spec(family)
    build_parts(spec, seed=0).reference.save_pretrained(tmp_path)
    num_blocks = read_library_config(str(tmp_path)).num_hidden_layers
    server_layers = num_blocks // 3
    segments = (1, num_blocks - server_layers - 1)
    cut = {"segments": segments, "server_layers": server_layers, "labels": "cluster", "schedule": schedule}
    found = verify(model=str(tmp_path), micro_batches=3, batch_size=4, length=12, **cut)
    assert found.passed and found.reference is not None
    assert "embedding.tail.norm.weight" in found.gradients and "head.blocks.0" in "".join(found.gradients)


def test_labels_stay_where_the_model_writes_text(tmp_path):
    model = save_bert(tmp_path, weights=False)
    with pytest.raises(ValueError, match="--labels cluster: expected a decoder-only language model .* 'bert' with"):
        verify(model=model, labels="cluster")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert"])
@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "int8", "nf4"])
def test_a_model_with_adapters_over_its_files_passes(local_ray, tmp_path, family, base_dtype):
    build_parts(tiny_spec(family), seed=0).reference.save_pretrained(tmp_path, max_shard_size="10KB")
    num_blocks = read_library_config(str(tmp_path)).num_hidden_layers
    options = dict(segments=(2, num_blocks - 2), micro_batches=3, batch_size=4, length=12)
    found = verify(model=str(tmp_path), base_dtype=base_dtype, **options)
    assert found.passed
    factors = [name for name in found.gradients if ".lora_" in name]
    assert len(factors) >= 2 * num_blocks


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("base_dtype", ["", "bfloat16", "int8", "nf4"])
def test_token_slices_pass_over_sharded_files_and_a_base_in_few_bits(local_ray, tmp_path, family, base_dtype):
    """Its dropout is left out: GPT-2's configuration has some unless it says otherwise."""
    build_parts(tiny_spec(family), seed=0).reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    num_blocks = read_library_config(str(tmp_path)).num_hidden_layers
    options = dict(segments=(2, num_blocks - 2), micro_batches=3, batch_size=4, length=12, schedule="1f1b")
    found = verify(model=str(tmp_path), base_dtype=base_dtype, token_slices=3, **options)
    assert found.passed
    assert any(".lora_" in name for name in found.gradients) == bool(base_dtype)


@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
def test_a_folder_with_a_config_alone_gives_weights_that_each_part_draws(monkeypatch, tmp_path, base_dtype):
    run_in_threads(monkeypatch)
    monkeypatch.setattr(verification, "private_ray", contextlib.nullcontext)
    build_parts(tiny_spec("llama"), seed=0).reference.config.save_pretrained(tmp_path)
    options = dict(segments=(2, 5), micro_batches=3, batch_size=4, length=12)
    found = verify(model=str(tmp_path), base_dtype=base_dtype, **options)
    assert found.passed and any(".lora_" in name for name in found.gradients)


@pytest.mark.promise
def test_a_model_that_differs_does_not_pass(local_ray):
    spec = transformer.spec(vocab_size=40, width=16, num_heads=2, feed_forward=32, encoder_layers=2, decoder_layers=1)
    built = []

    def build():
        # The second call builds the split model: one of its weights is off by a thousandth.
        parts = build_parts(spec, seed=1)
        if built:
            with torch.no_grad():
                parts.embedding.token.weight.mul_(1.001)
        built.append(parts)
        return parts

    found = verify_split(build, ClusterPlan(delta=(1, 1), order=(0, 1), m=2), random_batch(spec, 4, 5))
    assert not found.passed
    assert found.output > SPLIT_TOLERANCE


@pytest.mark.parametrize("where", ["output", "loss", "gradient", "reference"])
def test_nan_anywhere_does_not_pass(where):
    nan = math.nan
    found = Verification(
        output=nan if where == "output" else 0.0,
        loss=nan if where == "loss" else 0.0,
        gradients={"a": 0.0, "b": nan if where == "gradient" else 0.0, "c": 0.0},
        reference=nan if where == "reference" else 0.0,
    )
    assert not found.passed


def test_token_slices_of_a_model_whose_tokens_see_later_ones_are_refused_before_anything_starts(tmp_path):
    model = save_bert(tmp_path, weights=False)
    with pytest.raises(ValueError, match="^--token-slices 2: expected a decoder-only model, .* model.family bert with"):
        verify(model=model, segments=(6, 6), micro_batches=2, batch_size=4, length=6, token_slices=2)
    write_plans(tmp_path / "plan.json", [ClusterPlan(delta=(6, 6), order=(0, 1), m=2, token_slices=4)])
    with pytest.raises(ValueError, match="^--token-slices 4: expected a decoder-only model"):
        verify(model=model, plan_file=tmp_path / "plan.json", batch_size=4, length=6)
    with pytest.raises(ValueError, match="plan: token_slices = 0, expected 1, for whole micro-batches, to 64"):
        verify(token_slices=0)


def test_a_folder_that_drops_is_compared_with_the_librarys_model_without_dropout(monkeypatch, tmp_path):
    build_parts(tiny_spec("gpt2", "causal-lm", dropout=0.1), seed=0).reference.save_pretrained(tmp_path)
    compared = []

    def difference(parts, batch):
        compared.append((dropouts(parts.spec), dict(parts.named_parameters())))
        return "scores differ by 1 of the largest"

    monkeypatch.setattr("flower_app.verify.parts_difference", difference)
    with pytest.raises(ValueError, match="cannot be split: scores differ by 1 of the largest"):
        verify(model=str(tmp_path), segments=(3, 4), micro_batches=2, batch_size=2, length=6)
    ((rates, weights),) = compared
    assert rates == {}
    expected = dict(model_builder(str(tmp_path), seed=0)().named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_mistakes_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json; give the folder of a Hugging Face model"):
        verify(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "fnet"}')
    with pytest.raises(ValueError, match="--model: .*: model type 'fnet' is not supported; expected one of bart, bert"):
        verify(model=str(tmp_path))
    with pytest.raises(ValueError, match=r"delta \[2, 1\] sums to 3, expected the model's L = 4"):
        verify(segments=(2, 1))
    with pytest.raises(
        ValueError, match="model.base-dtype: expected one of float32, bfloat16, int8, nf4, found 'int4'"
    ):
        verify(model=str(tmp_path), base_dtype="int4")
    with pytest.raises(ValueError, match="--plan and --segments: give one of them"):
        verify(plan_file=tmp_path / "x.json", segments=(4,))
