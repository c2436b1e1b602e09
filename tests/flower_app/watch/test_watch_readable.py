"""The page of a run with much to say, in headless Chromium where there is one: it can be read, on a telephone too."""

import contextlib

import pytest

from flower_app.watch.server import open_port, watched
from helpers.busy_run import LOST, REASON, busy_run, trouble
from helpers.seen_text import CANVAS_BOXES, RECORD_CANVAS_TEXT, SIDEWAYS, TEXT_BOXES, contrast, overlaps
from helpers.watched_page import BROWSER, ShownPage, chromium, seconds_until

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="the browser's driver is not installed")
if not BROWSER:
    pytest.skip("no Chromium here; COLLAPIPE_TEST_CHROMIUM names one", allow_module_level=True)

TOKEN = "a token of more than sixteen characters"
SMALLEST_FONT = 10.0
"""CSS pixels."""
LEAST_CONTRAST = 4.5
"""What WCAG 2 asks for of text, level AA."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A run in whose round under way three clusters are in trouble."""
    run_dir, lines = busy_run(tmp_path_factory.mktemp("runs") / "2026-11-23-busy"), []
    with contextlib.contextmanager(trouble)(run_dir), watched(run_dir, open_port(0), TOKEN, lines.append):
        yield lines[0].removeprefix("watch: ")


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")], ids=str)
def page(address, request):
    width, scheme = request.param
    with chromium(playwright) as browser:
        shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors = ShownPage(shown).errors
        shown.add_init_script(RECORD_CANVAS_TEXT)
        shown.goto(address)
        seconds_until(lambda: shown.text_content("#banner"), lambda text: "and 8 more" in text)
        yield shown
        assert errors == []


def test_all_text_can_be_read(page):
    boxes, canvases = page.evaluate(TEXT_BOXES), page.evaluate(CANVAS_BOXES)
    assert page.evaluate(SIDEWAYS) == []
    for texts in (boxes, *canvases):
        assert [box["text"] for box in texts if not box["inside"]] == []
        assert [(box["text"], box["font"]) for box in texts if box["font"] < SMALLEST_FONT] == []
        assert overlaps(texts) == []
    dull = {(b["color"], b["ground"]) for b in boxes if contrast(b["color"], b["ground"]) < LEAST_CONTRAST}
    assert dull == set()
    # Nothing of this holds for want of text.
    shown = " ".join(page.locator(f"#{name}").inner_text() for name in ("faults", "changes", "devices", "log"))
    assert REASON in shown and LOST.format(n=1) in shown and "its process ended" in shown
    assert len(boxes) > 100 and len(canvases) == 4 and all(len(texts) >= 5 for texts in canvases)


def test_the_check_sees_text_that_cannot_be_read(page):
    for place, style in (
        ("#pipeline text", "font-size: 4px"),
        ("#progress", "position: absolute; left: 0; top: 0; color: #777"),
        ("#log", "white-space: pre; overflow: auto"),
    ):
        page.evaluate("([place, style]) => { document.querySelector(place).style.cssText = style; }", [place, style])
    boxes = page.evaluate(TEXT_BOXES)
    assert min(box["font"] for box in boxes) < 5 and overlaps(boxes)
    assert page.evaluate(SIDEWAYS) == ["log"]
    assert min(contrast(box["color"], box["ground"]) for box in boxes) < LEAST_CONTRAST
