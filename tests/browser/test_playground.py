"""The playground in Chromium, with the demo model. The tests of this file share one server."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser.page import Playground
from tests.process.harness import ServerProcess, wait_for

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOOL = {
    "name": "calculator",
    "description": "Compute an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
# An answer that ends only when it is stopped: the demo model repeats the end of sequence.
ENDLESS = "ignore_eos"


def test_page_shows_the_model_and_its_defaults(page: Playground) -> None:
    wait_for(lambda: page.texts("#model option") == ["minisgl-demo"], "the model")
    shown = page.find("#parameter-temperature").get_attribute("placeholder")
    assert shown == "0"  # the demo model's default
    assert "4,096" in page.find("#context").text


def test_chat_streams_answers_with_their_figures(page: Playground) -> None:
    assert page.ask("What is 12 + 30?") == "42"
    assert page.ask("Spell the word planet.") == "p-l-a-n-e-t"
    (*_, figures) = page.texts(".stats")
    for unit in ("ms first token", "37 prompt", "cached", "12 output"):
        assert unit in figures
    assert "Answer complete. p-l-a-n-e-t" in page.texts("#announcer")
    page.driver.refresh()
    page.wait_text("#state", "ready")
    assert page.answers() == ["42", "p-l-a-n-e-t"]


def test_conversations_are_kept_apart(page: Playground) -> None:
    page.ask("What is 12 + 30?")
    page.click("#new")
    assert page.answers() == []
    page.ask("Spell the word tea.")
    titles = page.texts("#conversations li > button:first-child")
    assert titles == ["Spell the word tea.", "What is 12 + 30?"]
    page.click("#conversations li:last-child > button:first-child")
    assert page.answers() == ["42"]
    page.click("#conversations li:last-child > button:last-child")
    page.driver.switch_to.alert.accept()
    assert page.answers() == ["t-e-a"]
    assert page.run("return localStorage.length") == 1


def test_stop_ends_the_answer_here_and_on_the_server(
    page: Playground, demo_server: ServerProcess
) -> None:
    page.click(f"#parameter-{ENDLESS}")
    page.send("What is 12 + 30?")
    wait_for(lambda: page.answers() and page.answers()[0], "the first text")
    page.click("#stop")
    page.wait_text(".status", "You stopped this answer.")
    page.click(f"#parameter-{ENDLESS}")
    wait_for(lambda: demo_server.metrics()["requests_running"] == 0, "the abort")
    page.send("What is 12 + 30?")  # The page still works.
    assert page.last_answer() == "42"


def test_conversation_deleted_during_an_answer_stays_deleted(page: Playground) -> None:
    page.click(f"#parameter-{ENDLESS}")
    page.send("What is 12 + 30?")
    wait_for(lambda: page.answers() and page.answers()[0], "the first text")
    page.click("#conversations li > button:last-child")
    page.driver.switch_to.alert.accept()
    wait_for(page.is_idle, "the end of the answer")
    assert page.texts("#conversations li") == []
    names = "return Object.keys(localStorage).filter((name) => name.includes('conversation'))"
    assert page.run(names) == []
    page.click(f"#parameter-{ENDLESS}")


def test_escape_stops_the_answer(page: Playground) -> None:
    page.click(f"#parameter-{ENDLESS}")
    page.send("What is 12 + 30?")
    page.find("#prompt").send_keys(Keys.ESCAPE)
    page.wait_text(".status", "You stopped this answer.")


def test_regenerate_replaces_the_answer(page: Playground) -> None:
    page.ask("What is 12 + 30?")
    page.set_parameter("max_tokens", "1")
    page.click(".buttons button", "Regenerate")
    page.wait_text(".status", "The answer ended at the limit of tokens.")
    assert len(page.answers()) == 1


def test_edited_message_replaces_what_followed_it(page: Playground) -> None:
    page.ask("What is 12 + 30?")
    page.ask("Spell the word planet.")
    page.all(".message.user footer button")[0].click()
    page.find(".message.user textarea").send_keys(Keys.CONTROL, "a")
    page.find(".message.user textarea").send_keys("What is 20 + 1?", Keys.ENTER)
    wait_for(lambda: len(page.texts(".message.user")) == 1, "the shorter conversation")
    assert page.last_answer() == "21"
    assert page.texts(".message.user p") == ["What is 20 + 1?"]


def test_request_is_shown_as_curl_python_and_json(page: Playground) -> None:
    page.set("#system", "It's a test: you're \"brief\".")
    page.set_parameter("top_k", "40")
    page.set_parameter("stop", "\\n'\"")
    page.ask("What is 12 + 30?")
    body = json.loads(page.request("json"))
    assert body["messages"][0] == {"role": "system", "content": "It's a test: you're \"brief\"."}
    assert (body["top_k"], body["stop"], body["stream"]) == (40, ["\\n'\""], True)
    words = shlex.split(page.request("curl"))
    assert words[2] == f"{page.url}/v1/chat/completions"
    assert json.loads(words[words.index("-d") + 1]) == body
    command = [sys.executable, "-c", page.request("python")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == page.answers()[0]


def test_wrong_parameter_is_named_and_keeps_the_message(page: Playground) -> None:
    page.expected_error = "400"
    page.set_parameter("logit_bias", "{")
    page.send("Hello")
    page.wait_text("#notice-text", "Logit bias: ")
    assert page.find("#prompt").get_attribute("value") == "Hello"
    page.set_parameter("logit_bias", '{"1": 1000}')
    page.find("#prompt").send_keys(Keys.ENTER)
    page.wait_text(".status.error", "logit_bias")


def test_tool_calls_take_results(page: Playground) -> None:
    page.set_parameter("tools", json.dumps([{"type": "function", "function": TOOL}]))
    page.ask("What is 4821 times 377?")
    assert "4821 * 377" in page.texts(".calls")[0]
    page.find(".results textarea").send_keys(str(4821 * 377))
    page.click(".results button")
    wait_for(lambda: len(page.answers()) == 2, "the second answer")
    assert page.last_answer() == "The result is 1817517."


def test_schema_bounds_the_answer(page: Playground) -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    page.set_parameter("schema", json.dumps({**schema, "additionalProperties": False}))
    question = "Mira is 31 years old. Write this as JSON with the keys name and age."
    assert json.loads(page.ask(question)) == {"name": "Mira", "age": 31}


def test_text_files_are_attached_and_others_refused(page: Playground, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a ``` fence and <b>tags</b>")
    (tmp_path / "photo.bin").write_bytes(b"\x89PNG\xff")
    page.find("#file").send_keys(f"{tmp_path / 'notes.md'}\n{tmp_path / 'photo.bin'}")
    page.wait_text("#notice-text", "photo.bin cannot be attached: it is neither a UTF-8 text")
    page.wait_text("#files li", "notes.md, 27 characters")
    page.ask("Read this.")
    sent = json.loads(page.request("json"))["messages"][-1]["content"]
    assert sent == "Read this.\n\nnotes.md:\n````\na ``` fence and <b>tags</b>\n````"


def test_tokens_are_coloured_and_show_their_alternatives(page: Playground) -> None:
    page.click("#to-tokens")
    page.set("#tokens-prompt", "What is 12 + 30?")
    page.click("#tokens-run")
    page.wait_text("#tokens-facts", "perplexity")
    tokens = page.all("#tokens-result .token")
    assert "".join(token.text for token in tokens).startswith("What is 12 + 30?")
    assert "first" in (tokens[0].get_attribute("class") or "")
    assert any("p5" in (token.get_attribute("class") or "") for token in tokens)
    ActionChains(page.driver).move_to_element(tokens[3]).perform()
    wait_for(lambda: len(page.all("#alternatives tr")) >= 5, "the alternatives")
    assert "%" in page.find("#alternatives").text
    tokens[0].click()
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    assert page.run("return document.activeElement.dataset.index") == "1"
    assert page.find("#alternatives").is_displayed()


def test_tokenizer_converts_text_to_ids_and_back(page: Playground) -> None:
    page.click("#to-tokens")
    text = "naïve 12\n€ <b>"
    page.run("document.getElementById('tokenize-text').value = arguments[0]", text)
    page.click("#tokenize button")
    page.wait_text("#tokenize-facts", "tokens, 14 characters")
    ids = [int(one) for one in page.texts("#tokenize-result small")]
    asked = httpx.post(f"{page.url}/tokenize", json={"prompt": text}).json()
    assert ids == asked["tokens"]
    assert {"<c3>", "\u21b5\n"} <= set(page.texts("#tokenize-result span"))
    page.click("#detokenize button")
    page.wait_text("#detokenize-result", text)


def test_engine_view_plots_the_load(page: Playground, demo_server: ServerProcess) -> None:
    page.click("#to-engine")
    completions = demo_server.client().completions
    body = {"model": "minisgl-demo", "prompt": "a", "max_tokens": 4000, "temperature": 1}
    streams = [
        completions.create(**body, stream=True, extra_body={"ignore_eos": True}) for _ in range(2)
    ]
    page.wait_text("[data-plot='Requests'] dd", "2")
    lines = """return [...document.querySelectorAll("figure")]
        .filter((f) => ![...f.querySelectorAll("path")].some((p) => p.getAttribute("d")))
        .map((f) => f.dataset.plot)"""
    wait_for(lambda: page.run(lines) == [], lambda: f"lines in the plots: {page.run(lines)}")
    decode = "[data-plot='Step time'] .line2 dd"
    wait_for(lambda: " ms" in page.texts(decode)[0], lambda: f"step time: {page.texts(decode)}")
    output = "[data-plot='Output'] dd"
    wait_for(lambda: page.texts(output)[0] != "0", "output tokens per second")
    for stream in streams:
        stream.close()
    page.wait_text("[data-plot='Requests'] dd", "0")


def test_chat_works_where_a_proxy_hides_the_metrics(page: Playground) -> None:
    page.expected_error = "ERR_BLOCKED_BY_CLIENT"
    page.driver.execute_cdp_cmd("Network.enable", {})
    hidden = {"urlPattern": "*://*:*/metrics", "block": True}
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urlPatterns": [hidden]})
    try:
        page.driver.refresh()
        page.wait_text("#state", "unknown")
        wait_for(lambda: page.texts("#model option"), "the models")
        assert page.ask("What is 12 + 30?") == "42"
    finally:
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urlPatterns": []})


def test_every_view_fits_a_phone_in_the_dark(page: Playground) -> None:
    page.ask("What is 12 + 30?")
    page.size(390, 844, scale=2, mobile=True)
    page.media("dark")
    page.driver.refresh()
    page.wait_text("#state", "ready")
    back = page.run("return getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", back)[:3]) < 64
    assert page.find("#prompt").is_displayed()
    for panel in ("conversations", "settings"):
        page.click(f"#show-{panel}")
        assert_fits(page)
        page.click(f"#show-{panel}")
    for view in ("tokens", "engine"):
        page.click(f"#to-{view}")
        assert_fits(page)


def assert_fits(page: Playground) -> None:
    """Nothing is wider than the page, so the page does not scroll sideways."""
    wide = """return [...document.querySelectorAll("main *")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
        .filter((e) => !e.closest(".unseen, pre"))
        .map((e) => e.outerHTML.slice(0, 80))"""
    assert page.run(wide) == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_every_control_has_a_name_and_can_be_reached(page: Playground) -> None:
    page.ask("What is 12 + 30?")
    for view in ("chat", "tokens", "engine"):
        page.click(f"#to-{view}")
        tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        roles = {"button", "textbox", "combobox", "checkbox", "spinbutton", "link", "listbox"}
        controls = [one for one in tree if one["role"]["value"] in roles and not one["ignored"]]
        assert controls
        assert [one for one in controls if not one["name"]["value"]] == []
    page.click("#to-chat")
    reached = set()
    for _ in range(60):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        reached.add(page.run("const e = document.activeElement; return e.id || e.innerText"))
    wanted = {"to-tokens", "model", "new", "prompt", "send", "parameter-temperature", "Regenerate"}
    assert wanted - reached == set()
