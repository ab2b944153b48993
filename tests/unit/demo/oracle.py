"""Right answers computed from the text of a prompt, independently of the generators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from demo.sample import Call, Exchange, Sample
from demo.tasks.tools import NO_TOOL

_OPERATORS = (
    (r"\+|plus|\badd\b|\bsum\b", lambda a, b: a + b),
    (r"minus|-|difference", lambda a, b: a - b),
    (r"\btake\b|subtract", lambda a, b: b - a),
    (r"times|\*|×| x |multiply|product", lambda a, b: a * b),  # noqa: RUF001
)


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def check_arithmetic(sample: Sample) -> None:
    user = sample.exchanges[-1].user
    a, b = map(int, re.findall(r"\d+", user))
    for pattern, compute in _OPERATORS:
        if re.search(pattern, user, re.IGNORECASE):
            assert sample.answer == str(compute(a, b)), user
            return
    raise AssertionError(f"no operator in {user!r}")


def check_spelling(sample: Sample) -> None:
    letters = sample.answer.split("-")
    assert all(len(letter) == 1 for letter in letters)
    assert "".join(letters) in _words(sample.exchanges[-1].user)


def check_reversing(sample: Sample) -> None:
    assert sample.answer[::-1] in _words(sample.exchanges[-1].user)


def check_sorting(sample: Sample) -> None:
    user, items = sample.exchanges[-1].user, sample.answer.split(", ")
    down = re.search(r"Z to A|reverse|descending|largest to|high to", user, re.IGNORECASE)
    values = [int(item) if item.isdigit() else item for item in items]
    assert values == sorted(values, reverse=bool(down)), user
    asked = re.findall(r"\d+|[A-Za-z]+", user)
    assert 3 <= len(set(items)) == len(items)
    assert all(asked.count(item) >= 1 for item in items), user
    if items[0].isdigit():
        assert sorted(items) == sorted(re.findall(r"\d+", user))


def check_counting(sample: Sample) -> None:
    user, answer = sample.exchanges[-1].user, int(sample.answer)
    low = user.lower()
    one = re.search(r"letter ([a-z])\b|does ([a-z]) occur|many ([a-z])'s", low)
    quoted = re.search(r"(?:in|word) [\"']?([a-z]+)[\"']?[?.]?$", low)
    if one:
        assert quoted, user
        assert answer == quoted[1].count(next(filter(None, one.groups()))), user
    elif re.search(r"^(how many letters|count the letters|how long)", low):
        assert answer == len(_words(low.replace(" have?", ""))[-1]), user
    elif which := re.search(r"does (?:the word )?(\w+) (?:appear|occur)|count the word (\w+)", low):
        word = next(filter(None, which.groups()))
        assert answer == _words(low).count(word) - 1, user
    elif which := re.search(r'times is "(\w+)"', low):
        assert answer == _words(low).count(which[1]) - 1, user
    else:
        listed = re.search(r"(?:[:]|here\?|i have) ?(.*?)(?:[?.] how many.*|[?.])?$", low)
        assert listed, user
        assert answer == len([w for w in _words(listed[1]) if w != "and"]), user


_NOT_NAMES = frozenset({"Answer", "In", "Now", "Question", "What", "Where", "Which"})


def check_lookup(sample: Sample) -> None:
    facts = [line for line in sample.exchanges[0].user.splitlines() if "?" not in line]
    for exchange in sample.exchanges:
        (question,) = (line for line in exchange.user.splitlines() if "?" in line)
        (name,) = set(re.findall(r"\b[A-Z][a-z]+", question)) - _NOT_NAMES
        (fact,) = (line for line in facts if name in _words(line))
        assert re.search(rf"\b{exchange.assistant}\.?$", fact), exchange


def check_json(sample: Sample) -> None:
    user, record = sample.exchanges[-1].user, json.loads(sample.answer)
    assert 3 <= len(record) <= 4
    for key, value in record.items():
        assert key in user
        if isinstance(value, bool):
            assert re.search(r"true|in stock\b" if value else r"false|sold out", user)
        else:
            assert re.search(rf"\b{value}\b", user), user
    named = user if "{" not in user else user[user.index("{") : user.index("}")]
    if "{" in user:
        assert list(record) == sorted(record, key=lambda key: named.index(f'"{key}"'))


def check_conversation(sample: Sample) -> None:
    told, asked, answer = sample.exchanges[0], sample.exchanges[-1].user, sample.answer
    if answer.startswith(("Your ", "You live in ")):
        value = re.findall(r"\w+", answer)[-1]
        assert re.search(rf"\b{value}\b", told.user)
    elif asked.startswith(("Add", "Subtract")):
        start, step = (int(re.findall(r"\d+", text)[0]) for text in (told.user, asked))
        assert int(answer) == (start + step if asked.startswith("Add") else start - step)
    elif "number" in asked:
        assert re.findall(r"\d+", told.user) == [answer]
    elif re.search(r"reverse|backwards", asked):
        assert answer[::-1] == told.assistant.replace("-", "")
    else:
        items = told.assistant.split(", ")
        expected = {"And": ", ".join(items[::-1]), "Which one comes": items[0]}
        expected["Which one is"] = items[-1]
        assert answer == next(v for k, v in expected.items() if asked.startswith(k))


def check_greeting(sample: Sample) -> None:
    user, answer = sample.exchanges[-1].user.lower(), sample.answer
    expected = {
        "Good morning!": r"^good morning",
        "Good afternoon!": r"^good afternoon",
        "Good evening!": r"^good evening",
        "Hello!": r"^(hi|hello|hey|howdy|greetings|good day)",
        "You are welcome!": r"^(thank|many thanks|cheers)",
        "Goodbye!": r"bye|see you|good night|farewell",
        "I can ": r"can|able|know|skills|tasks|good at|abilities",
        "I am ": r"who|what|model|introduce",
        "Sorry": r".",
    }
    pattern = next(p for start, p in expected.items() if answer.startswith(start))
    assert re.search(pattern, user), sample


_JSON_TYPES = {"string": str, "integer": int, "number": int, "boolean": bool}


def _check_call(sample: Sample, user: str, call: Call) -> None:
    """The call obeys a schema of the list, and each of its values stands in the question."""
    (tool,) = (tool for tool in sample.tools if tool.name == call.name)
    assert list(call.arguments) == list(tool.parameters)
    for key, value in call.arguments.items():
        assert type(value) is _JSON_TYPES[tool.parameters[key]]
        if value is True or value is False:
            assert ("on" if value else "off") in _words(user)
        elif isinstance(value, str) and (sides := re.fullmatch(r"(\d+) ([-+*/]) (\d+)", value)):
            check_operands(user, sides[2], int(sides[1]), int(sides[3]))
        else:
            assert re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", user), sample


def check_operands(user: str, operator: str, a: int, b: int) -> None:
    """One of the sums, differences, products or quotients in the question has these operands."""
    words = {"+": "plus|add|sum", "-": "minus|difference", "*": "times|multiply|product|x|×"}  # noqa: RUF001
    pattern = words.get(operator, "divided?")
    if operator == "-" and re.search(rf"(take|subtract) {b} \w*\s?from {a}", user, re.IGNORECASE):
        return
    if operator == "-" and re.search(rf"take {b} away from {a}\b", user, re.IGNORECASE):
        return
    between = rf"\b{a}\b[^0-9]*\b{b}\b"
    found = re.search(rf"({pattern}|{re.escape(operator)})", user, re.IGNORECASE)
    assert found, user
    assert re.search(between, user), user


def _check_exchange(sample: Sample, exchange: Exchange) -> None:
    for call in exchange.calls:
        _check_call(sample, exchange.user, call)
    assert len(exchange.results) in (0, len(exchange.calls))
    sentences = exchange.assistant
    for result in exchange.results:
        value = json.loads(result) if result[0] in '{"' else result
        if isinstance(value, dict):
            value = next(reversed(value.values()))
        assert f" is {value}." in sentences, exchange
        sentences = sentences.replace(f" is {value}.", "", 1)


def _check_tools(sample: Sample, calls: int, least: int, most: int) -> None:
    names = [tool.name for tool in sample.tools]
    assert least <= len(set(names)) == len(names) <= most
    assert len(sample.exchanges[0].calls) == calls
    for exchange in sample.exchanges:
        _check_exchange(sample, exchange)


def check_tool_call(sample: Sample) -> None:
    _check_tools(sample, calls=1, least=1, most=1)


def check_tool_choice(sample: Sample) -> None:
    _check_tools(sample, calls=1, least=2, most=4)


def check_tool_result(sample: Sample) -> None:
    _check_tools(sample, calls=len(sample.exchanges[0].results), least=1, most=3)
    assert sample.exchanges[0].results


def check_tool_parallel(sample: Sample) -> None:
    _check_tools(sample, calls=2, least=1, most=3)
    first, second = sample.exchanges[0].calls
    assert first != second


_OWN_TASKS: tuple[Callable[[Sample], None], ...] = (
    check_arithmetic, check_spelling, check_reversing, check_sorting, check_counting,
    check_lookup, check_json, check_greeting,
)  # fmt: skip


def _is_right(check: Callable[[Sample], None], sample: Sample) -> bool:
    try:
        check(sample)
    except (AssertionError, ValueError, StopIteration, IndexError):
        return False
    return True


def check_tool_none(sample: Sample) -> None:
    _check_tools(sample, calls=0, least=1, most=4)
    if sample.answer != NO_TOOL:
        assert any(_is_right(check, sample) for check in _OWN_TASKS), sample


CHECKS: dict[str, Callable[[Sample], None]] = {
    "arithmetic": check_arithmetic,
    "spelling": check_spelling,
    "reversing": check_reversing,
    "sorting": check_sorting,
    "counting": check_counting,
    "lookup": check_lookup,
    "json": check_json,
    "conversation": check_conversation,
    "greeting": check_greeting,
    "tool-call": check_tool_call,
    "tool-choice": check_tool_choice,
    "tool-result": check_tool_result,
    "tool-none": check_tool_none,
    "tool-parallel": check_tool_parallel,
}
