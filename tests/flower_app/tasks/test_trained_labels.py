"""A pretrained head goes on with its own classes: the labels of the data are matched with them by name."""

import json
from dataclasses import replace

import pytest
import torch

from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.labelled_task import labels_of
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.word_pieces import train_wordpiece
from helpers.task_cases import options, prepare, save

CLASSIFICATION, TAGGING = "sequence-classification", "token-classification"
TEXTS = ["a good film", "a bad film", "a fine play", "a poor play"]
KIND = {CLASSIFICATION: "BertForSequenceClassification", TAGGING: "BertForTokenClassification"}
CONLL = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]


def checkpoint(folder, classes, kind=KIND[CLASSIFICATION], best=0, config_changes=None, dtype=torch.float32):
    """Save a tiny BERT as the library does; whatever it reads, it takes class ``best``."""
    import transformers

    tokenizer = train_wordpiece(TEXTS * 3, 400, False, True)
    config = transformers.BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        id2label=dict(enumerate(classes)),
        label2id={name: i for i, name in enumerate(classes)},
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    if hasattr(model, "classifier"):
        with torch.no_grad():
            model.classifier.bias[best] += 50
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    if config_changes is not None:
        settings = json.loads((folder / "config.json").read_text()) | config_changes
        settings = {key: value for key, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(settings))
    return options(pretrained=str(folder))


def table(folder, rows, **changes):
    """Write texts with these labels."""
    lines = [f"{TEXTS[i % 4]}\t{label}" for i, label in enumerate(rows)]
    (folder / "data.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    base = {"train_source": "data.tsv", "test_source": "data.tsv", "max_length": 20}
    return DataConfig(source="files", path=str(folder), **{**base, **changes})


def tagged(folder, tags):
    """Write one sentence of words with these tags."""
    (folder / "data.conll").write_text("\n".join(f"film {tag}" for tag in tags) + "\n")
    return DataConfig(
        source="files", path=str(folder), train_source="data.conll", test_source="data.conll", max_length=20
    )


def scored(name, data, model):
    """Give what the model starts with, its score before any training, and the classes of a cluster's labels."""
    found = prepare(name, data, model)
    parts = found.build(seed=1)
    share = task(TaskConfig(name=name)).cluster_data(data, found.tokenizer_json, 0, 1, 0)
    numbers = share.labels.ids.tolist()
    names = [labels_of(found.spec)[number] for number in numbers if number >= 0]
    return found, found.evaluator.evaluate(parts, "test").metrics, names


@pytest.mark.parametrize(
    ("classes", "best", "label"),
    [
        (["positive", "negative"], 0, "positive"),
        (["POSITIVE", "NEGATIVE"], 0, "positive"),
        (["neutral", "positive", "negative"], 1, "positive"),
        (["3", "1", "2"], 0, "3"),
        (["LABEL_0", "LABEL_1", "LABEL_2"], 2, "2"),
    ],
    ids=["order", "case", "subset", "numbers", "numbered"],
)
def test_a_classifier_that_knows_the_labels_is_right_before_any_training(tmp_path, classes, best, label):
    other = next(name for name in ("negative", "1") if name != label and (label == "positive") != name.isdecimal())
    data = table(tmp_path, [label] * 6 + [other], evaluation_examples=1)
    found, metrics, names = scored(CLASSIFICATION, data, checkpoint(tmp_path, classes, best=best))
    assert metrics["accuracy"] == pytest.approx(6 / 7)
    assert labels_of(found.spec)[best] == label and len(labels_of(found.spec)) == len(classes)
    # The control units learn the same numbers.
    assert sorted(names) == sorted([label] * 6 + [other])
    run = save(tmp_path / "run", CLASSIFICATION, found, found.build(seed=1), data)
    again = prepare(CLASSIFICATION, data, options(from_=run))
    assert labels_of(again.spec) == labels_of(found.spec)
    head = dict(again.build(seed=2).head.named_parameters())["classifier.bias"]
    assert head.argmax() == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tags",
    [["B-PER", "B-PER", "B-PER", "B-LOC", "I-LOC", "B-ORG", "B-MISC", "O"], ["B-PER", "B-PER", "B-LOC", "O"]],
    ids=["all", "subset"],
)
def test_a_tagger_keeps_the_order_of_its_tags(tmp_path, dtype, tags):
    model = checkpoint(tmp_path, CONLL, KIND[TAGGING], best=CONLL.index("B-PER"), dtype=dtype)
    found, metrics, names = scored(TAGGING, tagged(tmp_path, tags), model)
    assert metrics["accuracy"] == pytest.approx(tags.count("B-PER") / len(tags))
    assert labels_of(found.spec) == tuple(CONLL) and names == tags


@pytest.mark.parametrize(
    ("classes", "kind", "labels", "message"),
    [
        (
            ["pos", "neg"],
            KIND[CLASSIFICATION],
            ["good", "bad"],
            "2 classes apart, pos, neg; .*bad, good not among them",
        ),
        (["pos", "neg"], KIND[CLASSIFICATION], ["pos", "neg", "so"], "2 classes apart, pos, neg; .*so not among them"),
        (["a", "b"], KIND[CLASSIFICATION], ["A", "a", "b"], "A not among them"),
        (["LABEL_0", "LABEL_1"], KIND[CLASSIFICATION], ["good", "bad"], "list them in data.labels in the order"),
        (["LABEL_0", "LABEL_1"], KIND[CLASSIFICATION], ["1", "2"], "2 not among them"),
        (["LABEL_0"], KIND[CLASSIFICATION], ["good", "bad"], r"one that gives a number \(regression\)"),
        (["pos", "neg"], KIND[TAGGING], ["pos", "neg"], "the classifier of a BertForTokenClassification does not tell"),
    ],
    ids=["names", "more", "case", "placeholders", "from-one", "regression", "tagger"],
)
def test_labels_without_a_class_are_refused_or_get_a_new_head(tmp_path, classes, kind, labels, message):
    model = checkpoint(tmp_path, classes, kind)
    data = table(tmp_path, labels * 3)
    for use in (task(TaskConfig(name=CLASSIFICATION)).check, task(TaskConfig(name=CLASSIFICATION)).prepare):
        with pytest.raises(ValueError, match=f"^model.pretrained: .*{message}.*model.new-head = true") as refused:
            use(data, model, 0, 1)
        assert "\n" not in str(refused.value)
    found = prepare(CLASSIFICATION, data, options(**{**vars(model), "new_head": True}))
    assert labels_of(found.spec) == tuple(sorted(labels))
    weights = found.build(seed=1).head.state_dict()
    assert weights["classifier.bias"].abs().max() < 1 and len(weights["classifier.bias"]) == len(labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_head_replaces_one_with_the_same_classes(tmp_path, dtype):
    model = checkpoint(tmp_path, ["positive", "negative"], dtype=dtype)
    data = table(tmp_path, ["positive", "negative"] * 2)
    kept, fresh = (prepare(CLASSIFICATION, data, options(**{**vars(model), "new_head": new})) for new in (False, True))
    assert labels_of(kept.spec) == ("positive", "negative") and labels_of(fresh.spec) == ("negative", "positive")
    kept, fresh = kept.build(seed=1).weights(), fresh.build(seed=1).weights()
    changed = [name for name, value in kept.items() if not torch.equal(value, fresh[name])]
    assert changed == ["head.classifier.weight", "head.classifier.bias"]


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_a_model_without_a_trained_head_has_its_labels_sorted(tmp_path, kind):
    model = checkpoint(tmp_path, ["z", "y"], kind)
    found = prepare(CLASSIFICATION, table(tmp_path, ["good", "bad"] * 2), model)
    assert labels_of(found.spec) == ("bad", "good")


def test_label2id_alone_names_the_classes(tmp_path):
    changes = {"id2label": None, "label2id": {"positive": 0, "neutral": 1, "negative": 2}}
    model = checkpoint(tmp_path, ["a", "b", "c"], config_changes=changes)
    found, metrics, _ = scored(CLASSIFICATION, table(tmp_path, ["positive"] * 5 + ["negative"]), model)
    assert labels_of(found.spec) == ("positive", "neutral", "negative")
    assert metrics["accuracy"] == pytest.approx(5 / 6)


def test_names_that_are_not_as_many_as_the_classes_are_refused(tmp_path):
    model = checkpoint(tmp_path, ["a", "b", "c"], config_changes={"id2label": {"0": "a", "1": "b"}, "label2id": None})
    with pytest.raises(ValueError, match=r"config\.json names 2 classes, its classifier has 3; correct id2label"):
        prepare(CLASSIFICATION, table(tmp_path, ["a", "b"] * 2), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"problem_type": "multi_label_classification"},
            "single classes, found one that gives several labels of a text",
        ),
        ({"problem_type": "regression"}, "single classes, found one that gives a number"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label: expected a name of its own for each of the classes from 0"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label: expected a name of its own for each of the classes from 0"),
        ({"id2label": {"0": "a", "1": None}}, "id2label: expected a name of its own for each of the classes from 0"),
        ({"id2label": None, "label2id": {"a": "x"}}, "label2id: expected a name of its own for each of the classes"),
    ],
    ids=["several", "number", "equal", "gap", "null", "text"],
)
def test_a_head_of_another_kind_or_without_names_of_their_own_is_refused(tmp_path, changes, message):
    model = checkpoint(tmp_path, ["a", "b"], config_changes=changes)
    data = table(tmp_path, ["a", "b"] * 2)
    with pytest.raises(ValueError, match=f"^model.pretrained: .*{message}.*model.new-head = true") as refused:
        prepare(CLASSIFICATION, data, model)
    assert "\n" not in str(refused.value)
    assert labels_of(prepare(CLASSIFICATION, data, options(**{**vars(model), "new_head": True})).spec) == ("a", "b")


@pytest.mark.parametrize("marks", ["BIES", "BILU"])
def test_a_head_that_marks_the_ends_of_spans_is_refused(tmp_path, marks):
    classes = ["O", *(f"{mark}-{kind}" for kind in ("PER", "LOC") for mark in marks)]
    model, data = checkpoint(tmp_path, classes, KIND[TAGGING]), tagged(tmp_path, ["B-PER", "I-PER", "O", "B-LOC"])
    with pytest.raises(ValueError, match=f"^model.pretrained: .*{marks[2]}-PER, .*BIOES.*model.new-head = true"):
        prepare(TAGGING, data, model)
    found = prepare(TAGGING, data, options(**{**vars(model), "new_head": True}))
    # A run whose head an earlier release took as it was.
    found.spec.config["id2label"] = dict(zip(map(str, range(9)), classes, strict=True))
    found.spec.config["num_labels"] = 9
    run = save(tmp_path / "run", TAGGING, found, replace(found, weights={}).build(seed=1), data)
    with pytest.raises(ValueError, match=f"^model.from: .*{marks[2]}-PER, .*BIOES.*model.new-head = true"):
        prepare(TAGGING, data, options(from_=run))


def test_a_mark_that_the_data_never_has_needs_no_class(tmp_path):
    classes = ["O", "I-PER", "I-LOC", "B-LOC"]
    model = checkpoint(tmp_path, classes, KIND[TAGGING], best=1)
    data = tagged(tmp_path, ["I-PER", "I-PER", "O", "I-LOC"])
    found, metrics, names = scored(TAGGING, data, model)
    assert labels_of(found.spec) == tuple(classes) and names == ["I-PER", "I-PER", "O", "I-LOC"]
    assert metrics["accuracy"] == pytest.approx(2 / 4)
    run = save(tmp_path / "run", TAGGING, found, found.build(seed=1), data)
    assert labels_of(prepare(TAGGING, data, options(from_=run)).spec) == tuple(classes)
    with pytest.raises(ValueError, match="^model.pretrained: .*the data has 5 labels, B-PER not among them"):
        prepare(TAGGING, tagged(tmp_path, ["B-PER", "O", "I-LOC"]), model)


@pytest.mark.parametrize("labels", [["POSITIVE", "NEGATIVE"], ["posi\u00adtive", "negative"]], ids=["case", "unseen"])
def test_the_head_of_a_run_knows_its_labels_in_another_spelling(tmp_path, labels):
    found = prepare(CLASSIFICATION, table(tmp_path, ["positive", "negative"] * 2), options())
    run = save(tmp_path / "run", CLASSIFICATION, found, found.build(seed=1), table(tmp_path, ["positive", "negative"]))
    again = prepare(CLASSIFICATION, table(tmp_path, labels * 2), options(from_=run))
    assert labels_of(again.spec) == tuple(reversed(labels))
    assert {"head.classifier.weight", "head.classifier.bias"} <= again.weights.keys()
    other = prepare(CLASSIFICATION, table(tmp_path, ["positive", "bad"] * 2), options(from_=run))
    assert not any(name.startswith("head.classifier") for name in other.weights)


def test_placeholders_take_the_order_of_data_labels(tmp_path):
    model = checkpoint(tmp_path, ["LABEL_0", "LABEL_1"], best=0)
    data = table(tmp_path, ["good"] * 5 + ["bad"], labels="good,bad")
    found, metrics, _ = scored(CLASSIFICATION, data, model)
    assert labels_of(found.spec) == ("good", "bad") and metrics["accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("name", [CLASSIFICATION, TAGGING, "masked-lm"])
def test_the_tokenizers_own_rule_puts_the_marks_of_the_training(tmp_path, name):
    model = checkpoint(tmp_path, CONLL, KIND.get(name, "BertForMaskedLM"))
    rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": rule}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    data = tagged(tmp_path, ["B-PER", "O"]) if name == TAGGING else table(tmp_path, ["O", "B-PER"])
    tokenizer = TextTokenizer.from_json(prepare(name, data, model).tokenizer_json)
    assert tokenizer.marks == ([tokenizer.bos_id], [tokenizer.eos_id])
