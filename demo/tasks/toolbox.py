"""The kinds of tools of the tool tasks: names, arguments, descriptions, and questions.

A kind of tool has one or more topics, such as "weather" or "phone number". A question names the
topic in the words of the description. Half of the topics of a kind with open_topics are random
words. The names of tools and arguments vary. The model therefore has to read the list of tools.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from demo.tasks.numbers import PHRASES

# A tool with this topic answers the questions of every topic of its group.
ANY_TOPIC = "*"


class Slot(NamedTuple):
    """One argument. role: its place in the questions, `{role}`. kinds: possible JSON types."""

    role: str
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ("string",)


class Kind(NamedTuple):
    """One kind of tool. In texts `{n}` stands for the topic. In names `_` replaces its blanks.

    group: kinds of one group may answer the same question. weight: relative frequency.
    open_topics: half of the topics are random words. answer: the sentence for a result `{v}`.
    """

    group: str
    weight: int
    topics: tuple[str, ...]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    answer: str = "The result is {v}."
    open_topics: bool = False


_NUMBER = ("integer", "number")
_PLACE = Slot("place", ("city", "place", "town", "location", "where", "region"))
_NAME = Slot("name", ("name", "person", "who", "user", "customer", "employee"))
_ITEM = Slot("word", ("item", "product", "article", "thing", "object"))
_PERSON_ASKS = (
    "What is the {n} of {name}?", "Find the {n} of {name}.", "Tell me the {n} of {name}.",
    "I need the {n} of {name}.", "Look up the {n} of {name}.",
)  # fmt: skip
_OPERANDS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n"))

PAIR_NAMES: dict[str, tuple[str, ...]] = {
    "+": ("add", "sum", "plus", "addition", "add_numbers", "total"),
    "-": ("subtract", "minus", "difference", "subtraction", "sub"),
    "x": ("multiply", "times", "product", "mul", "multiplication"),
    "/": ("divide", "division", "quotient", "div"),
}
PAIR_DESCRIPTIONS: dict[str, tuple[str, ...]] = {
    "+": ("Add two numbers.", "The sum of two numbers.", "Adds numbers"),
    "-": ("Subtract two numbers.", "The difference of two numbers.", "Subtracts numbers"),
    "x": ("Multiply two numbers.", "The product of two numbers.", "Multiplies numbers"),
    "/": ("Divide two numbers.", "The quotient of two numbers.", "Divides numbers"),
}
OPERATION_PHRASES: dict[str, tuple[str, ...]] = {
    **PHRASES,
    "/": (
        "What is {a} / {b}?",
        "What is {a} divided by {b}?",
        "{a} / {b} = ?",
        "{a}/{b}",
        "{a} / {b}",
        "Divide {a} by {b}.",
        "Calculate {a} / {b}.",
        "Compute {a} divided by {b}",
        "How much is {a} divided by {b}?",
    ),
}


def operand_slots(rng: random.Random) -> tuple[Slot, Slot]:
    """Return the arguments of a tool that combines two numbers, in their order."""
    first, second = rng.choice(_OPERANDS)
    kind = (rng.choice(_NUMBER),)
    return Slot("a", (first,), kind), Slot("b", (second,), kind)


EXPRESSION = Kind(
    "math", 4, (ANY_TOPIC,),
    ("calculator", "calculate", "calc", "evaluate", "compute", "math", "arithmetic", "eval"),
    (
        "Calculate an expression.", "Evaluate an arithmetic expression.", "A calculator.",
        "Compute the value of a formula.", "Calculator for arithmetic", "Calculate a term",
        "Evaluate a mathematical expression.",
    ),
    (Slot("expression", ("expression", "expr", "formula", "term", "input", "calculation")),),
    (),
)  # fmt: skip
PAIR = Kind("math", 3, tuple(PAIR_NAMES), (), (), (), ())
LOOKUP = Kind(
    "record", 2, (ANY_TOPIC,),
    ("lookup", "find_record", "read_record", "get_field", "directory", "database", "look_up"),
    (
        "Look up a field of a person.", "Read one field of the record of a person.",
        "Find an entry in the directory.", "Returns a field of a record",
    ),
    (
        _NAME,
        Slot("topic", ("field", "key", "attribute", "column", "property")),
    ),
    _PERSON_ASKS,
    "The {n} of {name} is {v}.",
)  # fmt: skip

KINDS: tuple[Kind, ...] = (
    EXPRESSION,
    PAIR,
    LOOKUP,
    Kind(
        "topic", 3, ("time", "local time"),
        ("get_{n}", "{n}", "{n}_in", "current_{n}", "clock", "world_clock", "{n}_of_day"),
        (
            "The {n} in a city.", "Get the {n} in a place.", "Returns the current {n} of a city",
            "Current {n} at a location.", "Tells the {n} in a town", "Find the {n} in a city.",
        ),
        (_PLACE,),
        (
            "What time is it in {place}?", "What is the time in {place}?",
            "Tell me the time in {place}.", "How late is it in {place}?",
            "What is the local time in {place}?", "I need the time in {place}.",
            "What time is it in {place} now?", "Which time is it in {place} right now?",
        ),
        "The time in {place} is {v}.",
    ),
    Kind(
        "topic", 4, ("weather", "temperature", "forecast", "population", "currency", "traffic"),
        ("get_{n}", "{n}", "{n}_in", "{n}_of_city", "city_{n}", "current_{n}", "read_{n}"),
        (
            "The {n} in a city.", "Get the {n} in a place.", "Returns the {n} of a city",
            "Current {n} at a location.", "Tells the {n} in a town", "Find the {n} in a city.",
            "Get the current {n} for a city.",
        ),
        (_PLACE,),
        (
            "What is the {n} in {place}?", "Tell me the {n} in {place}.",
            "Give me the {n} in {place}.", "I need the {n} in {place}.",
            "Find the {n} in {place}.", "Check the {n} in {place}.",
            "What is the {n} like in {place}?", "What is the {n} in {place} today?",
        ),
        "The {n} in {place} is {v}.",
        open_topics=True,
    ),
    Kind(
        "record", 4, ("phone number", "email", "address", "age", "birthday", "job", "office"),
        ("get_{n}", "{n}", "find_{n}", "{n}_of", "lookup_{n}", "person_{n}", "read_{n}"),
        (
            "The {n} of a person.", "Get the {n} of a user.", "Returns the {n} of a customer",
            "Look up the {n} of a person.", "Find the {n} of a person by name.",
        ),
        (_NAME,),
        (*_PERSON_ASKS, "Give me the {n} of {name}."),
        "The {n} of {name} is {v}.",
        open_topics=True,
    ),
    Kind(
        "record", 2, ("price", "stock", "weight", "size", "rating"),
        ("get_{n}", "{n}", "{n}_of", "item_{n}", "check_{n}", "product_{n}"),
        (
            "The {n} of an item.", "Get the {n} of a product.", "Returns the {n} of an article",
            "Look up the {n} of an item.",
        ),
        (_ITEM,),
        (
            "What is the {n} of {word}?", "What is the {n} of the item {word}?",
            "Check the {n} of {word}.", "Tell me the {n} of the product {word}.",
        ),
        "The {n} of {word} is {v}.",
        open_topics=True,
    ),
    Kind(
        "topic", 3, ("order", "ticket", "invoice", "parcel", "booking"),
        ("get_{n}_status", "{n}_status", "{n}_state", "track_{n}", "find_{n}", "check_{n}"),
        (
            "The status of one {n}.", "Get the status of the {n} by its number.",
            "Look up the {n} by id.", "Returns the state of one {n}",
        ),
        (Slot("id", ("id", "number", "key", "reference", "no"), ("string", "integer")),),
        (
            "What is the status of {n} {id}?", "Where is my {n} {id}?",
            "Check the status of {n} {id}.", "Look up {n} {id}.", "How is my {n} {id} doing?",
        ),
        "The status of {n} {id} is {v}.",
    ),
    Kind(
        "topic", 1, ("users", "orders", "files", "rooms", "tasks", "events"),
        ("list_{n}", "all_{n}", "get_{n}", "show_{n}", "{n}"),
        ("List all {n}.", "Returns the {n}", "Get the list of {n}."),
        (),
        ("List all {n}.", "Which {n} are there?", "Show me the {n}.", "Give me a list of {n}."),
    ),
    Kind(
        "topic", 1, ("date",),
        ("today", "get_{n}", "current_{n}", "{n}", "calendar", "day"),
        ("The {n} of today.", "Get the current {n}.", "Returns the {n} of today"),
        (),
        ("What day is it today?", "Which date is today?", "What is the date of today?"),
        "The date of today is {v}.",
    ),
    Kind(
        "action", 1, ("message",),
        ("send_message", "message", "send_text", "notify", "write_message"),
        ("Send a message to a person.", "Sends a text message", "Write a message to a user."),
        (
            Slot("name", ("to", "name", "recipient", "person")),
            Slot("words", ("text", "message", "body", "content")),
        ),
        (
            "Send the message {words} to {name}.", "Send {name} the message {words}.",
            "Write {name} a message: \"{words}\"", "Send \"{words}\" to {name}.",
        ),
    ),
    Kind(
        "action", 1, ("timer",),
        ("set_timer", "timer", "start_timer", "countdown", "reminder"),
        ("Set a timer.", "Starts a timer of some minutes", "Timer in minutes."),
        (Slot("count", ("minutes", "duration", "length", "min"), _NUMBER),),
        (
            "Set a timer for {count} minutes.", "Start a timer of {count} minutes.",
            "Remind me in {count} minutes.",
        ),
    ),
    Kind(
        "action", 1, ("translate",),
        ("translate", "translate_word", "translation", "translator", "to_language"),
        ("Translate a word into a language.", "Translates text", "Translate words."),
        (
            Slot("word", ("text", "word", "source", "phrase")),
            Slot("language", ("language", "to", "target", "lang")),
        ),
        (
            "Translate {word} into {language}.", "How do you say {word} in {language}?",
            "Translate the word {word} to {language}.",
        ),
    ),
    Kind(
        "action", 1, ("convert",),
        ("convert", "convert_units", "unit_converter", "conversion", "change_unit"),
        ("Convert an amount to another unit.", "Converts units", "Unit converter."),
        (
            Slot("count", ("amount", "value", "number", "quantity"), _NUMBER),
            Slot("unit", ("from", "source", "unit", "from_unit")),
            Slot("unit2", ("to", "target", "to_unit", "into")),
        ),
        (
            "Convert {count} {unit} to {unit2}.", "How many {unit2} are {count} {unit}?",
            "What is {count} {unit} in {unit2}?",
        ),
    ),
    Kind(
        "action", 1, ("table",),
        ("book_table", "reserve_table", "reservation", "table", "reserve"),
        ("Book a table in a city.", "Reserves a table for guests", "Reserve a table."),
        (
            _PLACE,
            Slot("count", ("guests", "people", "count", "seats"), _NUMBER),
        ),
        (
            "Book a table for {count} in {place}.", "Reserve a table in {place} for {count}.",
            "I need a table for {count} people in {place}.",
        ),
    ),
    Kind(
        "action", 1, ("buy",),
        ("buy", "buy_item", "purchase", "add_to_cart", "shop"),
        ("Buy an item.", "Puts a product into the cart", "Buy some number of an item."),
        (
            _ITEM,
            Slot("count", ("count", "quantity", "amount", "number"), _NUMBER),
        ),
        (
            "Buy {count} of the item {word}.", "Buy {count} {word}.",
            "Add {count} {word} to my cart.", "Please buy {count} pieces of {word}.",
        ),
    ),
    Kind(
        "action", 1, ("light",),
        ("set_light", "light", "switch_light", "lights", "lamp"),
        ("Switch the light of a room.", "Turns a light on or off", "Control a light."),
        (
            Slot("room", ("room", "where", "location", "place")),
            Slot("on", ("on", "state", "enabled", "power"), ("boolean",)),
        ),
        (
            "Turn {state} the light in the {room}.", "Switch the light in the {room} {state}.",
            "Turn the light of the {room} {state}.",
        ),
    ),
)  # fmt: skip
