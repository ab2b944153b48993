"""The types of the arguments of `LLM`, and their checks."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.core import EngineConfig, Grammar, InvalidRequest, SamplingParams, SchedulerConfig
from minisgl.core.sampling import CONSTRAINTS
from minisgl.message.messages import TokenizeText
from minisgl.settings.places import flag_fields
from minisgl.utils import near_names

Prompt = str | Sequence[int]
Conversation = Sequence[dict[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None
Stop = str | Sequence[str]
Priority = int | Sequence[int]
Prediction = Prompt | Sequence[Prompt] | None

# The fields of a body with the constraints of SamplingParams.
CONSTRAINT_FIELDS = {
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}
NOT_A_PROMPT = "a prompt must be text or a sequence of token ids"
NOT_A_CONVERSATION = (
    'a conversation must be a list of messages such as {"role": "user", "content": "Hello!"}'
)


def check_settings(settings: Iterable[str]) -> None:
    """Raise TypeError that names the first unknown setting of an LLM, and the right name.

    Names of flags, such as tensor_parallel_size, lead to the setting that the flag fills.
    """
    arguments = {"model_path": "model", "tp_size": "tp"}
    known = {*EngineConfig.__struct_fields__, *SchedulerConfig.__struct_fields__} - {*arguments}
    for name in settings:
        if name not in known:
            field = flag_fields().get(name, name)
            names = [*known, *arguments.values(), "revision"]
            near = near_names(arguments.get(field, field), names)
            raise TypeError(f"LLM has no setting {name!r}{near}")


def check_conversation(chat: Any) -> None:
    """Raise InvalidRequest that names the first message that is not valid."""
    if isinstance(chat, str):
        text = f"{NOT_A_CONVERSATION}, and not the text {chat[:80]!r}"
        raise InvalidRequest(text, param="messages")
    for index, message in enumerate(chat):
        given = message if isinstance(message, dict) else {}
        has_content = isinstance(given.get("content"), str | list) or given.get("tool_calls")
        if not (isinstance(given.get("role"), str) and has_content):
            text = f"{NOT_A_CONVERSATION}; message {index} is {str(message)[:80]!r}"
            raise InvalidRequest(text, param=f"messages[{index}]")
    if not chat:
        raise InvalidRequest(f"{NOT_A_CONVERSATION}; it has no message", param="messages")


def checked_options(template_options: Any) -> dict[str, Any]:
    """Return the variables of a chat template; None has no variable. Raises InvalidRequest."""
    options = {} if template_options is None else template_options
    if not isinstance(options, dict):
        message = 'template_options must be a dict such as {"enable_thinking": False}'
        raise InvalidRequest(message, param="template_options")
    return options


def as_list(
    given: Any, element: Any, expected: str, param: str = "prompt"
) -> tuple[bool, list[Any]]:
    """Return whether `given` is a single input, and the list of inputs.

    A single input is a text, or a sequence that begins with an `element`. Raises InvalidRequest
    with the message `expected` when `given` is neither an input nor a sequence of inputs.
    """
    sequences = (Sequence, np.ndarray)
    if not isinstance(given, sequences):
        raise InvalidRequest(expected, param=param)
    single = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], element))
    inputs = [given] if single else list(given)
    if not all(isinstance(each, sequences) for each in inputs):
        raise InvalidRequest(expected, param=param)
    return single, inputs


def as_prompt(prompt: Prompt, add_special: bool = True) -> Any:
    """Return text for the tokenizer, or ids as int32. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return TokenizeText(text=prompt, add_special=add_special)
    try:
        return array("i", iter(prompt))  # without iter, bytes would be read as raw int32
    except OverflowError:
        raise InvalidRequest("a token id does not fit into 32 bits", param="prompt") from None
    except (TypeError, ValueError):
        raise InvalidRequest(NOT_A_PROMPT, param="prompt") from None


def check_count(n: Any) -> None:
    """Raise InvalidRequest unless `n` is a number of answers."""
    if type(n) is not int or n < 1:
        raise InvalidRequest(f"n must be an integer of at least 1, not {str(n)[:80]}", param="n")


def priority_list(priority: Any, count: int) -> list[int]:
    """Return the priority of each of `count` prompts. Raises InvalidRequest."""
    is_list = isinstance(priority, Sequence)
    each = list(priority) if is_list else [priority] * count
    known = range(-(2**31), 2**31)  # as in the bodies of the server
    if len(each) != count or not all(type(one) is int and one in known for one in each):
        message = f"priority must be an integer, or a list of {count} integers, of 32 bits"
        raise InvalidRequest(message, param="priority")
    return each


def prediction_list(prediction: Any, count: int) -> list[Any]:
    """Return the prediction of each of `count` prompts, as CallRequest holds it; None for none.

    Raises InvalidRequest. A prediction without text or ids is none.
    """
    expected = f"prediction must be text or token ids for one prompt, or a list of {count} of them"
    if prediction is None:
        return [None] * count
    _, listed = as_list(prediction, (int, np.integer), expected, "prediction")
    if len(listed) != count:
        raise InvalidRequest(expected, param="prediction")
    return [as_prompt(each, add_special=False) if len(each) else None for each in listed]


def stop_list(stop: Any) -> list[str]:
    """Return `stop`, one string or a sequence of strings, as a list. Raises InvalidRequest."""
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidRequest("stop must be one or more nonempty strings", param="stop")
    return list(strings)


def checked(sampling: Any, changes: dict[str, Any]) -> SamplingParams:
    """Return a copy with values of the declared types. Raises InvalidRequest."""
    if not isinstance(sampling, SamplingParams):
        message = "sampling must be SamplingParams or a list of them"
        if isinstance(sampling, dict):
            message += "; give the entries of a dict by name, such as temperature=0.3"
        raise InvalidRequest(message, param="sampling")
    try:
        given = msgspec.structs.asdict(sampling) | changes
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling parameters: {error}", param="sampling") from None


def constraint_name(sampling: SamplingParams) -> str | None:
    """Return the name of the constraint of these parameters, or None."""
    return next((name for name in CONSTRAINTS if getattr(sampling, name) is not None), None)


def constraint_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the constraint of these parameters as a field of a body; {} without one.

    Raises InvalidRequest for a schema that is not JSON.
    """
    name = constraint_name(sampling)
    if name is None or isinstance(sampling.grammar, Grammar):
        return {}
    value = getattr(sampling, name)
    if callable(described := getattr(value, "model_json_schema", None)):
        value = described()
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from None
    return {CONSTRAINT_FIELDS[name]: list(value) if isinstance(value, tuple) else value}
