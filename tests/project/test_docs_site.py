"""The documentation as a site: every key is there, and it is built, which checks its links."""

import importlib.util
import re
import subprocess
import sys

import pytest

from flower_app.config.key_reference import key_entries, key_page
from flower_app.config.run_config import key_types
from helpers.repository import ROOT

DOCS = ROOT / "docs"


def test_every_key_is_in_the_reference_as_the_code_has_it():
    page = (DOCS / "keys.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.-]+)` \|", page, re.MULTILINE) == list(key_types())
    assert page == key_page(), "write it anew: python -m flower_app.config.key_reference > docs/keys.md"


def test_a_key_has_default_range_unit_and_meaning():
    entries = {entry.key: entry for entry in key_entries()}
    assert not [key for key, entry in entries.items() if len(entry.text) < 2]
    assert entries["num-rounds"].values == " ≥ 1" and entries["num-rounds"].default == "60"
    assert entries["model.dropout"].values == " ≥ 0, < 1" and entries["time-scale"].values == " > 0"
    assert entries["data.vocab-size"].values == " ≥ 300"
    assert entries["decoder-sync"].values == "`auto`, `step`, `round`"
    assert entries["model.norm"].values == "`pre`, `post`"
    assert entries["runtime.timeout"].unit == "s" and entries["decoder.max-frame-bytes"].unit == "byte"


def test_all_pages_are_in_the_navigation_and_in_llms_txt():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE))
    assert named == {path.name for path in DOCS.glob("*.md")}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))) == named


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "site").rglob("*.html"))) >= 19 and (tmp_path / "site" / "llms.txt").is_file()
    python = (tmp_path / "site" / "python" / "index.html").read_text(encoding="utf-8")
    assert "on_round" in python and "TrainingFailed" in python
