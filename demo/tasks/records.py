"""Writing a JSON object of a given shape."""

from __future__ import annotations

import json
import random

from demo.sample import Draw, Sample, single
from demo.split import split_key
from demo.words import ANIMALS, COLOURS, JOBS

_Value = str | int | bool

_DIRECT = (
    "Write a JSON object with {pairs}.",
    "Give me a JSON object with {pairs}.",
    "Make JSON with {pairs}.",
    "Return a JSON object: {pairs}.",
    "Answer in JSON: {pairs}.",
)
_KEYED = (
    "{text} Write this as JSON with the keys {keys}.",
    "Turn this into JSON with the keys {keys}: {text}",
    "Extract the keys {keys} as a JSON object: {text}",
    "{text} Return JSON with {keys}.",
)
_SHAPED = (
    "Fill in the shape {shape} from this text: {text}",
    "{text} Answer with a JSON object of the shape {shape}.",
    "Use this JSON shape: {shape}. {text}",
)
_TYPE_NAMES = {str: "string", int: "number", bool: "boolean"}


def _person(draw: Draw) -> tuple[dict[str, _Value], str, list[str]]:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out)
    city = draw.lexicon.place(rng, draw.held_out)
    fields: dict[str, _Value] = {"name": name, "age": rng.randint(2, 99), "city": city}
    text = "{name} is {age} years old and lives in {city}."
    if rng.random() < 0.5:
        fields["job"] = rng.choice(JOBS)
        text = "{name} is {age} years old, lives in {city} and works as a {job}."
    return fields, text, [split_key("name", name), split_key("place", city)]


def _pet(draw: Draw) -> tuple[dict[str, _Value], str, list[str]]:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out)
    fields: dict[str, _Value] = {
        "name": name,
        "animal": rng.choice(ANIMALS),
        "colour": rng.choice(COLOURS),
    }
    text = "{name} is a {colour} {animal}."
    if rng.random() < 0.5:
        fields["age"] = rng.randint(1, 20)
        text = "{name} is a {colour} {animal}, {age} years old."
    return fields, text, [split_key("name", name)]


def _product(draw: Draw) -> tuple[dict[str, _Value], str, list[str]]:
    rng = draw.rng
    item = draw.lexicon.word(rng, draw.held_out, 0.8)
    fields: dict[str, _Value] = {
        "item": item,
        "price": rng.randint(1, 999),
        "in_stock": rng.random() < 0.5,
    }
    state = "in stock" if fields["in_stock"] else "sold out"
    text = "The {item} costs {price} euros and is " + state + "."
    if rng.random() < 0.4:
        fields["colour"] = rng.choice(COLOURS)
        text = "The {colour} {item} costs {price} euros and is " + state + "."
    return fields, text, [split_key("word", item)]


def _order(draw: Draw) -> tuple[dict[str, _Value], str, list[str]]:
    rng = draw.rng
    name = draw.lexicon.name(rng, draw.held_out)
    item = draw.lexicon.word(rng, draw.held_out, 0.8)
    fields: dict[str, _Value] = {"customer": name, "item": item, "count": rng.randint(1, 50)}
    text = "{customer} orders {count} of the item {item}."
    return fields, text, [split_key("name", name), split_key("word", item)]


def _shown(value: _Value, rng: random.Random) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) and rng.random() < 0.3 else str(value)


def _joined(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def json_object(draw: Draw) -> Sample:
    """Ask for a JSON object. Its keys have the order in which the request names them."""
    rng = draw.rng
    fields, text, split_keys = rng.choice((_person, _pet, _product, _order))(draw)
    order = list(fields)
    rng.shuffle(order)
    answer = {key: fields[key] for key in order}
    style = rng.random()
    if style < 0.4:
        pairs = _joined([f"{key} {_shown(value, rng)}" for key, value in answer.items()])
        user = rng.choice(_DIRECT).format(pairs=pairs)
    elif style < 0.7:
        user = rng.choice(_KEYED).format(text=text.format(**fields), keys=_joined(order))
    else:
        shape = "{" + ", ".join(f'"{k}": {_TYPE_NAMES[type(v)]}' for k, v in answer.items()) + "}"
        user = rng.choice(_SHAPED).format(text=text.format(**fields), shape=shape)
    return single("json", user, json.dumps(answer), split_keys)
