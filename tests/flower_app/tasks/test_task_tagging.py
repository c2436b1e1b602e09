import json

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.partition.parts import IGNORED_LABEL, target_weight, targets
from flower_app.config.sources import load_config
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.labelled_task import labels_of
from flower_app.tasks.tagging import span_scores
from flower_app.tasks.tokenizer import TextTokenizer
from helpers.task_cases import options, prepare, train

NAME = "token-classification"
CONLL = "Anna\tB-PER\nlives\tO\nin\tO\nNew\tB-LOC\nYork\tI-LOC\n\nShe\tO\nsings\tO\n"


def files(folder, name="train.conll", **changes):
    base = {"vocab_size": 300, "max_length": 40, "train_source": name, "test_source": name}
    return DataConfig(source="files", path=str(folder), **{**base, **changes})


def read(config):
    return task(TaskConfig(name=NAME)).read(config, "train", None)


def share_of(config, found):
    return task(TaskConfig(name=NAME)).cluster_data(config, found.tokenizer_json, 0, 1, 0)


def test_the_first_piece_of_a_word_carries_its_tag(tmp_path):
    (tmp_path / "train.conll").write_text("Annabella\tB-PER\nof\tO\nVienna\tB-LOC\n")
    config = files(tmp_path)
    found = prepare(NAME, config)
    tokenizer, labels = TextTokenizer.from_json(found.tokenizer_json), labels_of(found.spec)
    batch = share_of(config, found).collate([0])
    ((ids, owners),) = tokenizer.encode_words([["Annabella", "of", "Vienna"]])
    assert batch["input_ids"][0].tolist() == [tokenizer.bos_id, *ids, tokenizer.eos_id]
    firsts = [i for i, owner in enumerate(owners) if i == 0 or owners[i - 1] != owner]
    expected = [IGNORED_LABEL] * (len(ids) + 2)
    for first, tag in zip(firsts, ("B-PER", "O", "B-LOC"), strict=True):
        expected[first + 1] = labels.index(tag)
    assert batch["labels"][0].tolist() == expected
    assert target_weight(targets(batch)) == 3


def test_files_and_tables_give_the_same_sentences(tmp_path):
    (tmp_path / "a.conll").write_text(CONLL)
    # Word and tag among other columns, cut at blanks; document marks and blank lines in a row.
    lines = [
        f"{word} NN {tag}" if word else "" for word, _, tag in (line.partition("\t") for line in CONLL.split("\n"))
    ]
    (tmp_path / "b.txt").write_text("-DOCSTART- -X- O\n\n" + "\n\n".join("\n".join(lines).split("\n\n")) + "\n\n\n")
    sentences = [[line.split("\t") for line in part.split("\n") if line] for part in CONLL.split("\n\n")]
    rows = [{"tokens": [w for w, _ in s], "tags": [t for _, t in s]} for s in sentences]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "d.tsv").write_text(
        "tokens\ttags\n" + "".join(f"{' '.join(row['tokens'])}\t{' '.join(row['tags'])}\n" for row in rows)
    )
    for name in ("a.conll", "b.txt", "c.jsonl", "d.tsv"):
        found = read(files(tmp_path, name))
        assert [found.inputs, found.labels] == [[row["tokens"] for row in rows], [row["tags"] for row in rows]], name


def test_a_hub_dataset_gives_its_tags_by_number(tmp_path):
    datasets = pytest.importorskip("datasets")
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags})
    rows = {"tokens": [["Anna", "Bell", "sings"], ["So"]], "ner_tags": [[1, 2, 0], [0]]}
    split = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(source="hub", hub_id=str(tmp_path / "saved"), label_column="ner_tags", vocab_size=300)
    assert read(config).labels == [["B-PER", "I-PER", "O"], ["O"]]
    assert labels_of(prepare(NAME, config, options(max_length=128)).spec) == ("O", "B-PER", "I-PER")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.conll",
            "Anna\tB-PER\nsings\n",
            r"data\.train-source: .*a\.conll, line 2: expected a word and its tag in col",
        ),
        ("a.conll", "Anna\tB-PER\n\tO\n", r"a\.conll, line 2: expected a word before the tag"),
        ("a.conll", "Anna\tPER\n", r"a\.conll, line 1: expected a tag O, B-TYPE or I-TYPE, found 'PER'"),
        ("a.conll", "-DOCSTART- O\n\n", r"a\.conll has no sentence"),
        ("a.jsonl", '{"tokens": ["a", " "], "tags": ["O", "O"]}', r"line 1: expected words, found ' ' among them"),
        ("a.jsonl", '{"tokens": [], "tags": []}', r"data\.source-column: .*a\.jsonl, line 1: the sentence is empty"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["O", "O"]}', r"a\.jsonl, line 1: 1 tokens have 2 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": ["X"]}', r"a\.jsonl, line 1: expected a tag O, B-TYPE or I-TYPE, found"),
        ("a.conll", "Anna\tO\n", r"data\.labels: expected a type of spans, found none: every tag of the training"),
    ],
)
def test_damaged_data_is_refused_with_file_and_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        task(TaskConfig(name=NAME)).check(files(tmp_path, name), options(), 0, 1)


def test_a_tag_outside_the_list_is_refused_with_its_line(tmp_path):
    (tmp_path / "train.conll").write_text(CONLL)
    message = (
        r"data\.labels: .*train\.conll, line 4: the train data has the label 'B-LOC', expected one of O, B-PER, I-PER"
    )
    with pytest.raises(ValueError, match=message):
        prepare(NAME, files(tmp_path, labels="PER"))
    with pytest.raises(ValueError, match=r"data\.labels: expected types of spans such as PER, found 'B-PER'"):
        prepare(NAME, files(tmp_path, labels="B-PER"))


def test_long_sentences_are_cut_and_counted_and_their_lost_words_count_as_outside(tmp_path):
    (tmp_path / "train.conll").write_text("".join(f"{c}\tB-PER\n" for c in "abcdef") + "\na\tO\n")
    config = files(tmp_path, max_length=6)
    found = prepare(NAME, config)
    assert share_of(config, found).truncated == 1
    score = found.evaluator.evaluate(build_parts(found.spec, 0), "test")
    assert score.truncated == 1
    assert score.predictions[0].split()[4:] == ["O", "O"]


def test_span_scores_count_whole_spans():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    predictions = [["B-PER", "O", "O", "B-LOC"], ["B-LOC"]]
    metrics, signature = span_scores(references, predictions)
    # One of three found spans, of two that are there.
    assert metrics["precision"] == pytest.approx(1 / 3)
    assert metrics["recall"] == pytest.approx(1 / 2)
    assert metrics["f1"] == pytest.approx(2 / 5)
    assert metrics["accuracy"] == pytest.approx(3 / 5)
    assert "seqeval" in signature
    assert span_scores([["O"]], [["O"]])[0]["f1"] == 0


@pytest.mark.slow
def test_generated_spans_are_learned_in_a_few_steps():
    data = DataConfig(num_examples=800, evaluation_examples=100, vocab_size=480, max_length=40)
    found = prepare(NAME, data, options(dropout=0.0))
    parts = train(NAME, found, data, steps=200)
    score = found.evaluator.evaluate(parts, "test")
    assert score.metrics["f1"] > 0.8
    # The same model, as predict uses it.
    chosen = task(TaskConfig(name=NAME))
    (line,) = chosen.predict(parts, found.tokenizer_json, [score.sources[0]])
    assert [pair.rpartition("/")[2] for pair in line.split()] == score.predictions[0].split()
    assert [pair.rpartition("/")[0] for pair in line.split()] == score.sources[0].split()


@pytest.mark.slow
def test_real_text_is_read_as_the_configuration_says(real_data):
    config = load_config("chinese-ner", [f"data.path={real_data('chinese_ner')}"])
    chosen = task(config.task)
    chosen.check(config.data, config.model, 0, 2)
    found = chosen.read(config.data, "train", None)
    assert len(found) == 4172
    assert sum(tag.startswith("B-LOC") for tags in found.labels for tag in tags) > 3000


@pytest.mark.parametrize("marks", ["BIES", "BILU", "BMES", "BMEW", "BIIB"])
@pytest.mark.parametrize("name", ["a.conll", "a.jsonl"])
def test_tags_that_mark_the_ends_of_spans_are_read_as_bio(tmp_path, marks, name):
    begin, inner, last, single = marks
    words = ["Ada", "King", "Lovelace", "sees", "Bonn"]
    tags = [f"{begin}-PER", f"{inner}-PER", f"{last}-PER", "O", f"{single}-LOC"]
    text = "".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True))
    (tmp_path / name).write_text(json.dumps({"tokens": words, "tags": tags}) if name.endswith("jsonl") else text)
    assert read(files(tmp_path, name)).labels == [["B-PER", "I-PER", "I-PER", "O", "B-LOC"]]


@pytest.mark.parametrize("tag", ["NOUN", "PER", "B_PER", "B-", "X-PER"])
def test_a_tag_of_another_kind_is_refused_with_what_to_write(tmp_path, tag):
    (tmp_path / "a.conll").write_text(f"Ada\t{tag}\n")
    with pytest.raises(ValueError, match=rf"line 1: expected a tag O, .* found '{tag}'; write B-{tag} for a word that"):
        read(files(tmp_path, "a.conll"))


@pytest.mark.parametrize(
    ("labels", "kind"), [("", "\u00e9t\u00e9"), ("e\u0301te\u0301", "e\u0301te\u0301")], ids=["occurring", "listed"]
)
@pytest.mark.parametrize("name", ["train.conll", "train.jsonl"])
def test_a_type_has_one_spelling(tmp_path, name, labels, kind):
    tags = ["B-\u00e9t\u00e9", "I-e\u0301te\u0301", "O", "B-e\u0301\u00adte\u0301"]
    (tmp_path / "train.conll").write_text("".join(f"word\t{tag}\n" for tag in tags))
    (tmp_path / "train.jsonl").write_text(json.dumps({"tokens": ["word"] * 4, "tags": tags}))
    assert read(files(tmp_path, name, labels=labels)).labels == [[f"B-{kind}", f"I-{kind}", "O", f"B-{kind}"]]
