from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BartForConditionalGeneration

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import sized_config
from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig, Pairs, load_pairs
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer
from flower_app.tasks.translation import TranslationData
from helpers import task_cases

SMALL = DataConfig(num_examples=120, evaluation_examples=20, vocab_size=500)


def options(**changes):
    sizes = {"family": "transformer", "encoder_layers": 1, "label_smoothing": 0.1, "max_length": 128}
    return task_cases.options(**{**sizes, **changes})


@pytest.fixture(scope="module")
def prepared():
    return task(TaskConfig(evaluate_batch_size=7)).prepare(SMALL, options(), seed=0, num_clusters=3)


@pytest.fixture(scope="module")
def parts(prepared):
    return build_parts(prepared.spec, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": "sample"}, "task.decode: expected one of greedy, beam, found 'sample'"),
        ({"beam_size": 0}, "task.beam-size: expected at least 1, found 0"),
        ({"evaluate_batch_size": 0}, "task.evaluate-batch-size: expected at least 1, found 0"),
    ],
)
def test_a_task_that_cannot_run_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        TaskConfig(**values)
    assert message in str(error.value)


def test_a_batch_pads_to_its_longest_and_ends_each_side_with_the_end_of_sentence():
    pairs = Pairs(["the dog", "the dog sees the cat", "a"], ["der Hund", "der Hund sieht die Katze", "ein"])
    tokenizer = train_tokenizer(pairs.sources + pairs.targets, 400, pretokenized=False)
    data = TranslationData.encode(pairs, tokenizer, max_length=64)
    batch = data.collate([1, 0])
    sources, labels = tokenizer.encode(pairs.sources), tokenizer.encode(pairs.targets)
    eos, longest = tokenizer.eos_id, len(sources[1]) + 1
    assert batch["input_ids"].tolist() == [
        [*sources[1], eos],
        [*sources[0], eos] + [tokenizer.pad_id] * (longest - len(sources[0]) - 1),
    ]
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["attention_mask"].sum(dim=1).tolist() == [longest, len(sources[0]) + 1]
    assert batch["labels"][1].tolist() == [*labels[0], eos] + [-100] * (len(labels[1]) - len(labels[0]))
    assert {tensor.dtype for name, tensor in batch.items() if name != "attention_mask"} == {torch.int64}
    assert target_weight(targets(batch)) == len(labels[0]) + len(labels[1]) + 2
    assert data.collate([2])["input_ids"].shape == (1, len(sources[2]) + 1)


def test_an_empty_sentence_is_refused_before_the_run(tmp_path):
    (tmp_path / "a.en").write_text("a\n\n")
    (tmp_path / "a.de").write_text("b\nc\n")
    names = {
        f"{split}_{side}": f"a.{end}"
        for split in ("train", "test")
        for side, end in (("source", "en"), ("target", "de"))
    }
    with pytest.raises(ValueError, match=r"data\.train-source: .*a\.en, line 2: the sentence is empty"):
        task(TaskConfig()).check(DataConfig(source="files", path=str(tmp_path), **names), options(), 0, 1)


def test_clusters_share_the_training_data_out_and_repeat_it(prepared):
    chosen = task(TaskConfig())
    shares = [chosen.cluster_data(SMALL, prepared.tokenizer_json, k, 3, seed=0) for k in range(3)]
    assert tuple(map(len, shares)) == prepared.cluster_sizes == (40, 40, 40)
    assert prepared.num_examples == 120
    again = chosen.cluster_data(SMALL, prepared.tokenizer_json, 1, 3, seed=0)
    assert np.array_equal(again.source.ids, shares[1].source.ids)
    everything = chosen.cluster_data(SMALL, prepared.tokenizer_json, 0, 1, seed=0)
    assert sum(len(s.target.ids) for s in shares) == len(everything.target.ids)


def test_one_file_per_cluster_needs_a_file_for_each(tmp_path):
    for name in ("part0.en", "part0.de", "part1.en", "part1.de"):
        (tmp_path / name).write_text("a b\n" * int(name[4] == "0") + f"{name[4]} c\n", encoding="utf-8")
    data = DataConfig(
        source="files",
        partition="files",
        path=str(tmp_path),
        train_source="part{cluster}.en",
        train_target="part{cluster}.de",
        test_source="part0.en",
        test_target="part0.de",
    )
    chosen = task(TaskConfig())
    prepared = chosen.prepare(data, options(), seed=0, num_clusters=2)
    assert prepared.num_examples == 3
    assert [len(chosen.cluster_data(data, prepared.tokenizer_json, k, 2, 0)) for k in (0, 1)] == [2, 1]
    with pytest.raises(ValueError, match=r"expected a file for each of 3 clusters, found 2: no part2\.en in "):
        chosen.prepare(data, options(), seed=0, num_clusters=3)


def test_text_that_only_the_nodes_have_stays_there(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part1.en").write_text("a b\nc d\n", encoding="utf-8")
    (tmp_path / "mine" / "part1.de").write_text("e f\ng h\n", encoding="utf-8")
    for name in ("test.en", "test.de"):
        (tmp_path / name).write_text("a b c d e f g h\n", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["a b c d e f g h"], 300, False).to_json())
    data = DataConfig(
        source="files",
        partition="nodes",
        path=str(tmp_path),
        train_source="part{cluster}.en",
        train_target="part{cluster}.de",
        test_source="test.en",
        test_target="test.de",
        tokenizer=str(tmp_path),
    )
    chosen = task(TaskConfig())
    # The server sees no training file, and prepares the run nevertheless.
    prepared = chosen.prepare(data, options(), seed=0, num_clusters=2)
    assert prepared.cluster_sizes == ()
    at_the_node = replace(data, path=str(tmp_path / "mine"))
    assert len(chosen.cluster_data(at_the_node, prepared.tokenizer_json, 1, 2, 0)) == 2
    with pytest.raises(ValueError, match=r"data\.train-source: .*part0\.en"):
        chosen.cluster_data(at_the_node, prepared.tokenizer_json, 0, 2, 0)
    with pytest.raises(ValueError, match=r"data\.tokenizer: expected a tokenizer's folder .* data\.partition = nodes"):
        chosen.prepare(replace(data, tokenizer=""), options(), seed=0, num_clusters=2)


def test_the_evaluation_gives_the_plain_cross_entropy_per_token(prepared, parts):
    score = prepared.evaluator.evaluate(parts)
    encoded = prepared.evaluator._encoded["validation"]
    batch = encoded.collate(range(len(encoded)))
    for module in (parts.embedding, parts.blocks, parts.head):
        module.eval()
    with torch.no_grad():
        states = parts.head.hidden(
            parts.encode(batch), batch["attention_mask"], parts.head.shift_right(batch["labels"])
        )
        loss = torch.nn.functional.cross_entropy(parts.head.scores(states).flatten(0, 1), batch["labels"].flatten())
    assert score.metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert score.examples == len(score.predictions) == len(score.references) == len(score.sources) == 20
    assert "tok:13a" in score.signature


@pytest.mark.parametrize("decode", ["greedy", "beam"])
def test_translations_do_not_depend_on_the_batch(decode, prepared, parts):
    scores = [
        task(TaskConfig(decode=decode, evaluate_batch_size=size))
        .evaluator(SMALL, prepared.tokenizer_json)
        .evaluate(parts)
        for size in (20, 3)
    ]
    assert scores[0].predictions == scores[1].predictions
    sources = scores[0].sources[:5]
    predicted = task(TaskConfig(decode=decode)).predict(parts, prepared.tokenizer_json, sources)
    assert predicted == scores[0].predictions[:5]


def test_a_model_that_has_learned_its_sentences_by_heart_scores_100_bleu():
    model = options(dropout=0.0, label_smoothing=0.0)
    prepared = task(TaskConfig()).prepare(SMALL, model, seed=0, num_clusters=1)
    parts = build_parts(prepared.spec, seed=1)
    pairs = prepared.evaluator._pairs["validation"]
    tokenizer = TextTokenizer.from_json(prepared.tokenizer_json)
    data = TranslationData.encode(pairs, tokenizer, 64)
    optimizer = PartOptimizer(dict(parts.named_parameters()), OptimizerConfig(lr=5e-3))
    torch.manual_seed(0)
    batch = data.collate(range(len(data)))
    for step in range(1, 121):
        (parts.loss_sum(batch) / target_weight(targets(batch))).backward()
        optimizer.apply(step)
    score = prepared.evaluator.evaluate(parts)
    assert score.predictions == pairs.targets
    assert score.metrics["bleu"] == pytest.approx(100)


def test_multi30k_is_prepared_from_its_files(real_data):
    names = {"train": "val", "validation": "val", "test": "test_2016_flickr"}
    data = DataConfig(
        source="files",
        path=str(real_data("multi30k/tok")),
        pretokenized=True,
        vocab_size=1000,
        **{f"{split}_source": f"{name}.lc.norm.tok.en" for split, name in names.items()},
        **{f"{split}_target": f"{name}.lc.norm.tok.de" for split, name in names.items()},
    )
    prepared = task(TaskConfig()).prepare(data, options(), seed=0, num_clusters=4)
    assert prepared.num_examples == 1014
    assert prepared.spec.config["vocab_size"] == 1000


FAMILIES = ("bart", "marian", "t5")


@pytest.fixture(scope="module", params=FAMILIES)
def translator(request):
    """A library's model in the middle of its training, so that it has something to say."""
    chosen = task(TaskConfig(evaluate_batch_size=7))
    prepared = chosen.prepare(SMALL, options(family=request.param, dropout=0.0), seed=0, num_clusters=1)
    parts = prepared.build(0)
    data = chosen.cluster_data(SMALL, prepared.tokenizer_json, 0, 1, seed=0)
    optimizer = PartOptimizer(dict(parts.named_parameters()), OptimizerConfig(name="adamw", lr=3e-3))
    losses = []
    for step in range(1, 151):
        batch = data.collate(range(40))
        loss = parts.loss_sum(batch) / target_weight(targets(batch))
        loss.backward()
        optimizer.apply(step, 1.0)
        losses.append(float(loss.detach()))
    return prepared, parts, losses


@pytest.mark.slow
def test_the_librarys_encoder_decoders_learn_to_translate(translator):
    prepared, parts, losses = translator
    assert losses[-1] < 0.75 * losses[0]
    score = prepared.evaluator.evaluate(parts, "validation")
    assert score.examples == 20 and set(score.metrics) == {"loss", "bleu", "chrf"}
    assert score.metrics["loss"] < losses[0] and score.metrics["chrf"] > 5


def test_greedy_search_of_the_library_is_the_decoders_own_choice_token_by_token(translator):
    prepared, parts, _ = translator
    tokenizer = TextTokenizer.from_json(prepared.tokenizer_json)
    texts = load_pairs(SMALL, "validation", seed=0).sources[:4]
    found = task(TaskConfig(max_new_tokens=8)).predict(parts, prepared.tokenizer_json, texts)
    head, expected = parts.head, []
    parts.head.eval(), parts.embedding.eval(), parts.blocks.eval()
    for text in texts:
        begin, end = tokenizer.marks
        ids = torch.tensor([[*begin, *tokenizer.encode([text])[0], *end]])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
        with torch.no_grad():
            memory, prefix = parts.encode(batch), [head.start_id]
            while len(prefix) <= 8 and prefix[-1] != tokenizer.eos_id or len(prefix) == 1:
                y_BUD = head.hidden(memory, batch["attention_mask"], torch.tensor([prefix]))
                prefix.append(int(head.scores(y_BUD[0, -1]).argmax()))
        # At the limit the library may have put an end of its own.
        expected.append([i for i in prefix[1:8] if i not in (head.start_id, head.pad_id, tokenizer.eos_id)])
    assert all(text.startswith(own) for text, own in zip(found, tokenizer.decode(expected), strict=True)) and any(found)


def test_a_pretrained_model_reads_and_writes_the_marks_of_its_tokenizer(tmp_path):
    """BART's sentences begin with a mark, which its decoder learns to write; the classic model's do not."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(train_tokenizer(["the dog sees", "der hund sieht"], 400, False).to_json())
    backend.post_processor = TemplateProcessing(single="<s>:0 $A:0 </s>:0", special_tokens=[("<s>", 1), ("</s>", 2)])
    marked = TextTokenizer(backend)
    assert marked.marks == ([1], [2]) and marked.without_rule().marks == ([], [2])
    encoded = TranslationData.encode(Pairs(["the dog"], ["der hund"]), marked, max_length=9)
    batch = encoded.collate([0])
    for row in (batch["input_ids"][0], batch["labels"][0]):
        assert (row[0], row[-1]) == (1, 2)
    config = sized_config(
        "bart",
        vocab_size=marked.vocab_size,
        width=16,
        num_heads=2,
        feed_forward=32,
        num_layers=2,
        decoder_layers=1,
        dropout=0.0,
        max_length=40,
        pad_id=0,
        bos_id=1,
        eos_id=2,
    )
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    chosen, model = task(TaskConfig()), options(family="bart", pretrained=str(tmp_path), max_length=40)
    prepared = chosen.prepare(replace(SMALL, max_length=40), model, seed=0, num_clusters=1)
    assert TextTokenizer.from_json(prepared.tokenizer_json).marks == ([1], [2])
    weight = load_file(tmp_path / "model.safetensors")["model.decoder.layers.0.fc1.weight"]
    assert torch.equal(prepared.build(0).head.decoder.layers[0].fc1.weight, weight)
    with pytest.raises(ValueError, match="data.max-length: 64 exceeds the 40 positions"):
        chosen.prepare(replace(SMALL, max_length=64), model, seed=0, num_clusters=1)
