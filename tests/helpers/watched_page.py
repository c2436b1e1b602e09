"""The page of a watched run: what it asks for, and the page itself in headless Chromium where there is one."""

import contextlib
import json
import os
import re
import shutil
import time
import urllib.request

import pytest

BROWSER = os.environ.get("COLLAPIPE_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
"""The browser's program; None: there is none."""
VISIBLE_S = 5 * 2.0
"""So soon a fault has to be seen beside other work, in five times what the page promises [s]."""


def page_of(run_dir):
    """Return a client that asks the page of a run with its token, without a server."""
    from starlette.testclient import TestClient

    from flower_app.watch.server import watch_app

    token = "a token of more than sixteen characters"
    client = TestClient(watch_app(run_dir, token), base_url="http://127.0.0.1:8090")
    client.headers["authorization"] = f"Bearer {token}"
    return client


class AskedPage:
    """Requests of the page, by the address that the terminal has shown."""

    def __init__(self, address):
        self.address, self.token = re.match(r"(http://[^/]+)/\?token=(\S+)", address).groups()

    def get(self, path):
        request = urllib.request.Request(f"{self.address}/{path}", headers={"authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def now(self):
        """Return the page's view of this moment: signs of devices, and faults of the round, past ones included."""
        present = self.get("state?after=1000000")
        faults = [f"cluster {f['cluster']}, device {f['device']}: {f['reason']}" for f in present["faults_now"]]
        return " · ".join([*(sign["text"] for sign in present["signs_now"]), *faults])


class ShownPage:
    """A page that a browser shows; asked from here: the page runs no foreign code."""

    def __init__(self, page):
        self.page, self.errors = page, []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def now(self):
        """Return the page's list of faults."""
        texts = self.page.locator("#faults > *").all_text_contents()
        return " · ".join(text for text in texts if text.startswith("now: "))


def driver():
    """Return playwright's module; without a browser the tests are skipped, or fail where one is required."""
    try:
        from playwright import sync_api
    except ModuleNotFoundError:
        reason = "the browser's driver is not installed"
    else:
        if BROWSER:
            return sync_api
        reason = "no Chromium here; COLLAPIPE_TEST_CHROMIUM names one"
    assert not os.environ.get("COLLAPIPE_TEST_BROWSER"), f"COLLAPIPE_TEST_BROWSER is set: {reason}"
    pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def chromium(playwright):
    """A headless browser."""
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments, headless=True)
        try:
            yield browser
        finally:
            browser.close()


def seconds_until(text, holds, patience_s=60, every_s=0.05):
    """Return the seconds until a text is as wanted.

    Parameters
    ----------
    text : returns it
    holds : whether it is as wanted
    """
    begun = time.monotonic()
    while not holds(words := text()):
        assert time.monotonic() < begun + patience_s, words
        time.sleep(every_s)
    return time.monotonic() - begun
