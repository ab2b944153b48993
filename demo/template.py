"""The chat template in the manner of Qwen3 (Hermes tool calls), as Jinja and as Python functions.

transformers and minisgl render the Jinja text; the training, which renders a thousand
conversations a step, uses the functions. A test compares both. A conversation without tools has
plain ChatML turns. One line per tool gives its name, its description and the type of each
argument. The line omits the rest of the JSON Schema, because each token of a prompt counts for a
model of this size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from demo.sample import Call, Sample, Tool

# In the tokenizer they are added tokens that are not special, as in Qwen3: a decoder keeps them.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_BEFORE_TOOLS = "# Tools\n\n<tools>"
_AFTER_TOOLS = (
    "\n</tools>\n\nTo call a function, answer:\n"
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
)

CHAT_TEMPLATE = (
    # The system turn with the tools, which also contains the text of a first system message.
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    f"{{{{ {json.dumps(_BEFORE_TOOLS)} }}}}"
    "{% for tool in tools %}{% set function = tool.function or tool %}"
    "{{ '\\n{\"name\": ' + function.name | tojson }}"
    "{% if function.description %}"
    "{{ ', \"description\": ' + function.description | tojson }}"
    "{% endif %}{{ ', \"parameters\": {' }}"
    "{% for key, value in ((function.parameters or {}).properties or {}).items() %}"
    "{{ ('' if loop.first else ', ') + key | tojson + ': ' + (value.type or 'any') | tojson }}"
    "{% endfor %}{{ '}}' }}{% endfor %}"
    f"{{{{ {json.dumps(_AFTER_TOOLS)} + '<|im_end|>\\n' }}}}{{% endif %}}"
    "{% for message in messages %}"
    # The results of one assistant turn are one user turn.
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif not (tools and loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{% set function = call.function or call %}"
    "{{ '\\n' if message.content or not loop.first else '' }}"
    '{{ \'<tool_call>\\n{"name": "\' + function.name + \'", "arguments": \' }}'
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Turn(NamedTuple):
    """One rendered turn without the tokens around it. produced: the model must write the text.

    by_letter: as in Exchange.
    """

    role: str
    text: str
    produced: bool = False
    by_letter: bool = False


def turns(sample: Sample) -> Iterator[Turn]:
    """Render every turn of a sample, as CHAT_TEMPLATE renders its messages."""
    system = [sample.system] if sample.system else []
    if sample.tools:
        system.append(_tools_text(sample.tools))
    if system:
        yield Turn("system", "\n\n".join(system))
    for exchange in sample.exchanges:
        yield Turn("user", exchange.user)
        if exchange.calls:
            yield Turn("assistant", _calls_text(exchange.calls), produced=True)
        if exchange.results:
            # The template puts the newline after the role before every result.
            yield Turn("user", "\n".join(map(_result_text, exchange.results)))
        if exchange.results or not exchange.calls:
            yield Turn("assistant", exchange.assistant, True, exchange.by_letter)


def _tools_text(tools: Sequence[Tool]) -> str:
    lines = (
        json.dumps({k: v for k, v in tool._asdict().items() if v or k == "parameters"})
        for tool in tools
    )
    return "\n".join((_BEFORE_TOOLS, *lines)) + _AFTER_TOOLS


def _calls_text(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}'
        "\n</tool_call>"
        for call in calls
    )


def _result_text(result: str) -> str:
    return f"<tool_response>\n{result}\n</tool_response>"
