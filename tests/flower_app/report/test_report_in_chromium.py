"""The report on a telephone, in headless Chromium where there is one: nothing of the page lies beside the screen."""

import json

import pytest

from client_pipeline.system.scenario import load_scenario
from flower_app.report.page import write_report
from helpers.planned_run import planned_run
from helpers.watched_page import chromium, driver

pytestmark = pytest.mark.slow

playwright = driver()

FONT = """() => [...document.querySelectorAll("figure svg")].map(svg => {
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return scale * Math.min(...[...svg.querySelectorAll("text")].map(t => parseFloat(getComputedStyle(t).fontSize)));
}).filter(size => size > 0 && isFinite(size))"""
WIDTHS = "() => [document.documentElement.scrollWidth, innerWidth]"


def labels(number):
    names = [f"a class with a long name {i}" for i in range(number)]
    figures = {"precision": 0.25, "recall": 0.5, "f1": 1 / 3, "support": 4}
    found = {
        "text": "a text " * 40,
        "expected": names[0],
        "found": "without-a-blank" * 8,
        "loss": 3.0,
        "confidence": 0.5,
    }
    return {
        "examples": 12,
        "wrong": 2,
        "scored": "texts",
        "classes": [{"name": name, **figures} for name in names],
        "num_classes": number,
        "whole": True,
        "confusions": [[name, name, 1] for name in names],
        "worst": [found] * 3,
    }


@pytest.mark.parametrize("runs", [1, 3])
def test_the_page_fits_a_telephone_and_pictures_stay_readable(tmp_path, runs):
    folders = [planned_run(tmp_path / f"a-run-with-a-long-name-{i}", load_scenario("unequal"), 3) for i in range(runs)]
    for folder in folders:
        (folder / "mistakes.json").write_text(json.dumps(labels(20)))
    path = write_report(folders, tmp_path / "report.html")
    with chromium(playwright) as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
        page.goto(path.as_uri())
        page.evaluate("() => { for (const part of document.querySelectorAll('details')) part.open = true; }")
        assert page.evaluate(WIDTHS) == [390, 390]
        sizes = page.evaluate(FONT)
        assert len(sizes) >= 7 and min(sizes) >= 7.5
        assert page.locator("h2").first.inner_text().endswith("Classes")
