"""The generators, one or more per task; `GENERATORS` lists them with their share in training."""

from __future__ import annotations

from demo.sample import Generator
from demo.tasks.facts import lookup
from demo.tasks.letters import counting, reversing, spelling
from demo.tasks.lists import sorting
from demo.tasks.numbers import arithmetic
from demo.tasks.records import json_object
from demo.tasks.talk import conversation
from demo.tasks.wordings import greeting

__all__ = ["GENERATORS"]

GENERATORS: dict[str, Generator] = {
    "arithmetic": arithmetic,
    "spelling": spelling,
    "reversing": reversing,
    "sorting": sorting,
    "counting": counting,
    "lookup": lookup,
    "json": json_object,
    "conversation": conversation,
    "greeting": greeting,
}
