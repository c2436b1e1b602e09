"""The benchmark of mutants stays true to the code: its bugs can be made, and its tests are there."""

import json
import re
import sys

import pytest

from helpers.repository import ROOT


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import mutation
    import named_bugs
    import quick_tests

    yield mutation, named_bugs, quick_tests
    sys.path.remove(str(ROOT / "benchmarks"))


def test_every_named_bug_can_be_made_and_its_tests_are_there(benchmark):
    _, named_bugs, _ = benchmark
    assert len({bug.name for bug in named_bugs.BUGS}) == len(named_bugs.BUGS) >= 20
    for bug in named_bugs.BUGS:
        assert (ROOT / bug.file).read_text(encoding="utf-8").count(bug.before) == 1, bug.name
        for test in bug.tests:
            file, _, name = test.partition("::")
            assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test
            assert (ROOT / file).is_file(), test


RESULTS = ROOT / "docs" / "results" / "mutants"


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("sample-*.json")))
def test_every_bug_of_a_sample_that_nobody_notices_has_its_reason(name):
    sample = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert sample["bugs"] == len(sample["verdicts"]) >= 40
    assert sample["noticed"] == sum(verdict["noticed_by"] is not None for verdict in sample["verdicts"])
    assert sample["noticed"] >= 0.85 * sample["bugs"]
    assert all(verdict["explanation"] for verdict in sample["verdicts"] if verdict["noticed_by"] is None)


def test_every_reason_is_of_a_line_that_is_there():
    for key in json.loads((RESULTS / "survivors.json").read_text(encoding="utf-8")):
        file, text, _ = key.split(" | ", 2)
        assert text in (ROOT / file).read_text(encoding="utf-8"), key


def test_every_mutated_file_has_quick_tests(benchmark):
    mutation, _, quick_tests = benchmark
    paths = [path for pattern in quick_tests.MODULES for path in ROOT.glob(pattern)]
    files = [path for path in paths if mutation.mutants(path.read_bytes())]
    assert len(files) > 60
    heavy = re.compile(r"\b(local_ray|simulate|hosts\.|subprocess)\b")
    for path in files:
        for test in quick_tests.tests_of(str(path.relative_to(ROOT))):
            assert (ROOT / test).is_file(), (path, test)
            text = (ROOT / test).read_text(encoding="utf-8")
            assert "local_ray" not in text or not heavy.search(text), (path, test)
