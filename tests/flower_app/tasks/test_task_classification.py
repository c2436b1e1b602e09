import csv
import json

import numpy as np
import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import target_weight, targets
from flower_app.config.sources import load_config
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.classification import macro_f1
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.generated.generated_labels import KINDS, classified
from flower_app.tasks.labelled_task import labels_of
from flower_app.tasks.tokenizer import TextTokenizer
from helpers import task_cases
from helpers.task_cases import options, train

NAME = "sequence-classification"
SMALL = DataConfig(num_examples=120, evaluation_examples=20, vocab_size=400, max_length=40)
ROWS = [("A dog barks.", "animal"), ("The king reads.", "person"), ("A cat, too.", "animal"), ("My aunt?", "person")]


def prepare(data, model=None, num_clusters=1, seed=0, **changes):
    return task_cases.prepare(NAME, data, model, num_clusters, seed, **changes)


def files(folder, name="train.tsv", **changes):
    base = {"vocab_size": 300, "max_length": 40, "train_source": name, "test_source": name}
    return DataConfig(source="files", path=str(folder), **{**base, **changes})


def write_tsv(path, rows=ROWS, header="text\tlabel"):
    lines = [*([header] if header else []), *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def prepared():
    return prepare(SMALL, num_clusters=3)


def test_a_text_stands_between_marks_and_its_label_is_one_class(prepared):
    data = task(TaskConfig(name=NAME)).cluster_data(SMALL, prepared.tokenizer_json, 0, 1, seed=0)
    tokenizer = TextTokenizer.from_json(prepared.tokenizer_json)
    batch, drawn = data.collate([5, 2]), classified(120, "train", 0)
    # One cluster has all examples, in an order of its own.
    texts = {
        tuple(ids): label for (text, label), ids in zip(drawn, tokenizer.encode([t for t, _ in drawn]), strict=True)
    }
    for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        real = ids[mask].tolist()
        assert (real[0], real[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert texts[tuple(real[1:-1])] == KINDS[label]
        assert set(ids[~mask].tolist()) <= {tokenizer.pad_id}
    assert batch["labels"].shape == (2,) and batch["labels"].dtype == torch.int64
    assert target_weight(targets(batch)) == 2


def test_tables_of_all_kinds_give_the_same_examples(tmp_path):
    write_tsv(tmp_path / "a.tsv")
    write_tsv(tmp_path / "b.tsv", [(label, text) for text, label in ROWS], header="")
    with (tmp_path / "c.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("label", "text"), *((label, text) for text, label in ROWS)])
    rows = [{"text": text, "label": label} for text, label in ROWS]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = task(TaskConfig(name=NAME))
    for name, columns in (
        ("a.tsv", {}),
        ("b.tsv", {"source_column": "1", "label_column": "0"}),
        ("c.csv", {}),
        ("d.jsonl", {"source_column": "text", "label_column": "label"}),
    ):
        found = chosen.read(files(tmp_path, name, **columns), "train", None)
        assert list(zip(found.inputs, found.labels, strict=True)) == ROWS, name


@pytest.mark.slow
def test_a_hub_dataset_gives_its_classes_by_number(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a", "c"])}
    )
    rows = {"text": ["one", "two", "three"], "label": [0, 1, 1]}
    split = datasets.Dataset.from_dict(rows, features=features)
    folder = str(tmp_path / "saved")
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(folder)
    config = DataConfig(source="hub", hub_id=folder, vocab_size=300, max_length=40)
    found = prepare(config)
    # Every declared class has its place, whether or not it occurs.
    assert labels_of(found.spec) == ("b", "a", "c")
    data = task(TaskConfig(name=NAME)).cluster_data(config, found.tokenizer_json, 0, 1, 0)
    assert sorted(data.collate([0, 1, 2])["labels"].tolist()) == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "text\tlabel\na\tx\n\ty\n", r"data\.source-column: .*a\.tsv, line 3: the text is empty"),
        ("a.tsv", "text\tlabel\na\tx\nb\t\n", r"data\.label-column: .*a\.tsv, line 3: the label is empty"),
        (
            "a.jsonl",
            '{"text": ["a"], "label": 1}',
            r"data\.source-column: .*line 1: expected a text, found \['a'\]; name",
        ),
        (
            "a.jsonl",
            '{"text": "a", "label": [1]}',
            r"data\.label-column: .*line 1: expected a label, found \[1\]; name",
        ),
        ("a.tsv", "text\tkind\na\tx\n", r"data\.label-column: .*a\.tsv, line 2: no column 'label', found text, kind"),
        ("a.tsv", "text\tlabel\na\tx\nb\n", r"data\.train-source: .*a\.tsv, line 3: expected 2 columns, found 1"),
        ("a.csv", 'text,label\na,x\n"b,y\n', r"data\.train-source: .*a\.csv, line 3: expected comma-separated cells"),
        ("a.jsonl", '{"text": "a", "label": 1}\n\n{"text": "a"}', r"a\.jsonl, line 3: no column 'label', found text"),
        ("a.txt", "a\n", r"data\.train-source: expected a table \(\.tsv, \.csv, \.jsonl, \.parquet\), found .*a\.txt"),
        ("a.tsv", "text\tlabel\na\tx\nb\tx\n", r"data\.labels: expected at least 2 labels, found x"),
    ],
)
def test_damaged_data_is_refused_with_file_and_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        task(TaskConfig(name=NAME)).check(files(tmp_path, name), options(), 0, 1)


def test_a_label_outside_the_list_is_refused_with_its_line(tmp_path):
    write_tsv(tmp_path / "train.tsv")
    message = (
        r"data\.labels: .*train\.tsv, line 3: the train data has the label 'person', expected one of animal, thing"
    )
    with pytest.raises(ValueError, match=message):
        prepare(files(tmp_path, labels="animal, thing"))
    with pytest.raises(ValueError, match=r"data\.labels: expected distinct names with commas between, found 'a'"):
        prepare(files(tmp_path, labels="a, b, a"))


def test_a_label_of_the_test_data_that_training_lacks_is_refused_unless_it_is_listed(tmp_path):
    write_tsv(tmp_path / "train.tsv")
    write_tsv(tmp_path / "test.tsv", [*ROWS, ("A house.", "place")])
    config = files(tmp_path, test_source="test.tsv")
    message = r"test\.tsv, line 6: the \w+ data has the label 'place', expected one of animal, person; data\.labels can"
    with pytest.raises(ValueError, match=message):
        prepare(config)
    listed = files(tmp_path, test_source="test.tsv", labels="place,animal,person")
    assert labels_of(prepare(listed, class_weights="balanced").spec) == ("place", "animal", "person")


def test_long_texts_are_cut_counted_and_still_closed(tmp_path):
    write_tsv(tmp_path / "train.tsv", [("a b c d e f", "x"), ("a b", "y")])
    config = files(tmp_path, max_length=6)
    found = prepare(config)
    data = task(TaskConfig(name=NAME)).cluster_data(config, found.tokenizer_json, 0, 1, 0)
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    assert data.truncated == 1
    batch = data.collate([0, 1])
    assert batch["input_ids"].shape == (2, 6)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [4, 6]
    assert (batch["input_ids"] == tokenizer.eos_id).sum() == 2
    assert found.evaluator.evaluate(build_parts(found.spec, 0), "test").truncated == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "transformer"},
            "expected model.family to be one of bert, .*roberta, found 'transformer'",
        ),
        ({"label_smoothing": 0.1}, "model.label-smoothing: task.name = sequence-classification has none"),
        ({"pretrained": "/no/such/folder"}, "model.pretrained: expected a folder with config.json"),
    ],
)
def test_a_model_that_cannot_classify_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(SMALL, options(**changes))


def test_clusters_with_files_of_their_own_need_the_list_of_labels(tmp_path):
    for cluster, rows in enumerate((ROWS[:1], ROWS[1:2])):
        write_tsv(tmp_path / f"train-{cluster}.tsv", rows)
    write_tsv(tmp_path / "test.tsv")
    config = {"name": "train-{cluster}.tsv", "test_source": "test.tsv", "partition": "files"}
    with pytest.raises(ValueError, match=r"data\.labels: expected the list of labels with data\.partition = files"):
        prepare(files(tmp_path, **config), num_clusters=2)
    with pytest.raises(ValueError, match=r"data\.labels: expected the list of labels with data\.partition = nodes"):
        prepare(files(tmp_path, **config | {"partition": "nodes"}), num_clusters=2)
    listed = files(tmp_path, **config, labels="animal,person")
    found = prepare(listed, num_clusters=2)
    chosen = task(TaskConfig(name=NAME))
    shares = [chosen.cluster_data(listed, found.tokenizer_json, k, 2, 0) for k in range(2)]
    # The cluster that has only seen "person" numbers it as all do.
    assert [share.collate([0])["labels"].tolist() for share in shares] == [[0], [1]]
    with pytest.raises(ValueError, match="expected a file for each of 3 clusters, found 2"):
        prepare(listed, num_clusters=3)


def test_dirichlet_spreads_the_labels_unevenly_and_loses_none(prepared):
    chosen = task(TaskConfig(name=NAME))
    config = DataConfig(**{**SMALL.__dict__, "partition": "dirichlet", "dirichlet_alpha": 0.2})
    shares = [chosen.cluster_data(config, prepared.tokenizer_json, k, 3, 1) for k in range(3)]
    counts = np.stack([np.bincount(share.labels.ids, minlength=4) for share in shares])
    everything = chosen.cluster_data(SMALL, prepared.tokenizer_json, 0, 1, 1)
    assert (counts.sum(0) == np.bincount(everything.labels.ids, minlength=4)).all()
    assert (counts.max(0) > 0.6 * counts.sum(0)).any()


def test_macro_f1_agrees_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (rng.choice(list("abcde"), 30).tolist() for _ in range(2))
        assert macro_f1(a, b) == pytest.approx(metrics.f1_score(a, b, average="macro", zero_division=0))


def test_class_weights_multiply_each_samples_loss():
    weighted = prepare(SMALL, class_weights="balanced")
    plain = prepare(SMALL)
    factors = torch.tensor(weighted.spec.config["class_weights"])
    chosen = task(TaskConfig(name=NAME))
    data = chosen.cluster_data(SMALL, weighted.tokenizer_json, 0, 1, 0)
    batch = data.collate(range(len(data)))
    a, b = (build_parts(found.spec, seed=3) for found in (weighted, plain))
    for parts in (a, b):
        for module in (parts.embedding, parts.blocks, parts.head):
            module.eval()
    each = torch.stack([b.loss_sum({k: v[i : i + 1] for k, v in batch.items()}) for i in range(len(data))])
    assert torch.allclose(a.loss_sum(batch), (each * factors[batch["labels"]]).sum(), rtol=1e-4)
    # The factors' mean over the training data is 1, so the weight of a batch stays its number of samples.
    assert float(factors[batch["labels"]].mean()) == pytest.approx(1)
    assert {name for name, _ in a.named_parameters()} == {name for name, _ in b.named_parameters()}
    scores = [f.evaluator.evaluate(p, "test").metrics["loss"] for f, p in ((weighted, a), (plain, b))]
    assert scores[0] == pytest.approx(scores[1])


@pytest.fixture(scope="module")
def pretrained_folder(tmp_path_factory):
    """A tiny BERT with weights and tokenizer, as another tool would leave it."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    tokenizer_json = prepare(SMALL).tokenizer_json
    (folder / "tokenizer.json").write_text(tokenizer_json)
    size = TextTokenizer.from_json(tokenizer_json).vocab_size
    torch.manual_seed(5)
    BertModel(
        BertConfig(
            vocab_size=size,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=30,
        )
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_pretrained_model_brings_its_weights_and_tokenizer(pretrained_folder):
    from safetensors.torch import load_file

    config = DataConfig(**{**SMALL.__dict__, "max_length": 30})
    found = prepare(config, options(pretrained=str(pretrained_folder)))
    parts = found.build(seed=0)
    stored = load_file(pretrained_folder / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(dict(parts.named_parameters())[f"embedding.{name}"], stored[name])
    assert len(parts.blocks) == 3 and labels_of(parts.spec) == KINDS
    again = prepare(config, options(pretrained=str(pretrained_folder))).build(seed=0)
    assert all(torch.equal(a, b) for a, b in zip(parts.weights().values(), again.weights().values(), strict=True))
    with pytest.raises(ValueError, match=r"data\.max-length: 40 exceeds the 30 positions of"):
        prepare(SMALL, options(pretrained=str(pretrained_folder)))


def test_a_tokenizer_of_another_vocabulary_is_refused(pretrained_folder, tmp_path):
    from flower_app.tasks.word_pieces import train_wordpiece

    other = train_wordpiece(("word" + chr(97 + i % 26) * (i % 5) for i in range(200)), 2000, False, False)
    (tmp_path / "tokenizer.json").write_text(other.to_json())
    config = DataConfig(**{**SMALL.__dict__, "max_length": 30, "tokenizer": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data\.tokenizer: .* gives the token '.+' the id .+, expected .+ as in "):
        prepare(config, options(pretrained=str(pretrained_folder)))


@pytest.mark.slow
def test_generated_labels_are_learned_in_a_few_steps():
    data = DataConfig(num_examples=800, evaluation_examples=100, vocab_size=480, max_length=40)
    chosen = task(TaskConfig(name=NAME))
    found = prepare(data, options(dropout=0.0))
    parts = train(NAME, found, data, steps=120)
    score = found.evaluator.evaluate(parts, "test")
    most = max(np.unique(score.references, return_counts=True)[1]) / score.examples
    assert score.metrics["accuracy"] > max(0.8, most)
    assert score.metrics["accuracy"] == np.mean(
        [r == p for r, p in zip(score.references, score.predictions, strict=True)]
    )
    # The same model, as predict uses it.
    assert chosen.predict(parts, found.tokenizer_json, score.sources[:5]) == score.predictions[:5]
    again = chosen.evaluator(data, found.tokenizer_json).evaluate(parts, "test")
    assert again.metrics == score.metrics


def test_an_empty_text_is_not_predicted(prepared):
    chosen, parts = task(TaskConfig(name=NAME)), build_parts(prepared.spec, 0)
    with pytest.raises(ValueError, match="expected a text, found ' '"):
        chosen.predict(parts, prepared.tokenizer_json, [" "])
    assert chosen.predict(parts, prepared.tokenizer_json, []) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folder", "number", "classes"), [("trec6", "trec6", 4952, 6), ("toutiao", "toutiao", 27724, 15)]
)
def test_real_text_is_read_as_the_configuration_says(real_data, name, folder, number, classes):
    config = load_config(name, [f"data.path={real_data(folder)}"])
    chosen = task(config.task)
    chosen.check(config.data, config.model, 0, 2)
    found = chosen.read(config.data, "train", None)
    assert len(found) == number and len(set(found.labels)) == classes
