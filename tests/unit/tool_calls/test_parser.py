"""The parser of each format: exact calls, nothing lost, the same for every split of the text."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.tool_calls.formats import FORMATS
from tests.examples import examples
from tests.unit.tool_calls.answers import TEXT_FORMATS, cut, parse

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/Place"},
        "free": {},
    },
    "$defs": {"Place": {"type": "object"}},
}
TOOLS = {"weather": CITY, "now": {}}

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Rom"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rom"}, "id": "a"}]',
    "mistral-v11": '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Rom"}',
    "qwen3-coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rom'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rom<|"|>}<tool_call|>',
    "pythonic": "[weather(city='Rom')]",
}
TWO_CALLS = {
    "hermes": ONE_CALL["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": ONE_CALL["llama3"] + '; {"name": "now", "parameters": {}}',
    "mistral": ONE_CALL["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral-v11": ONE_CALL["mistral-v11"] + "[TOOL_CALLS]now[ARGS]{}",
    "qwen3-coder": ONE_CALL["qwen3-coder"] + "\n<tool_call>\n<function=now>\n</function>\n"
    "</tool_call>",
    "glm": ONE_CALL["glm"] + "\n<tool_call>now\n</tool_call>",
    "minimax": ONE_CALL["minimax"].removesuffix("</minimax:tool_call>")
    + '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "gemma4": ONE_CALL["gemma4"] + "<|tool_call>call:now{}<tool_call|>",
    "pythonic": "[weather(city='Rom'), now()]",
}
CALL = ("weather", {"city": "Rom"})
MARKED = [name for name in TEXT_FORMATS if name not in ("llama3", "pythonic")]
every_format = pytest.mark.parametrize("name", TEXT_FORMATS)
every_marked_format = pytest.mark.parametrize("name", MARKED)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            'a:{b:[1,<|"|>x, ]<|"|>,{c:null}],d:true},e:-1.5',
            {"a": {"b": [1, "x, ]", {"c": None}], "d": True}, "e": -1.5},
        ),
        ('a:{"b": ["x<|\\"", None]}', {"a": {"b": ['x<|"', None]}}),
        ('<|"|>a<|"|>:word', {"a": "word"}),
    ],
)
def test_values_of_gemma_4_become_json(arguments: str, expected: dict[str, Any]) -> None:
    answer = parse("gemma4", [f"<|tool_call>call:now{{{arguments}}}<tool_call|>"])
    assert answer.calls == [("now", expected)]


def test_every_format_has_an_example() -> None:
    assert set(TEXT_FORMATS) == set(ONE_CALL) == set(TWO_CALLS)


@every_format
def test_a_call_is_found_without_content(name: str) -> None:
    answer = parse(name, [ONE_CALL[name]], TOOLS)
    assert (answer.calls, answer.content, answer.failures) == ([CALL], "", 0)


@every_format
def test_two_calls_are_found_and_have_different_ids(name: str) -> None:
    answer = parse(name, [TWO_CALLS[name]], TOOLS)
    assert answer.calls == [CALL, ("now", {})]
    assert answer.content == ""
    assert len(set(answer.ids)) == 2


@every_format
@settings(max_examples=examples(45))
@given(st.lists(st.integers(0, 200)))
def test_every_split_gives_the_same_answer(name: str, borders: list[int]) -> None:
    whole = parse(name, [TWO_CALLS[name]], TOOLS)
    pieces = parse(name, cut(TWO_CALLS[name], borders), TOOLS)
    assert (pieces.content, pieces.names) == (whole.content, whole.names)
    assert pieces.arguments == whole.arguments


@every_marked_format
def test_text_before_and_after_calls_is_content_without_the_white_space_between(name: str) -> None:
    answer = parse(name, [f"Let me see.\n\n{TWO_CALLS[name]}\nDone."], TOOLS)
    assert answer.calls == [CALL, ("now", {})]
    assert answer.content == "Let me see.\nDone."


@every_format
def test_an_answer_without_calls_stays_as_it_is(name: str) -> None:
    for text in (
        "",
        "  ",
        "Hello.\n\n",
        " \n{}",
        "[1, 2]",
        '{"name": "Ann"}',
        "a < b [c]",
        "<tool",
    ):
        answer = parse(name, text, TOOLS)
        assert (answer.content, answer.names) == (text, [])


@every_format
def test_ids_have_the_form_that_templates_accept(name: str) -> None:
    (identity,) = parse(name, [ONE_CALL[name]], TOOLS).ids
    if name.startswith("mistral"):
        assert len(identity) == 9
        assert identity.isalnum()
    else:
        assert identity.startswith("call_")


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_without_a_marker_only_a_known_name_is_a_call(name: str) -> None:
    answer = parse(name, [ONE_CALL[name]], {"other": {}})
    assert (answer.content, answer.names, answer.failures) == (ONE_CALL[name], [], 0)


@every_format
def test_a_call_that_the_end_cuts_off_keeps_what_was_read(name: str) -> None:
    text = ONE_CALL[name][: ONE_CALL[name].index("om")]
    answer = parse(name, text, TOOLS)
    assert (answer.content, answer.names) == ("", ["weather"])
    (arguments,) = answer.arguments
    assert json.loads(arguments + 'om"}') == CALL[1]
    assert answer.failures == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:weather{tags:[1, "),
        ("pythonic", "<|python_start|>[weather(tags=[1, "),
    ],
)
def test_a_call_that_the_end_cuts_off_after_a_comma_has_no_content(name: str, text: str) -> None:
    """Regression: the comma became content of the answer."""
    answer = parse(name, [text])
    assert (answer.content, answer.arguments) == ("", ['{"tags": [1, '])


@every_marked_format
def test_a_call_that_ends_before_its_name_is_content(name: str) -> None:
    text = ONE_CALL[name][: ONE_CALL[name].index("ther")]
    answer = parse(name, text, TOOLS)
    assert (answer.content, answer.names) == (text, [])
    assert answer.failures >= 1


def test_a_special_start_counts_only_as_its_token() -> None:
    start, rest = ONE_CALL["mistral-v11"].split("]", 1)
    pieces = [f"{start}]", rest]
    assert parse("mistral-v11", pieces, TOOLS, ["[TOOL_CALLS]"]).calls == [CALL]
    text = ONE_CALL["mistral-v11"]
    assert parse("mistral-v11", [text], TOOLS, ["[TOOL_CALLS]"]).content == text


def test_a_special_start_inside_of_a_call_begins_the_next_call() -> None:
    pieces = ["Hm. ", "[TOOL_CALLS]", "weather", "[TOOL_CALLS]", 'now[ARGS]{"a": 1}']
    answer = parse("mistral-v11", pieces, TOOLS, ["[TOOL_CALLS]"])
    assert answer.calls == [("now", {"a": 1})]
    assert answer.content == "Hm. [TOOL_CALLS]weather"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a":1 ,\n"b":[ ]}}', '{"a":1 ,\n"b":[ ]}'),
        ('{"arguments": {"a": "}"}, "name": "f"}', '{"a": "}"}'),
        ('{"id": "7", "type": 3, "name": "f", "parameters": {}}', "{}"),
        ('{"name": "f"}', "{}"),
        (r'{"name": "f", "arguments": {"a": "\"}\\"}}', r'{"a": "\"}\\"}'),
        ('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
    ],
)
def test_json_arguments_pass_verbatim(text: str, arguments: str) -> None:
    for pieces in ([f"<tool_call>{text}</tool_call>"], f"<tool_call>{text}</tool_call>"):
        answer = parse("hermes", pieces)
        assert (answer.names, answer.arguments, answer.content) == (["f"], [arguments], "")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>{name: 1}</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}</tool_call>',
        "<tool_call><tool_call><tool_call>",
        "</tool_call>",
    ],
)
def test_text_that_is_no_call_comes_back_as_content(text: str) -> None:
    for pieces in ([text], text):
        answer = parse("hermes", pieces)
        assert (answer.content, answer.names) == (text, [])
        assert answer.failures == text.count("<tool_call>")


def test_a_call_behind_a_false_start_is_found() -> None:
    answer = parse("hermes", "<tool_call> or <tool_call>" + ONE_CALL["hermes"])
    assert answer.calls == [CALL]
    assert answer.content == "<tool_call> or <tool_call>"


def test_text_behind_an_unclosed_call_is_content() -> None:
    answer = parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} \n\nDone.')
    assert answer.calls == [("f", {"a": 1})]
    assert answer.content == " \n\nDone."


def xml(key: str, value: str) -> str:
    return (
        f"<tool_call>\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("city", "42", "42"),
        ("city", "\nRom\n\n", "\nRom\n\n"),
        ("city", 'a "b" \\ <c> </parameter> d', 'a "b" \\ <c> </parameter> d'),
        ("city", "</parameter>", "</parameter>"),
        ("city", "</parameter>\n\n", "</parameter>\n\n"),
        ("city", "", ""),
        ("days", "42", 42),
        ("days", "soon", "soon"),
        ("hourly", "True", True),
        ("hourly", "false", False),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("unit", "None", None),
        ("unit", "null", None),
        ("unit", "7", "7"),
        ("where", '{"at": [1]}', {"at": [1]}),
        ("free", "[1", "[1"),
        ("free", "NaN", "NaN"),
        ("unknown", "1.5", 1.5),
    ],
)
def test_xml_values_have_the_type_of_the_schema(key: str, value: str, expected: Any) -> None:
    for pieces in ([xml(key, value)], xml(key, value)):
        answer = parse("qwen3-coder", pieces, TOOLS)
        assert answer.calls == [("weather", {key: expected})]
        assert answer.content == ""


def test_an_xml_call_without_the_outer_tag_is_a_call() -> None:
    text = ONE_CALL["qwen3-coder"].removeprefix("<tool_call>\n")
    assert parse("qwen3-coder", text, TOOLS).calls == [CALL]


def test_a_call_of_glm_needs_no_line_breaks_and_keeps_those_of_its_values() -> None:
    key, value = "<arg_key>city</arg_key>", "<arg_value>\nR</arg_value>om\n</arg_value>"
    text = f"<tool_call>weather{key}{value}</tool_call>"
    for pieces in ([text], text):
        answer = parse("glm", pieces, TOOLS)
        assert answer.calls == [("weather", {"city": "\nR</arg_value>om\n"})]
        assert answer.content == ""


def test_an_xml_call_whose_last_tags_are_missing_is_a_call() -> None:
    text = ONE_CALL["qwen3-coder"].removesuffix("\n</function>\n</tool_call>")
    answer = parse("qwen3-coder", text, TOOLS)
    assert (answer.calls, answer.content) == ([CALL], "")


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("'it''s'", None),
        (r"'it\'s'", "it's"),
        ('"it\'s"', "it's"),
        (r"'\x41\u0042\U00000043\n\q\/'", "ABC\n\\q/"),
        (r"'\ud83d\ude00'", "😀"),
        ("1.5", 1.5),
        ("-3e2", -300.0),
        ("True", True),
        ("false", False),
        ("None", None),
        ("[1, 'a', None,]", [1, "a", None]),
        ("(1, (2,))", [1, [2]]),
        ("{'a': [True, {}], \"b\": ()}", {"a": [True, {}], "b": []}),
        ("Paris", "Paris"),
        ("007", "007"),
    ],
)
def test_python_literals_become_json(literal: str, expected: Any) -> None:
    text = f"[weather(x={literal}, y=1)]"
    if expected is None and literal != "None":
        assert parse("pythonic", text, TOOLS).failures == 1
        return
    for pieces in ([text], text):
        assert parse("pythonic", pieces, TOOLS).calls == [("weather", {"x": expected, "y": 1})]


def test_python_calls_between_markers_are_found() -> None:
    lfm = "<|tool_call_start|>[now()]<|tool_call_end|>Wait."
    assert parse("pythonic", lfm).calls == [("now", {})]
    assert parse("pythonic", lfm).content == "Wait."
    olmo = "<function_calls>\nweather(city='Rom')\nnow()\n</function_calls>"
    assert parse("pythonic", olmo).calls == [CALL, ("now", {})]


FRAGMENTS = st.sampled_from(
    [marker for format in FORMATS.values() for marker in format.markers]
    + ["<function=", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n", " "]
    + ['{"name": "weather", ', '"arguments": ', '"parameters": ', '{"a": "', '"}', "}", "]", "["]
    + ["weather(", "a='", "')", "\\", '"', "'", ",", ";", ":", "[ARGS]", "{", "text", "é", "now"]
)


@every_format
@settings(max_examples=examples(45))
@given(st.lists(FRAGMENTS, max_size=40), st.lists(st.integers(0, 300)))
@example(["<tool_call>"] * 3, [])
def test_hostile_text_is_never_lost_and_its_split_does_not_matter(
    name: str, fragments: list[str], borders: list[int]
) -> None:
    """Letters that the model wrote are in the content, in a name, or in arguments."""
    text = "".join(fragments)
    whole = parse(name, [text], TOOLS)
    pieces = parse(name, cut(text, borders), TOOLS)
    assert (pieces.content, pieces.names) == (whole.content, whole.names)
    assert pieces.arguments == whole.arguments
    if not whole.names:
        assert whole.content == text
    assert whole.everything.count("text") == fragments.count("text")


@every_format
def test_long_arguments_are_read_in_linear_time(name: str) -> None:
    """One megabyte in pieces of 16 characters. Quadratic work would exceed the time limit."""
    head, tail = ONE_CALL[name].split("Rom")
    value = "lorem ipsum <a> {b} [c] " * 45_000
    text = head + value + tail
    answer = parse(name, cut(text, range(0, len(text), 16)), TOOLS)
    assert answer.calls == [("weather", {"city": value})]


@every_format
@pytest.mark.parametrize("unit", ["<tool_call>", "\n", "[TOOL_CALLS]", '<tool_call>{"a":"', "[f(("])
@pytest.mark.parametrize("size", [8, 10**7])
def test_long_hostile_text_is_read_in_linear_time(name: str, unit: str, size: int) -> None:
    text = unit * (200_000 // len(unit))
    answer = parse(name, cut(text, range(0, len(text), size)), TOOLS)
    assert (answer.content, answer.names) == (text, [])
