"""The page at the door in headless Chromium, where there is one: a person asks, and reads what the model writes."""

import openai
import pytest

from helpers.served import KEY, chat_run, open_model, spread_weights
from helpers.watched_page import ShownPage, chromium, driver

pytestmark = pytest.mark.slow

playwright = driver()

PATIENCE_MS = 60_000


def last(page, kind):
    return page.locator(f"#messages .{kind}").last


def ask(page, text):
    page.fill("#text", text)
    page.click("#send")
    playwright.expect(page.locator("#send")).to_be_enabled(timeout=PATIENCE_MS)


def test_a_person_asks_and_reads(tmp_path, monkeypatch):
    run_dir = chat_run(tmp_path, monkeypatch)
    spread_weights(run_dir)
    with chromium(playwright) as browser, open_model(run_dir) as (served, address):
        page = browser.new_page()
        shown = ShownPage(page)
        page.goto(address)
        playwright.expect(page).to_have_title(served.name, timeout=PATIENCE_MS)
        assert page.locator("#reader").text_content() == "read by nobody"
        page.fill("#temperature", "0")
        page.fill("#tokens", "12")
        # Without the key nothing is answered, and the page says why.
        ask(page, "the dog?")
        assert "key" in last(page, "error").text_content().lower()
        shown.errors.clear()
        page.fill("#key", KEY)
        ask(page, "the dog?")
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        asked = [{"role": "user", "content": "the dog?"}]

        def answer(messages):
            found = client.chat.completions.create(model=served.name, messages=messages, temperature=0, max_tokens=12)
            return found.choices[0].message.content

        first = answer(asked)
        assert last(page, "assistant").text_content() == first
        # The second question is asked behind the first one and its answer.
        ask(page, "the boy?")
        conversation = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "the boy?"}]
        assert last(page, "assistant").text_content() == answer(conversation)
        assert not shown.errors
        page.click("#new")
        assert page.locator("#messages > *").count() == 0
