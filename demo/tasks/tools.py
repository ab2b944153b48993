"""The tool tasks: one tool, a choice, an answer from a result, no fitting tool, two calls.

The client offers one to four tools. In training most conversations continue after the call: with
the result, an answer, and sometimes a second question. Such a conversation trains several turns
with one list of tools.
"""

from __future__ import annotations

import random
import re

from demo.sample import Draw, Exchange, Generator, Sample
from demo.tasks.facts import document
from demo.tasks.letters import counting, reversing, spelling
from demo.tasks.lists import sorting
from demo.tasks.numbers import arithmetic
from demo.tasks.offers import Offer, Request, draw_offer, draw_request, is_calculator, round_of
from demo.tasks.records import json_object
from demo.tasks.toolbox import LOOKUP
from demo.tasks.wordings import UNKNOWN, greeting

NO_TOOL = "I have no tool for that."

_MOST_TOOLS = 4
_RESULT_SHARE = 0.7
_SECOND_QUESTION_SHARE = 0.5
_ALSO = (" ", " Also: ", "\n", " And ")


def _offers(draw: Draw, count: int, absent: Offer | None = None) -> list[Offer]:
    """Draw tools of which at most one fits a question; none fits a question for `absent`."""
    chosen: list[Offer] = []
    names: set[str] = set()
    while len(chosen) < count:
        offer = draw_offer(draw)
        others = [*chosen, absent] if absent else chosen
        if offer.tool.name in names or any(offer.may_answer_for(other) for other in others):
            continue
        chosen.append(offer)
        names.add(offer.tool.name)
    return chosen


def _sample(
    draw: Draw, task: str, offers: list[Offer], exchanges: list[Exchange], keys: set[str]
) -> Sample:
    """Build a sample. The list of tools has random order."""
    shuffled = draw.rng.sample(offers, len(offers))
    for offer in offers:
        keys |= offer.keys
    tools = tuple(offer.tool for offer in shuffled)
    return Sample(task, tuple(exchanges), frozenset(keys), tools=tools)


def _called(draw: Draw, task: str, offers: list[Offer]) -> Sample:
    """Return a sample whose first question fits the first tool."""
    request = draw_request(draw, offers[0])
    keys = set(request.keys)
    if draw.held_out or draw.rng.random() >= _RESULT_SHARE:
        return _sample(
            draw, task, offers, [round_of(draw, [request], request.question, answered=False)], keys
        )
    exchanges = [round_of(draw, [request], request.question)]
    if draw.rng.random() < _SECOND_QUESTION_SHARE:
        if draw.rng.random() < 0.6:
            second = draw_request(draw, draw.rng.choice(offers))
            exchanges.append(round_of(draw, [second], second.question, answered=False))
            keys |= second.keys
        else:
            own, own_keys = _without_tool(draw, offers)
            exchanges.append(own)
            keys |= own_keys
    return _sample(draw, task, offers, exchanges, keys)


def tool_call(draw: Draw) -> Sample:
    """Ask a question for the only tool."""
    return _called(draw, "tool-call", _offers(draw, 1))


def tool_choice(draw: Draw) -> Sample:
    """Ask a question for one of two to four tools."""
    return _called(draw, "tool-choice", _offers(draw, draw.rng.randint(2, _MOST_TOOLS)))


def tool_result(draw: Draw) -> Sample:
    """Give the results of one call or two calls; the answer is a sentence for each result."""
    offers = _offers_to_pair(draw, (1, 1, 2, 3))
    if draw.rng.random() < 0.25:
        requests, question = _pair(draw, offers)
    else:
        request = draw_request(draw, offers[0])
        requests, question = [request], request.question
    keys = set().union(*(request.keys for request in requests))
    return _sample(draw, "tool-result", offers, [round_of(draw, requests, question)], keys)


def tool_parallel(draw: Draw) -> Sample:
    """Ask two questions at once, for one tool or for two tools."""
    offers = _offers_to_pair(draw, (1, 2, 2, 3))
    requests, question = _pair(draw, offers)
    keys = set().union(*(request.keys for request in requests))
    answered = not draw.held_out and draw.rng.random() < _RESULT_SHARE
    exchange = round_of(draw, requests, question, answered)
    return _sample(draw, "tool-parallel", offers, [exchange], keys)


def _offers_to_pair(draw: Draw, counts: tuple[int, ...]) -> list[Offer]:
    """Draw tools of which the first has arguments: two calls of it can differ."""
    while True:
        offers = _offers(draw, draw.rng.choice(counts))
        if offers[0].slots:
            return offers


def _pair(draw: Draw, offers: list[Offer]) -> tuple[list[Request], str]:
    """Return two requests with different calls, and the question that contains both."""
    rng, first = draw.rng, offers[0]
    second = first if rng.random() < 0.5 else rng.choice(offers)
    requests = [draw_request(draw, first), draw_request(draw, second)]
    while requests[0].call == requests[1].call:
        requests[1] = draw_request(draw, second)
    one, other = (request.question for request in requests)
    if second is first and len(first.slots) == 1 and first.kind.group in ("topic", "record"):
        joined = _shared(rng, requests)
        if joined:
            return requests, joined
    joint = rng.choice(_ALSO)
    if one[-1] not in ".?":
        joint = rng.choice((" and ", ", ")) if is_calculator(first) else ". "
    if joint.strip().lower() in ("and", ","):
        other = other[0].lower() + other[1:]
    return requests, f"{one}{joint}{other}"


def _shared(rng: random.Random, requests: list[Request]) -> str | None:
    """Return one question with both values of the only argument, or sometimes none."""
    if rng.random() < 0.3:
        return None
    ((one,), (other,)) = (request.call.arguments.values() for request in requests)
    before, value, after = requests[0].question.rpartition(str(one))
    if not value:
        return None
    preposition = " in" if before.endswith(" in ") and rng.random() < 0.5 else ""
    return f"{before}{one} and{preposition} {other}{after}"


def tool_none(draw: Draw) -> Sample:
    """Ask a question that no tool answers: the model answers itself or says that it cannot."""
    if draw.rng.random() < 0.5:
        absent = draw_offer(draw)
        # The model can add small numbers itself.
        while is_calculator(absent):
            absent = draw_offer(draw)
        offers = _offers(draw, draw.rng.randint(1, _MOST_TOOLS), absent)
        request = draw_request(draw, absent)
        exchange = Exchange(request.question, NO_TOOL)
        return _sample(draw, "tool-none", offers, [exchange], set(request.keys))
    offers = _offers(draw, draw.rng.randint(1, _MOST_TOOLS))
    exchange, keys = _without_tool(draw, offers)
    return _sample(draw, "tool-none", offers, [exchange], keys)


def _short_lookup(draw: Draw) -> Sample:
    return document(draw, draw.rng.randint(3, 6), 1)


_OWN: tuple[Generator, ...] = (
    arithmetic, spelling, reversing, sorting, counting, greeting, greeting, json_object,
    _short_lookup,
)  # fmt: skip


def _without_tool(draw: Draw, offers: list[Offer]) -> tuple[Exchange, set[str]]:
    """Return a question of another task that no tool of the list answers, and its keys."""
    while True:
        own = draw.rng.choice(_OWN)
        sample = own(draw)
        exchange = sample.exchanges[0]
        if own is arithmetic and any(map(is_calculator, offers)):
            continue
        if own is _short_lookup and any(offer.kind is LOOKUP for offer in offers):
            continue
        words = set(re.findall(r"\w+", exchange.user.lower()))
        if any(not words.isdisjoint(offer.topic.split()) for offer in offers):
            continue
        if exchange.assistant == UNKNOWN:
            exchange = exchange._replace(assistant=NO_TOOL)
        return exchange, set(sample.keys)
