import json
from dataclasses import replace

import numpy as np
import pytest

from flower_app.tasks.base import TaskConfig
from flower_app.tasks.causal_lm import CausalLMTask
from flower_app.tasks.data.corpus import DATA_SPLITS, DataConfig, Pairs, count_files, load_pairs
from flower_app.tasks.data.data_split import split_data, weighted_split
from flower_app.tasks.plain_text import load_text
from helpers.task_cases import options

ENGLISH = ["a dog", "a cat", "two birds"]
GERMAN = ["ein Hund", "eine Katze", "zwei Vögel"]


def write(folder, **files):
    for name, lines in files.items():
        (folder / name.replace("_", ".")).write_text("\n".join(lines) + "\n", encoding="utf-8")


def files(folder, **changes):
    names = {"train_source": "train.en", "train_target": "train.de", "test_source": "test.en", "test_target": "test.de"}
    return DataConfig(source="files", path=str(folder), **{**names, **changes})


def table(folder, name, **changes):
    return files(folder, train_source=name, train_target="", test_source=name, test_target="", **changes)


def test_parallel_files_are_read_line_by_line(tmp_path):
    write(tmp_path, train_en=ENGLISH, train_de=GERMAN, test_en=ENGLISH[:1], test_de=GERMAN[:1])
    pairs = load_pairs(files(tmp_path), "train", seed=0)
    assert (pairs.sources, pairs.targets) == (ENGLISH, GERMAN)
    # Without validation files the test files stand in.
    assert load_pairs(files(tmp_path), "validation", seed=0).sources == ENGLISH[:1]


def test_separators_of_unicode_inside_a_sentence_do_not_shift_the_lines(tmp_path):
    # str.splitlines would cut at these, and every later pair would be wrong.
    odd = ["a\u2028dog", "a\x0ccat", "two\x85birds"]
    write(tmp_path, train_en=odd, train_de=GERMAN, test_en=ENGLISH, test_de=GERMAN)
    assert load_pairs(files(tmp_path), "train", seed=0).sources == odd


def test_a_missing_file_is_named_with_its_key(tmp_path):
    write(tmp_path, train_en=ENGLISH)
    with pytest.raises(ValueError, match=r"data\.train-target: no file .*train\.de; check data\.path"):
        load_pairs(files(tmp_path), "train", seed=0)


def test_parallel_files_of_unequal_length_are_refused_with_both_counts(tmp_path):
    write(tmp_path, train_en=ENGLISH, train_de=GERMAN[:2])
    with pytest.raises(ValueError, match=r"data\.train-source: .*train\.en has 3 lines, .*train\.de has 2"):
        load_pairs(files(tmp_path), "train", seed=0)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    write(tmp_path, train_de=GERMAN)
    (tmp_path / "train.en").write_bytes("Vögel".encode("latin-1"))
    with pytest.raises(ValueError, match=r"data\.train-source: .*train\.en is not UTF-8"):
        load_pairs(files(tmp_path), "train", seed=0)


def test_tables_of_all_kinds_give_the_same_pairs(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"de": d, "en": e, "pair": {"de": d, "en": e}} for e, d in zip(ENGLISH, GERMAN, strict=True)]
    (tmp_path / "a.tsv").write_text("de\ten\n" + "".join(f"{r['de']}\t{r['en']}\n" for r in rows), encoding="utf-8")
    (tmp_path / "b.tsv").write_text("".join(f"x\t{r['en']}\t{r['de']}\n" for r in rows), encoding="utf-8")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for name, source, target in (
        ("a.tsv", "en", "de"),
        ("b.tsv", "1", "2"),
        ("c.jsonl", "en", "de"),
        ("c.jsonl", "pair.en", "pair.de"),
        ("d.parquet", "en", "de"),
        ("d.parquet", "pair.en", "pair.de"),
    ):
        config = table(tmp_path, name, source_column=source, target_column=target)
        pairs = load_pairs(config, "train", seed=0)
        assert (pairs.sources, pairs.targets) == (ENGLISH, GERMAN), name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "en\tde\na\tb\n", r"data\.source-column: .*a\.tsv, line 2: no column 'source', found en, de"),
        ("a.tsv", "source\ttarget\n", r"a\.tsv has a header and no row"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source"\n', r"a\.jsonl, line 2: expected a JSON object"),
        ("a.jsonl", '["a", "b"]\n', r"a\.jsonl, line 1: expected a JSON object"),
        ("a.jsonl", '{"source": "a"}\n', r"data\.target-column: .*line 1: no column 'target', found source"),
        ("a.parquet", "no parquet", r"data\.train-source: .*a\.parquet is no parquet file"),
        ("a.tsv", "source\ttarget\na\tb\n\tb\n", r"data\.source-column: .*a\.tsv, line 3: the sentence is empty"),
        ("a.jsonl", '{"source": "a", "target": null}\n', r"data\.target-column: .*a\.jsonl, line 1: the sentence is"),
        (
            "a.jsonl",
            '{"source": ["a"], "target": "b"}\n',
            r"data\.source-column: .*line 1: expected a text, found \['a'",
        ),
    ],
)
def test_a_damaged_table_and_a_row_without_a_sentence_are_refused_with_their_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_pairs(table(tmp_path, name), "train", seed=0)


def test_a_label_outside_the_list_is_refused(tmp_path):
    rows = [{"source": "a", "target": "b", "domain": d} for d in ("news", "talks")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = table(tmp_path, "a.jsonl", label_column="domain", labels="news, talks")
    assert load_pairs(config, "train", seed=0).labels == ["news", "talks"]
    config = table(tmp_path, "a.jsonl", label_column="domain", labels="news, law")
    message = r"data\.labels: .*a\.jsonl, line 2: found the label 'talks' in column 'domain', expected one of news, law"
    with pytest.raises(ValueError, match=message):
        load_pairs(config, "train", seed=0)
    # Plain text is shared out by its labels just so.
    with pytest.raises(ValueError, match=message):
        load_text(replace(config, source_column="source"), "train", seed=0)


def test_an_empty_line_of_parallel_text_is_refused_with_its_number(tmp_path):
    write(tmp_path, train_en=["a", "", "c"], train_de=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"data\.train-source: .*train\.en, line 2: the sentence is empty; remove"):
        load_pairs(files(tmp_path), "train", seed=0)
    write(tmp_path, train_en=["a", "b", "c"], train_de=["a", "b", " "])
    with pytest.raises(ValueError, match=r"data\.train-target: .*train\.de, line 3: the sentence is empty; remove"):
        load_pairs(files(tmp_path), "train", seed=0)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "a\n\n \nb\n"), ("a.jsonl", '{"text": "a"}\n{"text": " "}\n{"text": null}\n{"text": "b"}')],
)
def test_empty_texts_are_left_out_and_the_run_says_how_many(tmp_path, caplog, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    config = table(tmp_path, name)
    found = load_text(config, "train", seed=0)
    assert (list(found.texts), found.skipped) == (["a", "b"], 2)
    with caplog.at_level("WARNING", "flwr.collapipe.text"):
        CausalLMTask(TaskConfig(name="causal-lm")).prepare(config, options(family="gpt2"), seed=0, num_clusters=1)
    said = "2 empty texts of the {} data were left out, 2 remain".format
    assert caplog.messages == [said(split) for split in ("train", "validation", "test")]


def test_a_local_dataset_folder_is_read_through_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"translation": {"en": e, "de": d}} for e, d in zip(ENGLISH, GERMAN, strict=True)]
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": split, "dev": split.select([1])}).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(
        source="hub",
        hub_id=str(tmp_path / "saved"),
        source_column="translation.en",
        target_column="translation.de",
        validation_split="dev",
    )
    assert load_pairs(config, "train", seed=0) == Pairs(ENGLISH, GERMAN)
    assert load_pairs(config, "test", seed=0) == Pairs(ENGLISH[1:2], GERMAN[1:2])


def test_a_folder_of_data_files_is_read_through_datasets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path / "files"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [{"source": e, "target": d} for e, d in zip(ENGLISH, GERMAN, strict=True)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load_pairs(DataConfig(source="hub", hub_id=str(folder)), "train", seed=0) == Pairs(ENGLISH, GERMAN)


def test_a_missing_column_or_split_of_a_dataset_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list([{"en": "a", "de": "b"}])
    datasets.DatasetDict({"train": split}).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(source="hub", hub_id=str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"data\.source-column: .*saved, split train has no column 'source', found en"):
        load_pairs(config, "train", seed=0)
    with pytest.raises(ValueError, match=r"data\.test-split: .*saved has no split 'validation', found train"):
        load_pairs(config, "test", seed=0)


def test_a_dataset_that_cannot_be_had_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.hub-id: expected a dataset id or a dataset folder, found '.*empty'"):
        load_pairs(DataConfig(source="hub", hub_id=str(tmp_path / "empty")), "train", seed=0)
    with pytest.raises(FileNotFoundError, match=r"data\.hub-id: .*'.*missing' looks like a path, and "):
        load_pairs(DataConfig(source="hub", hub_id=str(tmp_path / "missing")), "train", seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"partition": "files"}, "data.partition = files needs data.source = files, found 'generated'"),
        ({"dirichlet_alpha": 0.0}, "data.dirichlet-alpha: expected a number above 0, found 0.0"),
        ({"max_length": 1}, "data.max-length: expected at least 2, found 1"),
        ({"vocab_size": 10}, "data.vocab-size: expected at least 300, found 10"),
        ({"label_column": "domain"}, "data.label-column: generated text has no columns"),
        (
            {"source": "files", "partition": "files", "train_source": "a.tsv", "test_source": "b.tsv"},
            "data.train-source: expected a name with {cluster} in it with data.partition = files, found 'a.tsv'",
        ),
    ],
)
def test_a_configuration_that_cannot_be_loaded_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        DataConfig(**values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "kind", ["iid", "size", "linear", "square", "exponential", "dirichlet", "pathological", "natural-id"]
)
@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_every_example_falls_on_exactly_one_cluster(kind, num_clusters):
    pairs = Pairs([" ".join("w" * (1 + i % 9)) for i in range(203)], ["x"] * 203)
    sizes = ",".join(["2", "1", "1", "3", "1"][:num_clusters])
    config = DataConfig(partition=kind, dirichlet_alpha=1.0, partition_sizes=sizes, classes_per_cluster=5)
    parts = split_data(config, pairs, num_clusters, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(203))
    again = split_data(config, pairs, num_clusters, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    # Whose classes stay together is no matter of chance.
    if num_clusters > 1 and kind != "natural-id":
        other = split_data(config, pairs, num_clusters, seed=4)
        assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_a_small_alpha_parts_the_labels_and_a_large_one_spreads_them():
    labels = [str(i % 4) for i in range(2000)]
    pairs = Pairs(["x"] * 2000, ["y"] * 2000, labels)

    def largest_shares(alpha):
        parts = split_data(DataConfig(partition="dirichlet", dirichlet_alpha=alpha), pairs, 4, seed=0)
        counts = np.array([[sum(labels[i] == str(k) for i in part) for k in range(4)] for part in parts])
        return (counts / counts.sum(axis=0)).max(axis=0)

    assert largest_shares(0.2).mean() > 0.6
    assert largest_shares(1000.0).max() < 0.3


def test_without_a_label_column_dirichlet_parts_short_from_long_sentences():
    pairs = Pairs([" ".join("w" * (1 + i % 20)) for i in range(1000)], ["x"] * 1000)
    parts = split_data(DataConfig(partition="dirichlet", dirichlet_alpha=0.1), pairs, 2, seed=0)
    means = [np.mean([len(pairs.sources[i].split()) for i in part]) for part in parts]
    assert abs(means[0] - means[1]) > 2


def test_a_cluster_without_an_example_is_an_error():
    pairs = Pairs(["x"] * 3, ["y"] * 3)
    with pytest.raises(ValueError, match=r"data\.partition = iid: cluster 3 of 4 gets none of 3 examples"):
        split_data(DataConfig(), pairs, 4, seed=0)
    with pytest.raises(ValueError, match=r"gets none of 3 examples; raise data\.dirichlet-alpha"):
        split_data(DataConfig(partition="dirichlet", dirichlet_alpha=0.001), pairs, 3, seed=0)


def test_one_training_file_per_cluster(tmp_path):
    for cluster in range(2):
        write(tmp_path, **{f"part{cluster}_en": ENGLISH[cluster:], f"part{cluster}_de": GERMAN[cluster:]})
    config = files(tmp_path, train_source="part{cluster}.en", train_target="part{cluster}.de", partition="files")
    assert count_files(config) == 2
    assert load_pairs(config, "train", 0, cluster=1).sources == ENGLISH[1:]


def sizes_of(kind, num_clusters, number=1000, **config):
    pairs = Pairs(["x"] * number, ["y"] * number)
    return [len(part) for part in split_data(DataConfig(partition=kind, **config), pairs, num_clusters, seed=0)]


def test_the_sizes_of_shares_follow_their_formulas():
    assert sizes_of("iid", 3) == [334, 333, 333]
    assert sizes_of("size", 3, partition_sizes="3, 1, 1") == [600, 200, 200]
    assert sizes_of("linear", 4) == [100, 200, 300, 400]
    assert sizes_of("square", 4, number=3000) == [100, 400, 900, 1600]
    assert sizes_of("exponential", 3) == [90, 245, 665]


def test_data_shares_weigh_the_even_split():
    assert weighted_split(DataConfig(), (1.0, 1.0, 1.0)) == DataConfig()
    assert weighted_split(DataConfig(partition="dirichlet"), (2.0, 2.0)).partition == "dirichlet"
    weighted = weighted_split(DataConfig(), (3.0, 1.0, 1.0))
    pairs = Pairs(["x"] * 1000, ["y"] * 1000)
    assert [len(part) for part in split_data(weighted, pairs, 3, seed=0)] == [600, 200, 200]


@pytest.mark.parametrize("kind", sorted(set(DATA_SPLITS) - {"iid"}))
def test_data_shares_that_no_partition_keeps_are_refused(kind):
    source, text = ("files", "text-{cluster}") if kind in ("files", "nodes") else ("generated", "")
    config = DataConfig(partition=kind, partition_sizes="1,2", source=source, train_source=text, test_source="test")
    with pytest.raises(
        ValueError, match=rf"data.partition = {kind}: .* data-share 2, 1, which weighs data.partition ="
    ):
        weighted_split(config, (2.0, 1.0))


def labelled(kind, num_clusters, labels, **config):
    """Labels of each cluster's examples."""
    pairs = Pairs(["x"] * len(labels), ["y"] * len(labels), labels)
    parts = split_data(DataConfig(partition=kind, **config), pairs, num_clusters, seed=0)
    return [[labels[i] for i in part] for part in parts]


def test_pathological_clusters_have_few_classes_and_share_them_evenly():
    shares = labelled("pathological", 4, [str(i % 6) for i in range(1200)], classes_per_cluster=3)
    assert [len(set(share)) for share in shares] == [3] * 4
    # 12 places for 6 classes of 200 examples: two clusters have each.
    assert all(share.count(label) == 100 for share in shares for label in set(share))
    with pytest.raises(ValueError, match=r"data\.classes-per-cluster: expected between 2 and 6, so that 4 clusters"):
        labelled("pathological", 4, [str(i % 6) for i in range(1200)], classes_per_cluster=1)


def test_with_natural_ids_examples_of_one_origin_stay_together():
    shares = labelled("natural-id", 2, ["news", "talks", "law", "news", "talks", "talks"])
    # Sorted by name: law and talks are the first and third, news the second.
    assert shares == [["talks", "law", "talks", "talks"], ["news", "news"]]
    with pytest.raises(ValueError, match="natural-id: cluster 3 of 4 gets none of 6 examples"):
        labelled("natural-id", 4, ["news", "talks", "law", "news", "talks", "talks"])
