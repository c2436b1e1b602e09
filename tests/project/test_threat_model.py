"""The threat model's page says what the code does: its settings are taken, its numbers are the code's."""

import ast
import importlib
import json
import re
import tomllib

import pytest

from client_pipeline.link.frame_limits import MAX_HEADER_BYTES
from flower_app.config.run_config import RunConfig
from helpers.repository import ROOT
from strategies.aggregation.config import AggregatorConfig
from strategies.aggregation.rules import fewest_clusters
from strategies.decoder import limits, reception, service
from strategies.decoder.config import DecoderConfig

PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "threat-model-reference.md").read_text(encoding="utf-8")
CLAIMS = (ROOT / "docs" / "threat-model-tests.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results" / "leakage" / "results.jsonl"


def settings_of(line):
    return re.findall(r"`((?:privacy|model|aggregator)\.[a-z-]+) = ([^`]+)`", line)


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if settings_of(line)])
def test_the_settings_of_a_line_are_taken(line):
    # What a setting needs beside it stands elsewhere on the page.
    needed = {"privacy.update-clip": 1.0} if "update-mechanism" in line else {}
    if "privacy.gradient" in line:
        needed = {"split.labels": "cluster", "task.name": "causal-lm", "model.family": "llama"}
    alone = [{key: tomllib.loads(f"value = {value}")["value"]} for key, value in settings_of(line)]
    together = {key: value for one in alone for key, value in one.items()}
    mechanisms = re.findall(r'"((?:server|client)-(?:fixed|adaptive))"', line)
    for flat in [{"privacy.update-mechanism": name} for name in mechanisms] or [together]:
        assert RunConfig.from_flat(needed | flat)


def test_the_robust_rules_need_as_many_clusters_as_the_page_says():
    rows = re.findall(r"^\| (`.*?`) \| .* \| (\d+) \| (\d+).*?\| .* \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for names, *fewest in rows:
        for name in re.findall(r"`([a-z-]+)`", names):
            assert [fewest_clusters(AggregatorConfig(name=name, malicious=f)) for f in (1, 2)] == [
                int(n) for n in fewest
            ], name


def test_every_claim_of_the_table_is_held_by_tests_that_are_there():
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (.*) \|$", CLAIMS, re.MULTILINE)[1:]
    assert {section for section, *_ in rows} == {
        "trust",
        "cluster",
        "stream",
        "replies",
        "watch",
        "code",
        "epsilon",
        "poison",
        "leakage",
    }
    assert len(rows) == CLAIMS.count("\n| ") - 2 >= 40
    for _, claim, tests in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named and len(named) == tests.count("`") / 2, claim
        for file, test in named:
            [path] = (ROOT / "tests").rglob(file)
            functions = ast.parse(path.read_text(encoding="utf-8")).body
            assert test in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, f"{claim}: {test}"


def test_the_limits_of_the_page_are_those_of_the_code():
    config, streams, again = DecoderConfig(), reception.STREAMS_OF_A_CLUSTER, reception._COMEBACKS
    for words in (
        f"`decoder.max-frame-bytes` ({config.max_frame_bytes >> 20} MiB), headers {MAX_HEADER_BYTES >> 10} KiB",
        f"a hello {reception._HELLO_BYTES >> 10} KiB, metadata 8 KiB",
        f"`decoder.frames-per-second` ({config.frames_per_second:g}) a stream",
        f"{limits.WRONG_HELLOS} wrong hellos of a peer, then one a second",
        f"{streams} streams of a cluster at once, {again} opened again in a round, then one a second",
        f"a hello within {reception.HELLO_TIMEOUT_S:g} s, a handshake within {service._HANDSHAKE_TIMEOUT_S:g} s",
    ):
        assert words in REFERENCE
    assert limits.WRONG_HELLOS_PER_S == reception._COMEBACKS_PER_S == 1.0


def test_no_module_unpickles():
    """Ray does, within a cluster, and Flower's simulation within its machine; no code of ours has to."""
    modules = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    for package in ("client_pipeline", "strategies", "flower_app"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    assert not modules & {alias.name.split(".")[0] for alias in node.names}, path
                elif isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] not in modules, path
                elif isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in ("torch.load", "np.load", "numpy.load", "eval", "exec"), f"{path}: {called}"
                    unsafe = [k for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"]
                    assert not unsafe, path


def test_the_leakage_table_is_what_its_benchmark_makes_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("leakage_table")
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert "\n".join(benchmark.table(rows)) in (RESULTS.parent / "README.md").read_text(encoding="utf-8")
    # Splitting alone hides little, and the noise lowers what is read.
    for task in {row["task"] for row in rows}:
        of_split = [row for row in rows if (row["task"], row["split"]) == (task, "server")]
        read = {row["noise"]: row["tokens_read"]["top1"] for row in of_split}
        assert read[0.0] > 2 * of_split[0]["without_looking"]["top1"] and read[max(read)] < read[0.0]
