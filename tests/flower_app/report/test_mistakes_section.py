"""The report's labels: classes, confusions and worst mistakes come first, and the network is folded."""

import json
import re

import pytest

from flower_app.report.contents import FIGURES
from flower_app.report.page import write_report
from helpers.reported_run import Page, make_run

pytestmark = pytest.mark.slow


def classes(*names):
    return [{"name": name, "precision": 0.25, "recall": 0.5, "f1": 1 / 3, "support": 4} for name in names]


MISTAKES = {
    "examples": 12,
    "wrong": 2,
    "scored": "texts",
    "classes": classes("cat", "<i>dog"),
    "num_classes": 2,
    "whole": True,
    "confusions": [["cat", "cat", 6], ["<i>dog", "<i>dog", 4], ["cat", "<i>dog", 2]],
    "worst": [
        {"text": "<script>x</script> & more", "expected": "cat", "found": "<i>dog", "loss": 3.25, "confidence": 0.75},
        {"text": "none", "expected": "cat", "found": "<i>dog", "loss": None, "confidence": None},
    ],
}


def labelled_run(folder, mistakes=MISTAKES):
    run = make_run(folder)
    (run / "mistakes.json").write_text(mistakes if isinstance(mistakes, str) else json.dumps(mistakes))
    return run


def test_labels_come_first_and_the_network_is_folded(tmp_path):
    path = write_report([labelled_run(tmp_path / "run")])
    page, source = Page(path), path.read_text(encoding="utf-8")
    marks = ("precision", "expected \\ found", "&lt;script&gt;x&lt;/script&gt; &amp; more")
    marks += ('id="loss"', 'id="wall"', "<details>", 'id="latency"')
    places = [source.find(mark) for mark in marks]
    assert -1 not in places and places == sorted(places)
    folded = re.findall(r"<details>(.*)</details>", source, re.DOTALL)
    assert len(folded) == 1 and set(re.findall(r'<figure id="(\w+)">', folded[0])) == {spec.id for spec in FIGURES} - {
        "loss",
        "wall",
    }
    assert not re.search(r"<(script|i)\b", source) and not page.open
    words = page.text
    for text in ("2 of 12 examples", "0.2500", "0.3333", "loss 3.25", "confidence 0.75"):
        assert text in " ".join(words.split()), text
    row = re.search(r"<tr><th>cat</th>(.*?)</tr>", source)[1]
    assert re.findall(r">(\d+)<", row) == ["6", "2"]
