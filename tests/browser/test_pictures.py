"""Takes the pictures of README.md and docs/playground.md: MINISGL_PICTURES=1 writes docs/images."""

import json
import os
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from tests.browser.page import Playground
from tests.process.harness import ServerProcess, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        "MINISGL_PICTURES" not in os.environ, reason="only on request: set MINISGL_PICTURES=1"
    ),
]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
TOOL = {
    "name": "calculator",
    "description": "Compute an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}


def take(page: Playground, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    picture = page.driver.get_screenshot_as_png()
    assert len(picture) < 150_000
    (IMAGES / f"playground-{name}.png").write_bytes(picture)


def test_chat(page: Playground) -> None:
    page.ask("Spell the word planet.")
    page.click("#new")
    page.set_parameter("tools", json.dumps([{"type": "function", "function": TOOL}]))
    page.ask("What is 4821 times 377?")
    page.find(".results textarea").send_keys(str(4821 * 377))
    page.click(".results button")
    wait_for(lambda: len(page.answers()) == 2 and page.is_idle(), "the second answer")
    page.run("document.getElementById('settings').scrollTop = 0; document.activeElement.blur()")
    take(page, "chat")


def test_tokens(page: Playground) -> None:
    page.click("#to-tokens")
    page.set("#tokens-prompt", "The favourite colour of Mira is green. Mira likes tea.\nThe")
    page.set("#tokens-temperature", "0.8")
    page.click("#tokens-run")
    page.wait_text("#tokens-facts", "perplexity")
    page.click("#tokenize button")
    page.wait_text("#tokenize-facts", "tokens")
    page.click("#detokenize button")
    page.wait_text("#detokenize-result", "Tokens")
    unlikely = page.find("#tokens-result").find_elements(By.CSS_SELECTOR, ".p3")
    ActionChains(page.driver).move_to_element(unlikely[-1]).perform()
    wait_for(lambda: page.find("#alternatives").is_displayed(), "the alternatives")
    take(page, "tokens")


def test_engine(page: Playground, demo_server: ServerProcess) -> None:
    page.click("#to-engine")
    completions = demo_server.client().completions
    body = {"model": "minisgl-demo", "temperature": 1, "extra_body": {"ignore_eos": True}}
    text = "What is 12 + 30?\n"
    for count, tokens in ((1, 200), (5, 300), (2, 250), (7, 300)):
        streams = [
            completions.create(prompt=f"{text * 40}{n}", max_tokens=tokens, stream=True, **body)
            for n in range(count)
        ]
        for stream in streams:
            list(stream)
    prompts = [text * n for n in (40, 45, 50)]
    last = [completions.create(prompt=p, max_tokens=3000, stream=True, **body) for p in prompts]
    page.wait_text("[data-plot='Requests'] dd", "3")
    page.wait_text("[data-plot='Step time'] .line2 dd", " ms")
    take(page, "engine")
    for stream in last:
        stream.close()


def test_phone_in_the_dark(page: Playground) -> None:
    page.size(390, 844, scale=2, mobile=True)
    page.media("dark")
    page.driver.refresh()
    page.wait_text("#state", "ready")
    page.ask("What is 12 + 30?")
    page.ask("Spell the word planet.")
    page.run("document.activeElement.blur()")
    take(page, "phone")
