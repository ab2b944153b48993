"""Draws random tools, questions for them, results, and sentences that report the results."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

from demo.sample import Call, Draw, Exchange, Tool, Value
from demo.split import is_held_out, split_key
from demo.tasks.numbers import operand_key, pair_is_held_out
from demo.tasks.toolbox import (
    ANY_TOPIC,
    EXPRESSION,
    KINDS,
    LOOKUP,
    OPERATION_PHRASES,
    PAIR,
    PAIR_DESCRIPTIONS,
    PAIR_NAMES,
    Kind,
    Slot,
    operand_slots,
)

_PREFIXES = ("", "", "", "", "do_", "run_", "my_", "the_", "tool_", "api_", "use_", "ask_")
_SUFFIXES = ("", "", "", "", "_tool", "_api", "_call", "_fn", "_now", "_service", "_2")
_OPAQUE_NAME_SHARE = 0.12
_NO_DESCRIPTION_SHARE = 0.08
_OPEN_TOPIC_SHARE = 0.5
_LARGEST_OPERANDS = (20, 99, 99, 999, 9999)
_SYMBOLS = {"+": "+", "-": "-", "x": "*", "/": "/"}
_UNITS = ("km", "miles", "meters", "feet", "euros", "dollars", "pounds", "hours", "minutes", "days")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Danish")
_ROOMS = ("kitchen", "hall", "garage", "bedroom", "office", "garden", "cellar", "bathroom")
_WRAPPED = (*("{q}",) * 8, "Please help: {q}", "Question: {q}", "{q} Use a tool.")


class Offer(NamedTuple):
    """A tool of the list, with the data for drawing its questions.

    slots: the arguments in the order of the schema.
    """

    kind: Kind
    topic: str
    slots: tuple[Slot, ...]
    tool: Tool
    keys: frozenset[str]

    def may_answer_for(self, other: Offer) -> bool:
        """Whether a question for the other tool may also fit this tool."""
        if self.kind.group == other.kind.group and ANY_TOPIC in (self.topic, other.topic):
            return True
        return not set(self.topic.split()).isdisjoint(other.topic.split())


class Request(NamedTuple):
    """One question for one tool: the call, a result, and the sentence that reports the result."""

    question: str
    call: Call
    result: str
    sentence: str
    keys: frozenset[str]


def draw_offer(draw: Draw) -> Offer:
    """Draw one tool. Its name, and a random topic, are held out exactly if draw.held_out."""
    rng = draw.rng
    kind = rng.choices(KINDS, weights=[kind.weight for kind in KINDS])[0]
    topic, keys, fixed = rng.choice(kind.topics), [], True
    if kind.open_topics and rng.random() < _OPEN_TOPIC_SHARE:
        topic, fixed = draw.lexicon.word(rng, draw.held_out, 0.8), False
        keys.append(split_key("word", topic))
    if kind is PAIR:
        slots, names, descriptions = (
            operand_slots(rng),
            PAIR_NAMES[topic],
            PAIR_DESCRIPTIONS[topic],
        )
    else:
        names, descriptions = kind.names, kind.descriptions
        # Random, so that the order does not show the role of an argument.
        slots = tuple(rng.sample(kind.slots, len(kind.slots)))
    opaque = rng.random() < _OPAQUE_NAME_SHARE
    # Without a description, only the name shows the purpose of the tool.
    described = opaque or not fixed or rng.random() >= _NO_DESCRIPTION_SHARE
    name = _tool_name(draw, None if opaque else names, topic)
    description = rng.choice(descriptions).format(n=topic) if described else ""
    parameters = _parameters(rng, slots)
    keys.append(split_key("tool", name))
    return Offer(kind, topic, slots, Tool(name, description, parameters), frozenset(keys))


def _tool_name(draw: Draw, names: tuple[str, ...] | None, topic: str) -> str:
    rng = draw.rng
    while True:
        if names:
            base = rng.choice(names).format(n=topic.replace(" ", "_"))
            name = rng.choice(_PREFIXES) + base + rng.choice(_SUFFIXES)
        else:
            words = [draw.lexicon.word(rng, draw.held_out, 0.8) for _ in range(rng.randint(1, 2))]
            name = "_".join(words)
        style = rng.random()
        if style > 0.75:
            name = "".join(part.capitalize() for part in name.split("_"))
            name = name if style > 0.85 else name[0].lower() + name[1:]
        if is_held_out(split_key("tool", name)) == draw.held_out:
            return name


def _parameters(rng: random.Random, slots: tuple[Slot, ...]) -> dict[str, str]:
    while True:
        parameters = {rng.choice(slot.names): rng.choice(slot.kinds) for slot in slots}
        if len(parameters) == len(slots):
            return parameters


def draw_request(draw: Draw, offer: Offer) -> Request:
    """Draw a question that the tool of the offer answers."""
    topic, values, keys = _values(draw, offer)
    asks = OPERATION_PHRASES[topic] if offer.kind.group == "math" else offer.kind.asks
    question = draw.rng.choice(asks).format(n=topic, **values)
    arguments: dict[str, Value] = {}
    for slot, (name, kind) in zip(offer.slots, offer.tool.parameters.items(), strict=True):
        value = values[slot.role]
        arguments[name] = str(value) if kind == "string" else value
    shown, result = _result(draw, offer.kind, topic, arguments, values)
    sentence = offer.kind.answer.format(n=topic, v=shown, **values)
    return Request(
        question, Call(offer.tool.name, arguments), result, sentence, frozenset(keys) | offer.keys
    )


def _values(draw: Draw, offer: Offer) -> tuple[str, dict[str, Value], list[str]]:
    """Return the topic of the question, the value of each role, and the split keys."""
    rng, lexicon, side = draw.rng, draw.lexicon, draw.held_out
    if offer.kind.group == "math":
        operator = rng.choice(tuple(_SYMBOLS)) if offer.topic == ANY_TOPIC else offer.topic
        a, b = _operands(rng, operator, side)
        values: dict[str, Value] = {"a": a, "b": b, "expression": f"{a} {_SYMBOLS[operator]} {b}"}
        return operator, values, [operand_key(operator, a, b)]
    name, place = lexicon.name(rng, side), lexicon.place(rng, side, 0.5)
    word = lexicon.word(rng, side, 0.8)
    words = [word, *(lexicon.word(rng, side, 0.9) for _ in range(rng.randint(0, 2)))]
    topic = offer.topic
    if offer.kind is LOOKUP:
        topic = rng.choice(
            ("phone number", "email", "address", "age", "birthday", "job", "office", word)
        )
    unit, unit2 = rng.sample(_UNITS, 2)
    on = rng.random() < 0.5
    values = {
        "name": name, "place": place, "word": word, "words": " ".join(words), "topic": topic,
        "count": rng.randint(1, 120), "unit": unit, "unit2": unit2, "on": on,
        "state": "on" if on else "off", "language": rng.choice(_LANGUAGES),
        "room": rng.choice(_ROOMS), "id": rng.randint(10, 99999),
    }  # fmt: skip
    keys = [split_key("name", name), split_key("place", place)]
    return topic, values, keys + [split_key("word", w) for w in words]


def _operands(rng: random.Random, operator: str, held_out: bool) -> tuple[int, int]:
    largest = rng.choice(_LARGEST_OPERANDS)
    while True:
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if operator == "/":
            b = rng.randint(1, 12)
            if is_held_out(operand_key(operator, a, b)) == held_out:
                return a, b
        elif pair_is_held_out(operator, a, b) == held_out:
            return a, b


def _computed(topic: str, values: dict[str, Value]) -> Value:
    a, b = values["a"], values["b"]
    assert isinstance(a, int), "an operand is an integer: this is a bug"
    assert isinstance(b, int), "an operand is an integer: this is a bug"
    if topic == "/":
        return a // b if a % b == 0 else round(a / b, 2)
    return {"+": a + b, "-": a - b, "x": a * b}[topic]


def _looked_up(draw: Draw) -> Value:
    """Draw the result of a tool that is not a calculator."""
    rng, word = draw.rng, draw.lexicon.real_word(draw.rng, held_out=False)
    return rng.choice(
        (
            f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
            f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
            rng.randint(0, 9999),
            rng.randint(1, 99),
            round(rng.uniform(0, 99), 1),
            f"{rng.randint(1, 40)} degrees",
            f"{word}, {rng.randint(1, 40)} degrees",
            f"555-{rng.randint(100, 9999)}",
            f"{rng.randint(1, 999)} euros",
            f"{rng.randint(1, 28)} {rng.choice(('May', 'June', 'July', 'March'))}",
            word,
            word,
            f"{word} {draw.lexicon.real_word(rng, held_out=False)}",
            f"{word}@{draw.lexicon.real_word(rng, held_out=False)}.com",
        )
    )


def _result(
    draw: Draw, kind: Kind, topic: str, arguments: dict[str, Value], values: dict[str, Value]
) -> tuple[Value, str]:
    """Return a value and the text of the result that contains it."""
    value = _computed(topic, values) if kind.group == "math" else _looked_up(draw)
    style, key = draw.rng.random(), topic.replace(" ", "_")
    if style < 0.5:
        return value, str(value)
    if style < 0.6:
        return value, json.dumps(value)
    if style < 0.75 or kind.group in ("math", "action") or key in arguments:
        return value, json.dumps({"result": value})
    if style < 0.9:
        return value, json.dumps({key: value})
    return value, json.dumps({**arguments, key: value})


def round_of(draw: Draw, requests: list[Request], question: str, answered: bool = True) -> Exchange:
    """Return the exchange in which the assistant calls one tool per request.

    answered: the exchange contains the results and the answer, otherwise it ends with the calls.
    """
    return Exchange(
        draw.rng.choice(_WRAPPED).format(q=question),
        " ".join(request.sentence for request in requests) if answered else "",
        calls=tuple(request.call for request in requests),
        results=tuple(request.result for request in requests) if answered else (),
    )


def is_calculator(offer: Offer) -> bool:
    """Whether the tool computes with numbers."""
    return offer.kind in (EXPRESSION, PAIR)
