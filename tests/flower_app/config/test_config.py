"""The configuration: keys, types, ranges, precedence and paths."""

import dataclasses
import json
import tomllib

import pytest

from flower_app.config.other_names import OTHER_NAMES
from flower_app.config.run_config import ModelConfig, RunConfig, key_types, nested
from flower_app.config.sources import find_config, load_config, parse_set, read_config
from helpers.repository import ROOT


def test_pyproject_declares_every_key_with_the_default_value():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = dict(_flat(declared))
    # Flower takes only keys that are declared.
    assert {name: flat.pop(name) for name in OTHER_NAMES} == {"num-server-rounds": 0, "learning-rate": 0.0}
    assert flat == RunConfig().to_flat()
    assert {key: type(value) for key, value in flat.items()} == dict(key_types())


def test_flat_form_and_configuration_are_inverses():
    config = RunConfig.from_flat({"optimizer.lr": 1, "model.width": 32, "name": "a", "runtime.recompute": True})
    assert RunConfig.from_flat(config.to_flat()) == config
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert RunConfig.from_flat({}) == RunConfig()


def test_length_of_the_learning_rate_schedule_follows_from_rounds_and_steps():
    config = RunConfig.from_flat({"num-rounds": 7, "local-steps": 3, "optimizer.warmup-steps": 2})
    assert config.optimizer.total_steps == 21
    assert "optimizer.total-steps" not in config.to_flat()
    assert dataclasses.replace(config, num_rounds=2).optimizer.total_steps == 6
    # Longer than the default run, which is none of this run's business.
    long = RunConfig.from_flat({"num-rounds": 2000, "optimizer.warmup-steps": 1000})
    assert (long.optimizer.warmup_steps, long.optimizer.total_steps) == (1000, 8000)
    # A short trial run may end within the warm-up.
    assert RunConfig.from_flat({"num-rounds": 5}).optimizer.learning_rate(20) == pytest.approx(5e-3 / 2)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("lr", "optimizer.lr"),
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


def test_what_follows_from_other_keys_is_no_key():
    with pytest.raises(ValueError, match="unknown configuration key 'optimizer.total-steps'"):
        RunConfig.from_flat({"optimizer.total-steps": 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lr", "fast", "optimizer.lr: expected a number, found a text: 'fast'"),
        ("num-rounds", 2.0, "num-rounds: expected a whole number, found a number: 2.0"),
        ("num-rounds", True, "num-rounds: expected a whole number, found true or false: True"),
        ("runtime.recompute", 1, "runtime.recompute: expected true or false, found a whole number: 1"),
        ("name", 3, "name: expected a text, found a whole number: 3"),
        ("data.path", ["a"], "data.path: expected a text, found a list: ['a']"),
        ("optimizer.lr", float("nan"), "optimizer.lr: expected a finite number, found nan"),
        ("seed", 2**63, "seed: expected a whole number from -2^63 to 2^63 - 1, found 9223372036854775808"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, message):
    with pytest.raises(ValueError) as error:
        RunConfig.from_flat({key: value})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num-rounds", 0, "num-rounds: expected at least 1, found 0"),
        ("batch-size", 0, "batch-size: expected at least 1, found 0"),
        ("num-clusters", -1, "num-clusters: expected at least 0, found -1"),
        ("decoder-sync", "never", "decoder-sync: expected one of auto, step, round, found 'never'"),
        ("strategy-options", "[1]", "strategy-options: expected a JSON object"),
        ("strategy-options", "{eta}", "strategy-options: expected a JSON object"),
        ("name", "a/b", "name: expected letters"),
        ("name", "", "name: expected a text, found an empty one"),
        ("model.num-heads", 5, "model.width: 64 is not a multiple of model.num-heads = 5"),
        ("model.key-value-heads", 3, "model.key-value-heads: expected a divisor of model.num-heads = 4, or 0, found 3"),
        (
            "model.key-value-heads",
            -2,
            "model.key-value-heads: expected a divisor of model.num-heads = 4, or 0, found -2",
        ),
        ("model.key-value-heads", 2, "model.key-value-heads: expected a model.family of llama, mistral, qwen2, qwen3"),
        ("model.base-dtype", "int8", "model.base-dtype: int8 is of what is never trained: expected model.trainable"),
        ("model.dropout", 1.0, "model.dropout: expected a number in [0, 1), found 1.0"),
        ("model.norm", "mid", "model.norm: expected pre or post, found 'mid'"),
        ("model.max-length", 100, "data.max-length: 128 exceeds model.max-length = 100"),
        ("optimizer.name", "adam", "optimizer.name: expected sgd or adamw, found 'adam'"),
        ("runtime.threads", 0, "runtime.threads: expected at least 1, found 0"),
        ("runtime.timeout", 0.0, "runtime.timeout: expected a number of seconds above 0"),
        ("decoder.bind", "0.0.0.0:0", "decoder.bind"),
        ("task.name", "chess", "task.name: expected one of"),
        ("data.source", "moon", "data.source: expected one of"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key, value, message):
    with pytest.raises(ValueError) as error:
        RunConfig.from_flat({key: value})
    assert str(error.value).startswith(message)


def test_a_table_is_checked_also_without_the_others():
    with pytest.raises(ValueError, match="model.width: 6 is not a multiple"):
        ModelConfig(width=6, num_heads=4)


def test_strategy_options_are_a_json_object():
    assert RunConfig.from_flat({"strategy-options": json.dumps({"eta": 0.1})}).strategy_arguments() == {"eta": 0.1}
    assert RunConfig().strategy_arguments() == {}


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("optimizer.lr=2e-3", ("optimizer.lr", 0.002)),
        ("num-rounds=3", ("num-rounds", 3)),
        ("runtime.recompute=true", ("runtime.recompute", True)),
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


def test_pairs_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "my.toml").write_text("num-rounds = 50\nseed = 5\n[model]\nwidth = 32\n[optimizer]\nlr = 1\n")
    config = load_config(str(tmp_path / "my.toml"), ["seed=6", "model.width=16"])
    assert (config.num_rounds, config.seed, config.model.width, config.optimizer.lr) == (50, 6, 16, 1.0)
    assert config.batch_size == RunConfig().batch_size


def test_a_pair_without_an_equals_sign_and_an_unknown_key_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--set: expected key=value, found 'seed'"):
        load_config(None, ["seed"])
    with pytest.raises(ValueError, match="unknown configuration key 'sead'; did you mean 'seed'?"):
        load_config(None, ["sead=1"])
    (tmp_path / "my.toml").write_text("[modl]\nwidth = 32\n")
    with pytest.raises(ValueError, match="unknown configuration key 'modl.width'; did you mean 'model.width'?"):
        load_config(str(tmp_path / "my.toml"))


def test_a_file_that_is_no_toml_is_named(tmp_path):
    (tmp_path / "my.toml").write_text("num-rounds = = 5\n")
    with pytest.raises(ValueError, match="my.toml: expected TOML"):
        load_config(str(tmp_path / "my.toml"))


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


def test_nested_tables_flatten_to_the_same_keys():
    assert dict(_flat(nested(RunConfig().to_flat()))) == RunConfig().to_flat()


def _flat(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
