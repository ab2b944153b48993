"""The playground of a server with a key, hostile texts, and the states of a server.

The stub scheduler answers, so that the test chooses the text of the model.
"""

import signal
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import KEY
from tests.browser.injections import INJECTIONS
from tests.browser.page import Playground
from tests.process.harness import run_server, wait_for

pytestmark = [pytest.mark.process, pytest.mark.slow]

# The page makes none of these elements or attributes.
FORBIDDEN = (
    "main :is(script, img, iframe, object, embed, style, link, base, meta, video, audio, marquee), "
    "main .message :is(svg, math, form, input, style), "
    "main :is([onload], [onerror], [onclick], [onmouseover], [onfocus], [srcdoc])"
)


def give_key(page: Playground, key: str) -> None:
    wait_for(lambda: page.find("#key-dialog").is_displayed(), "the question for the key")
    page.find("#key").send_keys(Keys.CONTROL, "a")
    page.find("#key").send_keys(key, Keys.ENTER)


def test_key_is_asked_for_and_kept_in_memory_only(keyed_page: Playground) -> None:
    page = keyed_page
    give_key(page, "wrong")
    page.wait_text("#key-message", "The server does not know this key.")
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert page.ask("hello") == "Hi."
    for store in ("localStorage", "sessionStorage", "document.cookie"):
        assert KEY not in page.run(f"return JSON.stringify({store})")
    for form in ("curl", "python", "json"):
        assert KEY not in page.request(form)
    assert "$MINISGL_API_KEY" in page.request("curl")
    assert KEY not in page.run("return document.documentElement.outerHTML")
    assert page.find("#key").get_attribute("value") == ""
    page.driver.refresh()
    wait_for(lambda: page.find("#key-dialog").is_displayed(), "the question after a reload")


def test_declined_key_is_reported_and_can_be_given_later(keyed_page: Playground) -> None:
    page = keyed_page
    wait_for(lambda: page.find("#key-dialog").is_displayed(), "the question for the key")
    page.find("#key").send_keys(Keys.ESCAPE)
    page.wait_text("#notice-text", "The server needs an API key.")
    page.click("#key-button")
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert not page.find("#notice").is_displayed()


def test_reasoning_is_folded(keyed_page: Playground) -> None:
    page = keyed_page
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert page.ask("hello") == "Hi."
    assert page.texts(".reasoning pre") == ["A greeting."]
    assert page.find(".reasoning").get_attribute("open") is None
    page.click(".reasoning summary")
    assert page.find(".reasoning pre").is_displayed()


def test_hostile_texts_are_shown_and_do_not_run(keyed_page: Playground) -> None:
    """As messages of a stored conversation, as a message of the reader, and as an answer."""
    page = keyed_page
    assert len(set(INJECTIONS)) == 40
    answers = [
        {"role": "assistant", "content": text, "reasoning": text, "error": text}
        | {"calls": [{"id": "1", "name": text, "arguments": text}]}
        for text in INJECTIONS
    ]
    users = [
        {"role": "user", "content": text, "files": [{"name": text, "text": text}]}
        for text in INJECTIONS
    ]
    hostile = {"changed": 1, "system": INJECTIONS[0], "messages": [*users, *answers]}
    titles = [{"changed": 0, "messages": [user]} for user in users]
    page.open(conversations=[hostile, *titles, {"messages": 7}, {"messages": [7, {"role": "x"}]}])
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert page.texts(".message.user p.plain") == list(INJECTIONS)
    assert page.texts(".reasoning pre") == list(INJECTIONS)
    assert_nothing_ran(page)
    page.click("#new")
    answer = page.ask("attack\n" + INJECTIONS[0])
    assert "<script>window.injected=1</script>" in answer
    assert "attacker.example/pixel.png" in answer
    assert_nothing_ran(page)


def assert_nothing_ran(page: Playground) -> None:
    """The texts made no element that runs or loads something, and only links to web addresses."""
    assert page.run("return document.querySelectorAll(arguments[0]).length", FORBIDDEN) == 0
    links = page.run("return [...document.querySelectorAll('main a')].map((a) => [a.href, a.rel])")
    assert links
    assert {rel for _, rel in links} == {"noopener noreferrer nofollow"}
    assert [href for href, _ in links if not href.startswith(("https://", "http://"))] == []
    page.run("document.querySelectorAll('main details').forEach((e) => (e.open = true))")
    assert page.run("return window.injected") is None


def test_markdown_becomes_elements(keyed_page: Playground) -> None:
    page = keyed_page
    text = """# Head
*em* **strong** ~~del~~ `code &amp;` &lt;b&gt; &#65; [link](https://a.example/?x=1&y=2)

3. three
   - [x] done

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<b>")
```
"""
    page.open(conversations=[{"messages": [{"role": "assistant", "content": text}]}])
    give_key(page, KEY)
    found = {
        "h3": "Head",
        "em": "em",
        "strong": "strong",
        "del": "del",
        "p code": "code &amp;",
        "a": "link",
        'ol[start="3"] > li > ul > li': "\u2611 done",
        "blockquote": "quoted",
        "th.right": "b",
        "td.right": "2",
        "pre code": 'print("<b>")',
    }
    shown = {name: "".join(page.texts(f".markdown {name}")).strip() for name in found}
    assert shown == found
    assert " <b> A " in page.texts(".markdown p")[0]


def test_texts_that_are_hard_to_parse_do_not_block_the_page(keyed_page: Playground) -> None:
    page = keyed_page
    nested = ["> " * 3000, "- " * 3000, "*" * 20000, "[" * 20000, "![a](" * 4000, "`" * 20000]
    long = ["<" * 20000, "a\n\n" * 5000, "|" * 20000 + "\n" + "|-" * 10000, "x" * 300_000]
    messages = [{"role": "assistant", "content": text} for text in nested + long]
    page.open(conversations=[{"messages": messages}])
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert len(page.answers()) == len(messages)
    assert page.answers()[-1] == "x" * 300_000


def test_text_that_takes_the_lexer_too_long_is_shown_as_it_is(keyed_page: Playground) -> None:
    """Regression: 20 KB of "_a" held the page for 3 s. Ten times as much would take minutes."""
    page = keyed_page
    texts = ["_a" * 95_000, "*fast*"]
    messages = [{"role": "assistant", "content": text} for text in texts]
    page.open(conversations=[{"messages": messages}])
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert page.texts(".markdown > pre") == texts[:1]
    assert page.texts(".markdown em") == ["fast"]


def test_storage_of_another_form_does_not_break_the_page(keyed_page: Playground) -> None:
    page = keyed_page
    page.run("localStorage.setItem('minisgl.conversation.x', '{')")
    page.run("localStorage.setItem('minisgl.parameters', '[1')")
    page.driver.refresh()
    give_key(page, KEY)
    wait_for(lambda: page.texts("#model option"), "the models")
    assert page.ask("hello") == "Hi."


def test_loading_is_shown(driver: webdriver.Chrome, thinking_model: Path) -> None:
    with run_server("--model", str(thinking_model), stub="loading") as server:
        page = Playground(driver, server.url)
        page.open("#engine", state="loading")
        page.wait_text("#engine-state", "The server loads the model.")
        page.check_clean()


def test_draining_and_the_end_of_the_server_are_shown(
    driver: webdriver.Chrome, thinking_model: Path
) -> None:
    flags = ["--model", str(thinking_model), "--drain-grace", "0"]
    with run_server(*flags, stub="echo") as server:
        server.wait_ready()
        page = Playground(driver, server.url)
        page.open("#engine")
        name = server.client().models.list().data[0].id
        stream = server.client().completions.create(
            model=name, prompt="a", max_tokens=2000, stream=True
        )
        page.wait_text("[data-plot='Requests'] dd", "1")
        server.signal(signal.SIGTERM)
        page.wait_text("#state", "draining")
        page.wait_text("#engine-state", "The server drains")
        page.expected_error = "ERR_"  # The page asks on after the server has ended.
        server.process.kill()
        page.wait_text("#state", "unknown")
        stream.close()
        page.check_clean()


@pytest.mark.parametrize("view", ["", "#tokens"])
def test_an_answer_whose_connection_is_lost_is_shown_as_an_error(
    driver: webdriver.Chrome, thinking_model: Path, view: str
) -> None:
    with run_server("--model", str(thinking_model), stub="echo") as server:
        server.wait_ready()
        page = Playground(driver, server.url)
        page.open(view)
        page.expected_error = "ERR_"
        if view:
            page.set("#tokens-max", "2000")
            page.set("#tokens-prompt", "a")
            page.click("#tokens-run")
            wait_for(lambda: page.texts("#tokens-result .token"), "the first token")
        else:
            page.send("a")
            wait_for(lambda: page.answers() and page.answers()[0], "the first text")
        server.process.kill()
        where = "#notice-text" if view else ".status"
        page.wait_text(where, "The connection ended before the answer was complete.")
        page.check_clean()
