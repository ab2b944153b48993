"""Drives the playground in a real browser, and collects what the browser logged and loaded."""

import json
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.process.harness import wait_for

__all__ = ["Playground"]

_MEDIA = "Emulation.setEmulatedMedia"
_SIZE = "Emulation.setDeviceMetricsOverride"


class Playground:
    """The page in one browser.

    expected_error: a text of the errors that the browser may log, such as the status of a refusal.
    """

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.expected_error = "no error"

    def open(
        self,
        view: str = "",
        conversations: list[dict[str, Any]] | None = None,
        state: str = "ready",
    ) -> None:
        """Open the page with a storage that holds only these conversations.

        Wait until it shows this state of the server.
        """
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.size(1280, 800)
        self.media("light")
        types = {"origin": self.url, "storageTypes": "all"}
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", types)
        if conversations:
            self.driver.get(f"{self.url}/playground/icon.svg")
            script = "Object.entries(arguments[0]).forEach((one) => localStorage.setItem(...one))"
            stored = enumerate(conversations)
            self.run(script, {f"minisgl.conversation.{n}": json.dumps(one) for n, one in stored})
        self.driver.get(f"{self.url}/{view}")
        self.wait_text("#state", state)

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of a script. Its arguments are in `arguments`."""
        return self.driver.execute_script(script, *arguments)

    def size(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.driver.execute_cdp_cmd(_SIZE, size)

    def media(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd(_MEDIA, {"features": features})

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements, hidden ones too."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.run(script, selector))

    def wait_text(self, selector: str, text: str) -> None:
        def is_there() -> bool:
            return any(text in found for found in self.texts(selector))

        wait_for(is_there, lambda: f"{text!r} in {selector}: {self.texts(selector)}")

    def click(self, selector: str, label: str | None = None) -> None:
        """Click the only visible element, or the last one with this label."""
        found = [one for one in self.all(selector) if one.is_displayed()]
        if label is not None:
            found = [one for one in found if one.text == label][-1:]
        assert len(found) == 1, f"{len(found)} visible elements {selector} {label or ''}"
        found[0].click()

    def set(self, selector: str, text: str) -> None:
        """Replace the text of a field, and leave the field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text + Keys.TAB)

    def set_parameter(self, name: str, text: str) -> None:
        self.set(f"#parameter-{name}", text)

    def send(self, text: str) -> None:
        """Send a message with the keyboard."""
        self.find("#prompt").send_keys(text.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL))
        self.find("#prompt").send_keys(Keys.ENTER)

    def ask(self, text: str) -> str:
        """Send a message and return the answer."""
        before = len(self.answers())
        self.send(text)
        wait_for(lambda: len(self.answers()) > before, f"an answer to {text!r}")
        return self.last_answer()

    def answers(self) -> list[str]:
        return self.texts(".message.assistant .markdown")

    def last_answer(self) -> str:
        """The last answer, after its end."""
        wait_for(self.is_idle, "the end of the answer")
        return self.answers()[-1]

    def is_idle(self) -> bool:
        return not self.find("#stop").is_displayed()

    def request(self, form: str) -> str:
        """The request of the last answer as the dialog shows it."""
        self.click(".buttons button", "Request")
        self.click(f'#request-forms [value="{form}"]')
        shown = self.find("#request-text").text
        self.click("#request-close")
        return shown

    def check_clean(self) -> None:
        """The browser logged no other error, and asked no other host, since `open`."""
        logged = [entry["message"] for entry in self.driver.get_log("browser")]
        assert [one for one in logged if self.expected_error not in one] == []
        entries = self.driver.get_log("performance")
        events = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
        # The blank page, pages of the browser itself and data: URLs have no host.
        urls = [urlsplit(one["request"]["url"]) for one in sent]
        hosts = {
            url.netloc for url in urls if url.scheme not in ("about", "chrome", "devtools", "data")
        }
        assert hosts == {urlsplit(self.url).netloc}
