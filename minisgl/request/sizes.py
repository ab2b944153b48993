"""Refuses bodies with longer lists than the server allows, before structs are made of them."""

from collections.abc import Mapping
from typing import Any

from minisgl.request.decode import reject
from minisgl.settings.config import Limits


def check_sizes(limits: Limits, given: Mapping[str, Any]) -> None:
    """Refuse lists that are longer than this server allows."""
    limit = limits.max_messages
    for param in ("messages", "input", "system"):
        messages = given.get(param)
        if not isinstance(messages, list):
            continue
        if len(messages) > limit:
            raise reject(param, f"must have at most {limit} messages", "max_messages")
        for field in ("content", "tool_calls", "output", "summary", "reasoning_details"):
            count, entries = 0, messages
            while entries and count <= limit:  # a part may have parts
                entries = _entries(entries, field)
                count += len(entries)
            if count > limit:
                rule = f"must have at most {limit} entries of {field}"
                raise reject(param, rule, "max_messages")
    max_bias, bias = limits.max_logit_bias, given.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > max_bias:
        raise reject("logit_bias", f"must have at most {max_bias} entries", "max_logit_bias")
    max_logprobs = limits.max_logprobs
    for name in ("logprobs", "top_logprobs"):
        if type(given.get(name)) is int and given[name] > max_logprobs:
            raise reject(name, f"must be from 0 to {max_logprobs}", "max_logprobs")
    _check_choices(limits, given.get("prompt"), given.get("n"))


def _check_choices(limits: Limits, prompt: Any, n: Any) -> None:
    """Refuse more than max_choices answers: the number of prompts times n."""
    has_prompts = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = len(prompt) if has_prompts else 1
    per_prompt = n if isinstance(n, int) else 1
    limit = limits.max_choices
    if per_prompt > limit >= prompts:
        raise reject("n", f"must be at most {limit}", "max_n")
    if prompts > limit >= per_prompt:
        raise reject("prompt", f"must have at most {limit} entries", "max_prompts")
    if prompts * per_prompt > limit:
        raise reject("n", f"times the number of prompts must be at most {limit}", "max_choices")


def _entries(objects: list[Any], field: str) -> list[Any]:
    """The entries of the lists that these objects have in a field."""
    lists = [one.get(field) for one in objects if isinstance(one, dict)]
    return [entry for found in lists if isinstance(found, list) for entry in found]
