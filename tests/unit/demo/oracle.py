"""Right answers computed from the text of a prompt, independently of the generators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from demo.sample import Sample

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
}
