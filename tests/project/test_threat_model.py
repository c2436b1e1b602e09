"""The threat model's page says what the code does: its settings are taken, its numbers are the code's."""

import importlib.util
import json
import re
import tomllib

import pytest

from flower_app.config.run_config import RunConfig
from helpers.repository import ROOT
from strategies.aggregation.config import AggregatorConfig
from strategies.aggregation.rules import fewest_clusters

PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results" / "leakage" / "results.jsonl"


def settings_of(line):
    return re.findall(r"`((?:privacy|model|aggregator)\.[a-z-]+) = ([^`]+)`", line)


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if settings_of(line)])
def test_the_settings_of_a_line_are_taken(line):
    # What a setting needs beside it stands elsewhere on the page.
    needed = {"privacy.update-clip": 1.0} if "update-mechanism" in line else {}
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


def test_every_test_and_link_of_the_page_is_there():
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(?:tests/[a-z_/]*)?(test_\w+\.py)`", PAGE):
        assert len(list((ROOT / "tests").rglob(name))) == 1, name
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in tests, name
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_the_leakage_table_is_what_its_benchmark_makes_of_the_results():
    specification = importlib.util.spec_from_file_location("leakage_table", ROOT / "benchmarks" / "leakage_table.py")
    benchmark = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(benchmark)
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert "\n".join(benchmark.table(rows, "accuracy")) in PAGE
    # What the page is for: splitting alone hides little, and the noise lowers what is read.
    read = {row["noise"]: row["tokens_read"]["top1"] for row in rows}
    assert read[0.0] > 2 * rows[0]["without_looking"]["top1"] and read[max(read)] < read[0.0]
