"""Images in the chat of the playground, in Chromium."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver

from tests.browser.page import Playground
from tests.process.harness import ServerProcess, wait_for

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Gives an image to an event of the element, as the browser does after a gesture.
GIVE = """
const [selector, event, property, color] = arguments;
const canvas = new OffscreenCanvas(40, 30);
const context = canvas.getContext("2d");
context.fillStyle = color;
context.fillRect(0, 0, 40, 30);
return canvas.convertToBlob().then((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], `${color}.png`, { type: "image/png" }));
  const options = { bubbles: true, cancelable: true, [property]: data };
  const kind = event === "drop" ? DragEvent : ClipboardEvent;
  const made = new kind(event, options);
  return !document.querySelector(selector).dispatchEvent(made);
});
"""


@pytest.fixture
def page(driver: webdriver.Chrome, seeing_server: ServerProcess) -> Iterator[Playground]:
    found = Playground(driver, seeing_server.url)
    found.open()
    yield found
    found.check_clean()


def widths(page: Playground, selector: str) -> list[int]:
    """The width of each loaded image in its own pixels; 0: the image is not loaded."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.naturalWidth)"
    return list(page.run(script, selector))


def attach_two(page: Playground) -> None:
    assert page.run(GIVE, "#messages", "drop", "dataTransfer", "blue")
    assert page.run(GIVE, "#prompt", "paste", "clipboardData", "green")
    wait_for(lambda: widths(page, "#files .thumbnail") == [40, 40], "two thumbnails")


def test_image_is_attached_by_the_button_a_drop_and_the_clipboard(
    page: Playground, tmp_path: Path
) -> None:
    """Each can be removed again."""
    attach_two(page)
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    page.find("#file").send_keys(str(tmp_path / "red.png"))
    wait_for(lambda: widths(page, "#files .thumbnail") == [40, 40, 64], "three thumbnails")
    page.click("#files li:first-child button")
    wait_for(lambda: widths(page, "#files .thumbnail") == [40, 64], "the other two")


def test_attached_images_are_sent_before_the_text(
    page: Playground, seeing_server: ServerProcess
) -> None:
    before = seeing_server.metrics()["images_total"]
    attach_two(page)
    assert page.ask("Which color?") == "It is red."
    assert seeing_server.metrics()["images_total"] == before + 2
    (message,) = json.loads(page.request("json"))["messages"]
    (first, second, text) = message["content"]
    assert first["image_url"]["url"].startswith("data:image/png;base64,")
    assert (second["type"], text) == ("image_url", {"type": "text", "text": "Which color?"})


def test_images_of_a_chat_fit_a_phone_and_are_kept_after_a_reload(page: Playground) -> None:
    page.size(390, 844, mobile=True)
    page.driver.refresh()
    page.wait_text("#state", "ready")
    attach_two(page)
    assert page.ask("Which color?") == "It is red."
    assert widths(page, ".message.user .thumbnail") == [40, 40]
    assert page.run("return document.documentElement.scrollWidth") == 390
    page.driver.refresh()
    page.wait_text("#state", "ready")
    wait_for(lambda: widths(page, ".message.user .thumbnail") == [40, 40], "the stored images")


def test_broken_image_is_refused(page: Playground, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno chunk")
    page.find("#file").send_keys(str(tmp_path / "broken.png"))
    page.wait_text("#notice-text", "broken.png cannot be attached: the browser cannot decode")


def test_large_image_is_made_smaller(page: Playground, tmp_path: Path) -> None:
    Image.effect_noise((3000, 1500), 90).save(tmp_path / "large.png")
    page.find("#file").send_keys(str(tmp_path / "large.png"))
    wait_for(lambda: widths(page, "#files .thumbnail") == [2048], "the thumbnail")
    source = page.find("#files .thumbnail").get_attribute("src") or ""
    assert source.startswith("data:image/jpeg;base64,")
