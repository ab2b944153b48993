"""The generators, one per task."""

from __future__ import annotations

from demo.sample import Generator
from demo.tasks.facts import lookup
from demo.tasks.letters import counting, reversing, spelling
from demo.tasks.lists import sorting
from demo.tasks.numbers import arithmetic
from demo.tasks.records import json_object
from demo.tasks.talk import conversation
from demo.tasks.tools import tool_call, tool_choice, tool_none, tool_parallel, tool_result
from demo.tasks.wordings import greeting

__all__ = ["GENERATORS", "TOOL_TASKS"]

# The tasks in which the client offers tools.
TOOL_TASKS: dict[str, Generator] = {
    "tool-call": tool_call,
    "tool-choice": tool_choice,
    "tool-result": tool_result,
    "tool-none": tool_none,
    "tool-parallel": tool_parallel,
}

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
    **TOOL_TASKS,
}
