"""TextTokenizer: loading a folder, BOS exactly once, and the limits of templates.

The W-numbers are rows of docs/bugs.md.
"""

import array
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from tokenizers import processors

from minisgl.core import ConfigError
from minisgl.message.messages import DecodeIds, TokenizeChat, TokenizeText
from minisgl.tokenizer.prefixes import MIN_FIRST_CHARS
from minisgl.tokenizer.renderer import TemplateError, TemplateRenderer
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.worker import tokenize
from tests.unit.tokenizer.conftest import byte_level

CHAT = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, TEMPLATE)
    return tmp_path


def write_config(folder: Path, template: object) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<bos>"},
        "eos_token": "<eos>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("spelled", ["", "<bos>"], ids=["plain", "spelled out"])
def test_text_has_bos_exactly_once(folder: Path, spelled: str) -> None:
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode_text(spelled + "hello")
    assert tokenizer.vocabulary.decode(ids, skip_special=False) == "<bos>hello"


def test_chat_has_bos_exactly_once(folder: Path) -> None:
    """The template writes BOS, and encoding with special tokens wrote a second one."""
    tokenizer = TextTokenizer(folder)
    assert tokenizer.vocabulary.decode(tokenizer.encode_chat(CHAT), False) == "<bos>[user]hello"


def test_template_file_has_precedence_over_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file")
    assert TextTokenizer(folder).render_chat(CHAT) == "file"


def test_named_templates_use_the_default_one(folder: Path) -> None:
    write_config(folder, [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}])
    assert TextTokenizer(folder).render_chat(CHAT) == "d"


def test_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer; expected tokenizer\.json or one of"):
        TextTokenizer(tmp_path)


def test_corrupt_tokenizer_json_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        TextTokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{{ messages[7].content + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failing_template_is_an_error_of_this_chat_alone(folder: Path, template: str) -> None:
    """A template error killed the tokenizer process, and every later request hung."""
    write_config(folder, template)
    tokenizer = TextTokenizer(folder)
    with pytest.raises(TemplateError):
        tokenizer.render_chat(CHAT)
    chat = TokenizeChat(uid=1, messages_json=json.dumps(CHAT).encode())
    answer = tokenize(tokenizer, chat)
    assert answer.error
    assert not answer.internal
    good = tokenize(tokenizer, TokenizeText(uid=2, text="hello"))
    assert good.token_ids


# Each template computes for hours, or takes gigabytes, in one operation. `n` is not defined while
# the template loads, so that Jinja does not compute a constant.
CUBES = "[[[0] * n] * n] * n == [[[0.0] * n] * n] * n"  # equal, by n ** 3 comparisons
ENDLESS = {
    "loops": "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}",
    "power": "{% if n ** (n ** n) %}{% endif %}",
    "comparison": "{{ " + CUBES + " }}",
}
LARGE = {
    "text": "{{ 'a' * n ** 3 }}",
    "filter": "{{ 'a' | center(n ** 3) }}",
    "list": "{% set x = [0] * n ** 3 %}",
}
LIMITS = [(text, "ran longer than 0.1 s", "template_timeout_s") for text in ENDLESS.values()]
LIMITS += [(text, "took more than 512 MiB of memory", None) for text in LARGE.values()]


@pytest.mark.parametrize(("template", "error", "limit"), LIMITS, ids=[*ENDLESS, *LARGE])
def test_template_over_a_limit_ends_its_request_alone(
    folder: Path, template: str, error: str, limit: str | None
) -> None:
    """Regression: one comparison of lists held the process, and its timer never fired."""
    write_config(folder, "{% if n is defined %}" + template + "{% endif %}" + TEMPLATE)
    tokenizer = TextTokenizer(folder, template_timeout_s=0.1)
    chat = TokenizeChat(uid=1, messages_json=json.dumps(CHAT).encode())
    hostile = msgspec.structs.replace(chat, template_kwargs_json=b'{"n": 9999}')
    answer = tokenize(tokenizer, hostile)
    assert error in str(answer.error)
    assert (answer.limit, answer.internal) == (limit, False)
    assert tokenize(tokenizer, chat).error is None
    tokenizer.close()


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 9 ** (9 ** 9) }}", "ran longer than 0.1 s"),
        ("{{ " + CUBES.replace("n", "9999") + " }}", "ran longer than 0.1 s"),
        ("{{ 10 ** 5000 }}", "ValueError"),
        ("{{ " + "(" * 5000, "RecursionError"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_template_that_cannot_be_loaded_is_an_error_of_the_start(
    folder: Path, template: str, error: str
) -> None:
    """Regression: Jinja computes constants while it loads a template, and the start hung."""
    write_config(folder, template)
    with pytest.raises(ConfigError, match="has a broken chat template") as caught:
        TextTokenizer(folder, template_timeout_s=0.1)
    assert error in str(caught.value)
    assert str(folder) in str(caught.value)


def test_death_of_the_process_is_an_error_of_one_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: TemplateRenderer, messages: Any, options: Any) -> str:
        if options.get("n"):
            os.kill(os.getpid(), signal.SIGKILL)
        return "hello"

    monkeypatch.setattr(TemplateRenderer, "render", killed)
    tokenizer = TextTokenizer(folder)
    chat = TokenizeChat(uid=1, messages_json=json.dumps(CHAT).encode())
    answer = tokenize(tokenizer, msgspec.structs.replace(chat, template_kwargs_json=b'{"n": 1}'))
    assert answer.internal, "the client may send the request again"
    assert tokenize(tokenizer, chat).error is None
    tokenizer.close()


def test_output_of_a_template_is_capped(folder: Path) -> None:
    write_config(folder, "{% for a in range(9999) %}xxxxxxxxxx{% endfor %}")
    tokenizer = TextTokenizer(folder, max_template_chars=1000)
    with pytest.raises(TemplateError, match="more than 1000"):
        tokenizer.render_chat(CHAT)


def test_chat_for_a_model_without_template_is_an_error(folder: Path) -> None:
    write_config(folder, None)
    with pytest.raises(TemplateError, match="no chat template"):
        TextTokenizer(folder).encode_chat(CHAT)


def test_worker_survives_messages_that_are_no_chat(folder: Path) -> None:
    answer = tokenize(TextTokenizer(folder), TokenizeChat(uid=1, messages_json=b"nope"))
    assert answer.internal


def test_worker_decodes_ids(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    ids = array.array("i", tokenizer.encode_text("hello")).tobytes()
    answer = tokenize(tokenizer, DecodeIds(uid=1, token_ids=ids))
    assert getattr(answer, "text", None) == "hello"


def test_worker_decodes_each_id_by_itself(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    ids = tokenizer.encode_text("hello you")
    request = DecodeIds(uid=1, token_ids=array.array("i", ids).tobytes(), each=True)
    pieces = tokenize(tokenizer, request).pieces
    assert len(pieces) == len(ids) > 1
    assert b"".join(pieces) == b"hello you"


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{{ messages | tojson }}",
        "{%- for m in messages -%}\n  {%- if loop.first %}{% continue %}{% endif %}x{%- endfor -%}",
        "{% generation %}a{{ messages[0]['content'] }}{% endgeneration %}",
        "{% if enable_thinking is defined %}t{% else %}{{ eos_token }}{% endif %}",
    ],
)
def test_rendering_and_ids_equal_transformers(folder: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    write_config(folder, template)
    ours, theirs = TextTokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    chat = [{"role": "user", "content": "<é> & 'quoted'"}]
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(chat) == expected
    theirs_ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(chat) == theirs_ids


CONTINUED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>\n{% endfor %}"


@pytest.mark.parametrize("escapes", [False, True])
def test_the_final_message_is_continued(folder: Path, escapes: bool) -> None:
    write_config(folder, CONTINUED + "{% if add_generation_prompt %}<assistant>{% endif %}")
    tokenizer = TextTokenizer(folder, escape_special_tokens=escapes)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for begun in ("Well,", "Well, ", "hello", "</end>\n<user>", "<bos", "é"):
        chat = [*CHAT, {"role": "assistant", "content": begun}]
        ids = tokenizer.encode_chat(chat, options)
        assert tokenizer.vocabulary.decode(ids, False) == f"<user>hello</end>\n<assistant>{begun}"


def test_a_template_that_leaves_out_the_final_message_cannot_continue_it(folder: Path) -> None:
    write_config(folder, "{{ messages[0].content }}")
    chat = [*CHAT, {"role": "assistant", "content": "Well,"}]
    with pytest.raises(TemplateError, match="leaves out the last message"):
        TextTokenizer(folder).render_chat(chat, {"continue_final_message": True})


def test_template_of_the_info_needs_the_messages_only() -> None:
    """Clients such as lm-eval render it in strict mode, without the variables of Transformers."""
    source = "{{ bos_token }}{% if tools %}tools{% endif %}{{ messages[0].content }}"
    ours = ChatTemplate(source, {"bos_token": '<s>"'}, math.inf)
    strict = jinja2.Environment(undefined=jinja2.StrictUndefined)
    chat = [{"role": "user", "content": "hi"}]
    rendered = strict.from_string(ours.standalone).render(messages=chat)
    assert rendered == ours.render(chat, {}) == '<s>"hi'


PROMPT = "{% if add_generation_prompt %}<user>answer:{% endif %}"


@pytest.mark.parametrize("escapes", [False, True])
def test_worker_reports_where_other_chats_may_leave_a_chat(folder: Path, escapes: bool) -> None:
    write_config(folder, TEMPLATE + PROMPT)
    tokenizer = TextTokenizer(folder, escape_special_tokens=escapes)
    system = {"role": "system", "content": "s" * MIN_FIRST_CHARS}
    for chat in (CHAT, [system, *CHAT], [system, *CHAT, *CHAT]):
        message = TokenizeChat(messages_json=json.dumps(chat).encode())
        found = tokenize(tokenizer, message)
        ids = array.array("i", found.token_ids).tolist()
        stable = tokenizer.vocabulary.decode(ids[: found.prefixes[0]], False)
        assert stable == tokenizer.render_chat(chat, {"add_generation_prompt": False})
        first = tokenizer.vocabulary.decode(ids[: found.prefixes[1]], False)
        assert first == ("" if chat == CHAT else f"<bos>[system]{system['content']}[user]")


def test_a_chat_without_a_generation_prompt_has_no_known_prefixes(folder: Path) -> None:
    message = TokenizeChat(messages_json=json.dumps(CHAT).encode())
    found = tokenize(TextTokenizer(folder), message)
    assert found.prefixes == (0, 0)
