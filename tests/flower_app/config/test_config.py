"""The configuration: keys, types, ranges, precedence and paths."""

import json
import re
import tomllib

import pytest

from flower_app.config.other_names import OTHER_NAMES
from flower_app.config.run_config import RunConfig, key_types, nested
from flower_app.config.sources import find_config, load_config, parse_set, read_config
from helpers.repository import ROOT


def test_pyproject_declares_every_key_with_the_default_value():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    # Flower takes only keys that are declared.
    others = {"num-server-rounds": 0, "learning-rate": 0.0}
    flat = RunConfig().to_flat()
    assert declared == nested(flat | others) and others.keys() == OTHER_NAMES.keys()
    # A whole number that stands for one with a fraction is equal all the same.
    assert json.dumps(declared, sort_keys=True) == json.dumps(nested(flat | others), sort_keys=True)
    assert {key: type(value) for key, value in flat.items()} == dict(key_types())


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num-round", "num-rounds"),
        ("num_rounds", "num-rounds"),
        ("model.with", "model.width"),
        ("data.trian-source", "data.train-source"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, nearest):
    with pytest.raises(ValueError) as error:
        RunConfig.from_flat({key: 1})
    assert str(error.value) == f"unknown configuration key {key!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lr", "fast", "optimizer.lr: expected a number, found a text: 'fast'"),
        ("num-rounds", 2.0, "num-rounds: expected a whole number, found a number: 2.0"),
        ("num-rounds", True, "num-rounds: expected a whole number, found true or false: True"),
        ("name", 3, "name: expected a text, found a whole number: 3"),
        ("data.path", ["a"], "data.path: expected a text, found a list: ['a']"),
        ("seed", 2**63, "seed: expected a whole number from -2^63 to 2^63 - 1, found 9223372036854775808"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, message):
    with pytest.raises(ValueError) as error:
        RunConfig.from_flat({key: value})
    assert str(error.value) == message


# Further ones are in ``mistakes.toml``, with the command line's whole answer.
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num-clusters", -1, "num-clusters: expected at least 0, found -1"),
        ("strategy-options", "{eta}", "strategy-options: expected a JSON object"),
        ("name", "", "name: expected a text, found an empty one"),
        ("model.key-value-heads", 3, "model.key-value-heads: expected a divisor of model.num-heads = 4, or 0, found 3"),
        (
            "model.key-value-heads",
            -2,
            "model.key-value-heads: expected a divisor of model.num-heads = 4, or 0, found -2",
        ),
        (
            "model.key-value-heads",
            2,
            "model.key-value-heads: expected a model.family whose heads share keys and values",
        ),
        ("model.base-dtype", "int8", "model.base-dtype: int8 is of what is never trained: expected model.trainable"),
        ("runtime.timeout", 0.0, "runtime.timeout: expected a number of seconds above 0"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key, value, message):
    with pytest.raises(ValueError) as error:
        RunConfig.from_flat({key: value})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("optimizer.lr=2e-3", ("optimizer.lr", 0.002)),
        ("num-rounds=3", ("num-rounds", 3)),
        ("planner.c11=true", ("planner.c11", True)),
        ("strategy=FedAvg", ("strategy", "FedAvg")),
        ('strategy="FedAvg"', ("strategy", "FedAvg")),
        ("decoder.bind=127.0.0.1:0", ("decoder.bind", "127.0.0.1:0")),
        ("name=2024", ("name", "2024")),
        ("plan=", ("plan", "")),
        ("data.path=a=b", ("data.path", "a=b")),
        (" seed = 4 ", ("seed", 4)),
        ("optimizer.lr=fast", ("optimizer.lr", "fast")),
        ('strategy-options={"eta": 0.1}', ("strategy-options", '{"eta": 0.1}')),
    ],
)
def test_pairs_are_read_as_toml_and_plain_words_as_text(pair, expected):
    assert parse_set(pair) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"model.trainable": "lora"}, True),
        ({"model.trainable": "lora", "runtime.recompute": "never"}, False),
        ({"runtime.recompute": "always"}, True),
        # Files of earlier releases say true or false.
        ({"runtime.recompute": True}, True),
        ({"runtime.recompute": "true"}, True),
        ({"model.trainable": "lora", "runtime.recompute": False}, False),
    ],
)
def test_activations_are_computed_again_where_adapters_train_or_as_said(values, expected):
    assert RunConfig.from_flat(values).recomputes is expected


def test_pairs_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "my.toml").write_text("num-rounds = 50\nseed = 5\n[model]\nwidth = 32\n[optimizer]\nlr = 1\n")
    config = load_config(str(tmp_path / "my.toml"), ["seed=6", "model.width=16"])
    assert (config.num_rounds, config.seed, config.model.width, config.optimizer.lr) == (50, 6, 16, 1.0)
    assert config.batch_size == RunConfig().batch_size


def test_a_configuration_is_found_by_its_packaged_name_or_its_path(tmp_path):
    assert find_config("multi30k-tiny") == find_config("multi30k-tiny.toml")
    with pytest.raises(
        FileNotFoundError, match=r"expected a TOML file or one of .*multi30k-tiny.*; found no 'multi31k'"
    ):
        find_config("multi31k")
    with pytest.raises(FileNotFoundError, match="found no"):
        find_config(str(tmp_path / "multi30k-tiny.toml"))


def test_paths_of_pairs_are_seen_from_the_working_directory_and_paths_of_a_file_from_its_folder(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here, there / "words", here / "text"):
        folder.mkdir()
    monkeypatch.chdir(here)
    (there / "my.toml").write_text('plan = "p.json"\nscenario = "default"\n[data]\npath = "x"\ntokenizer = "words"\n')
    config = load_config(str(there / "my.toml"), ["data.path=text"])
    assert config.data.path == str(here / "text")
    assert config.data.tokenizer == str(there / "words")
    assert config.plan == str(there / "p.json")
    assert config.scenario == "default"
    assert config.runs_dir == str(here / "runs")
    assert load_config(None, ["scenario=mine.toml"]).scenario == str(here / "mine.toml")
    # A hub id is no path, unless there is such a folder.
    assert load_config(None, ["data.tokenizer=org/words"]).data.tokenizer == "org/words"


PATH_KEYS = sorted(
    key for key, kind in key_types().items() if kind is str and re.search(r"^plan$|-dir$|path$|tls-", key)
)
"""Keys whose value is a path, by their names: whoever adds one has to say so where paths become absolute."""


@pytest.mark.parametrize("key", PATH_KEYS)
def test_every_path_of_a_file_is_seen_from_its_folder_and_every_one_of_a_pair_from_here(key, tmp_path, monkeypatch):
    """Boxes and the server app have working directories of their own: a relative list of revoked certificates was lost.

    Results are the exception: they go where somebody works.
    """
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    needed = {"decoder.tls-certificate": "c.pem", "decoder.tls-key": "k.pem", "decoder.tls-ca": "a.pem"}
    values = {**(needed if key.startswith("decoder.tls") else {}), key: "some/file.pem"}
    (there / "my.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in values.items()))
    for config, base in (
        (load_config(str(there / "my.toml")), here if key in ("runs-dir", "run-dir") else there),
        (load_config(None, [f"{name}={value}" for name, value in values.items()]), here),
        (load_config(None, [f"{name}=../here/{value}" for name, value in values.items()]), here),
    ):
        assert config.to_flat()[key] == str(base / "some/file.pem")


def test_a_run_to_start_from_is_a_folder_or_a_name_among_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/one", "elsewhere/two"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/latest").symlink_to("one")
    for name, expected in (("one", "runs/one"), ("latest", "runs/one"), ("elsewhere/two", "elsewhere/two")):
        assert load_config(None, [f"model.from={name}"]).model.from_ == str(tmp_path / expected)
    with pytest.raises(ValueError, match=r"model\.from: one and model\.pretrained = org/words cannot both"):
        load_config(None, ["model.from=one", "model.pretrained=org/words", f"runs-dir={tmp_path / 'none'}"])


def test_file_names_without_a_folder_are_seen_from_where_they_were_written(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (there / "my.toml").write_text('[data]\nsource = "files"\ntrain-source = "a.tsv"\ntest-source = "b.tsv"\n')
    # The server app's working directory is neither.
    data = load_config(str(there / "my.toml")).data
    assert (data.path, data.train_source, data.test_source) == (str(there), "a.tsv", "b.tsv")
    data = load_config(None, ["data.source=files", "data.train-source=a.tsv", "data.test-source=~/b.tsv"]).data
    assert (data.path, data.train_source) == (str(here), "a.tsv")
    assert data.test_source == str(tmp_path / "home" / "b.tsv")
    data = load_config(str(there / "my.toml"), ["data.test-source=c.tsv"]).data
    assert (data.path, data.train_source, data.test_source) == (str(there), "a.tsv", str(here / "c.tsv"))
    data = load_config(str(there / "my.toml"), ["data.path=~/text"]).data
    assert (data.path, data.test_source) == (str(tmp_path / "home" / "text"), "b.tsv")
    assert load_config(None, ["data.source=generated"]).data.path == ""


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_packaged_configuration_is_valid(path):
    config = RunConfig.from_flat(read_config(path))
    assert config.name == path.stem


@pytest.mark.parametrize(
    ("values", "serves", "returns_states"),
    [
        ({}, True, False),
        ({"split.labels": "cluster"}, False, False),
        ({"split.labels": "cluster", "task.name": "causal-lm", "model.family": "llama"}, True, True),
        ({"task.name": "causal-lm", "model.family": "llama"}, True, False),
    ],
)
def test_labels_stay_in_the_clusters_with_what_of_the_head_needs_them(values, serves, returns_states):
    config = RunConfig.from_flat(values)
    assert (config.traits.decoder_on_server, config.returns_states) == (serves, returns_states)


def test_labels_that_leave_no_cluster_need_no_other_split():
    for strategy, why in (("FedAvg", "with which no label leaves"), ("splitlora", "whose server computes the loss")):
        said = rf"split\.labels: cluster needs strategy = collapipe, found '{strategy}', {why}; leave one of them out"
        with pytest.raises(ValueError, match=said):
            RunConfig.from_flat({"split.labels": "cluster", "strategy": strategy})
    with pytest.raises(ValueError, match=r"split\.labels: expected one of server, cluster, found 'here'"):
        RunConfig.from_flat({"split.labels": "here"})
