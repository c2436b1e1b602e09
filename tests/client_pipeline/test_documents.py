"""Files that a user or a stranger has written: nesting, numbers and counts beyond reason get one line, and at once."""

import json
import threading
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from client_pipeline.partition.plan import read_plans
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.scenario import load_scenario
from client_pipeline.weights.foreign_weights import check_folder
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.runs.run_directory import read_rounds, read_summary
from flower_app.tasks.data.tables import read_table_rows
from flower_app.tasks.tokenizer import load_tokenizer
from flower_app.training.network import training_scenario
from helpers.instances import random_instance
from helpers.repository import ROOT
from strategies.dssda.instance_file import read_instance

DEEP, DIGITS = 100_000, "9" * 400
MORE_DIGITS = "9" * 5_000
"""More than Python converts."""
SCENARIO = (ROOT / "configs" / "scenarios" / "table2.toml").read_text(encoding="utf-8")


def mistake(read):
    """Return the message about a file; name an error of another kind, and a reader that does not end."""
    said = []

    def attempt():
        try:
            read()
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}"[:200])

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(120)
    return said[0] if said else "no end"


def written(path, text):
    path.write_text(text)
    return path


READERS = {
    "plan": lambda path: read_plans(path),
    "instance": lambda path: read_instance(path.read_text(), str(path)),
    "summary": lambda path: read_summary(path.parent),
    "rounds": lambda path: read_rounds(path.parent),
    "model specification": lambda path: ModelSpec.from_json(path.read_text()),
    "rows": lambda path: read_table_rows(path, "data.path", True),
    "strategy options": lambda path: RunConfig(strategy_options=path.read_text()).strategy_arguments(),
    "added tokens": lambda path: load_tokenizer(str(path.parent)),
    "a tokenizer's settings": lambda path: load_tokenizer(str(path.parent)),
    "adapters": lambda path: check_folder(path.parent),
}
NAMES = {
    "summary": "summary.json",
    "rounds": "rounds.jsonl",
    "rows": "rows.jsonl",
    "added tokens": "added_tokens.json",
    "a tokenizer's settings": "tokenizer_config.json",
    "adapters": "adapter_config.json",
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": ' + "[" * DEEP + "]" * DEEP + "}", "at most 100 levels"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "at most 100 levels"),
        (f'{{"a": {DIGITS}}}', "at most 300 digits"),
        (f'{{"a": [[{{"b": -{DIGITS}}}]]}}', "at most 300 digits"),
        (f'{{"a": {DIGITS * 20}}}', "at most 300 digits"),
        ('{"a": [{"b": 1, "c": 2, "b": 3}]}', "keys of an object: expected each once, found 'b' twice; remove one"),
    ],
    ids=["deep", "nested", "digits", "digits within", "digits beyond Python's", "a key twice"],
)
def test_json_beyond_reason_gets_one_line(tmp_path, kind, text, expected):
    path = written(tmp_path / NAMES.get(kind, "file.json"), text + "\n")
    said = mistake(lambda: READERS[kind](path))
    if kind in ("model specification", "strategy options", "adapters"):
        # It names what was expected there, not why it is none.
        assert "expected" in said and "Error" not in said
    else:
        assert expected in said and path.name in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = " + "[" * DEEP + "]" * DEEP, "at most 100 levels"),
        ("a = " + "[" * 300 + "]" * 300, "at most 100 levels"),
        (f"[[{'.'.join(['device'] * 10_000)}]]", "at most 100 levels"),
        (f"seed = {DIGITS}", "at most 300 digits"),
        (f"seed = {MORE_DIGITS}", "at most 300 digits"),
        (f"seed = 0x{MORE_DIGITS}", "at most 300 digits"),
    ],
    ids=["deep", "nested", "keys", "digits", "more digits", "hexadecimal"],
)
@pytest.mark.parametrize("read", [lambda path: load_scenario(str(path)), lambda path: load_config(str(path))])
def test_toml_beyond_reason_gets_one_line(tmp_path, text, expected, read):
    path = written(tmp_path / "file.toml", text + "\n")
    said = mistake(lambda: read(path))
    assert expected in said and "file.toml" in said and len(said) < 500


@pytest.mark.parametrize("key", ["seed", "optimizer.lr"])
@pytest.mark.parametrize("value", [DIGITS, "[" * DEEP, "[" * 300 + "]" * 300, "1e400"])
def test_an_override_beyond_reason_gets_one_line(key, value):
    said = mistake(lambda: load_config(None, [f"{key}={value}"]))
    assert said.startswith(f"{key}: expected a") and len(said) < 300


COUNTS = {
    "clusters": ("clusters = 3", "clusters = {}"),
    "devices": ("devices = 6", "devices = {}"),
    "devices of a range": ("devices = 6", "devices = {{ min = 1, max = {} }}"),
    "channels": ("channels = 4", "channels = {}"),
    "blocks": ("blocks = 12", "blocks = {}"),
    "batch-size": ("batch-size = 64", "batch-size = {}"),
    "max-micro-batches": ("max-micro-batches = 64", "max-micro-batches = {}"),
}


@pytest.mark.parametrize("number", ["1000000000", "9" * 60])
@pytest.mark.parametrize("key", COUNTS)
def test_a_network_that_no_planner_could_plan_is_refused_at_once(tmp_path, key, number):
    old, new = COUNTS[key]
    assert old in SCENARIO, key
    path = written(tmp_path / "large.toml", SCENARIO.replace(old, new.format(number)))
    said = mistake(lambda: load_scenario(str(path)))
    assert "large.toml" in said and f"{key.split()[0]}" in said and "expected at most" in said


def test_many_clusters_of_many_devices_are_counted_together(tmp_path):
    text = SCENARIO.replace("clusters = 3", "clusters = 9000").replace("devices = 6", "devices = 9000")
    said = mistake(lambda: load_scenario(str(written(tmp_path / "large.toml", text))))
    assert "devices: expected at most 100,000 of all clusters together, found 81,000,000" in said
    text = SCENARIO.replace("clusters = 3", "clusters = 9000").replace("channels = 4", "channels = 9000")
    said = mistake(lambda: load_scenario(str(written(tmp_path / "large.toml", text))))
    assert "channels: expected at most 1,000,000 for all clusters together, found 81,000,000" in said


def test_a_network_of_ten_thousand_devices_is_taken(tmp_path):
    text = SCENARIO.replace("clusters = 3", "clusters = 1000").replace("devices = 6", "devices = 10")
    assert len(load_scenario(str(written(tmp_path / "large.toml", text))).clusters) == 1000


@pytest.mark.parametrize("key", ["L", "b", "steps", "S_max", "m_set"])
def test_an_instance_that_no_planner_could_plan_is_refused_at_once(key):
    value = [1, 10**9] if key == "m_set" else 10**9
    said = mistake(
        lambda: read_instance(json.dumps(random_instance(np.random.default_rng(1)) | {key: value}), "instance.json")
    )
    assert said.startswith(f"instance.json: {key}: expected") and ("1,000,000" in said or key == "L")


def test_a_command_says_so_in_one_line_and_at_once(tmp_path):
    path = written(tmp_path / "deep.json", "[" * DEEP)
    began = time.monotonic()
    result = CliRunner().invoke(app, ["plan", "--instance", str(path)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "at most 100 levels" in result.stderr
    assert time.monotonic() - began < 30


def test_a_batch_that_no_planner_could_cut_is_refused_at_once():
    said = mistake(lambda: training_scenario(load_config(None, [f"batch-size={10**9}"])))
    assert said == "batch-size: expected at most 100,000, found 1000000000; lower it"


def test_the_clusters_of_all_tables_are_counted_together(tmp_path):
    """Each table's count has its bound, and a thousand tables took all memory."""
    text = SCENARIO.replace("clusters = 3\n", "") + "[[cluster]]\ncount = 9000\n" * 2
    said = mistake(lambda: load_scenario(str(written(tmp_path / "large.toml", text))))
    assert "large.toml: cluster[1].count: expected at most 10,000 clusters of all [[cluster]] together" in said
    assert said.endswith("found 18,000")


@pytest.mark.parametrize(
    "sets", [["width=1000000", "encoder-layers=1000"], ["feed-forward=1000000000000"], ["max-length=1000000000000"]]
)
def test_a_model_that_no_machine_can_build_is_refused_at_once(sets):
    said = mistake(lambda: load_config(None, [f"model.{text}" for text in sets]))
    assert said.startswith("model.width: expected") and "at most 1,000,000,000,000 weights, found about" in said
