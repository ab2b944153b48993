"""One Chromium, one server with the demo model, and one server with keys and scripted answers."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.browser.injections import INJECTIONS
from tests.browser.page import Playground
from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_reciting_model, build_seeing_model

KEY = "sesame-opens-the-door"


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        reason = "no chromium or no chromedriver on PATH: apt install chromium chromium-driver"
        if os.environ.get("CI"):  # The playground has no other test, so CI must not skip these.
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Chromium's sandbox does not work for root, and /dev/shm is small in a container.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    # Chromium's own services would call other hosts, and the tests look at every request.
    for flag in ("--disable-background-networking", "--disable-component-update", "--no-first-run"):
        options.add_argument(flag)
    # Each test opens a new page. Chromium would keep the pages before it alive, for the way back.
    options.add_argument("--disable-features=BackForwardCache")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options, Service(chromedriver))
    yield found
    found.quit()


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    with run_server("--num-pages", "1024") as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the tokens of reasoning. Only the stub scheduler runs it."""
    tokens = ["<think>", "</think>"]
    return build_reciting_model(tmp_path_factory.mktemp("model"), tokens, tokens)


@pytest.fixture(scope="session")
def keyed_server(
    thinking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with a key. It answers "attack" with injections, and "hello" after thinking.

    The page renders each text of an answer again with each token, so this answer has a third of
    the injections. Stored messages have all.
    """
    folder = tmp_path_factory.mktemp("keyed")
    rules = [["attack", "\n\n".join(INJECTIONS[::3])], ["hello", "<think>A greeting.</think>Hi."]]
    (folder / "script.json").write_text(json.dumps(rules))
    (folder / "keys").write_text(f"reader: {KEY}\n")
    flags = ["--model", str(thinking_model), "--api-key-file", str(folder / "keys")]
    with run_server(*flags, stub=str(folder / "script.json")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def seeing_server(
    thinking_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that decodes images, and answers "color" with "It is red."."""
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "script.json").write_text(json.dumps([["color", "It is red."]]))
    model = build_seeing_model(folder / "model", thinking_model)
    with run_server("--model", str(model), stub=str(folder / "script.json")) as server:
        yield server.wait_ready()


@pytest.fixture
def keyed_page(driver: webdriver.Chrome, keyed_server: ServerProcess) -> Iterator[Playground]:
    """The playground of the server with a key, which the page does not have yet."""
    found = Playground(driver, keyed_server.url)
    found.expected_error = "401"
    found.open()
    yield found
    found.check_clean()


@pytest.fixture
def page(driver: webdriver.Chrome, demo_server: ServerProcess) -> Iterator[Playground]:
    """The playground of the demo server, with an empty storage."""
    found = Playground(driver, demo_server.url)
    found.open()
    yield found
    found.check_clean()
