"""Writes the output of calls: OpenAI's format, the Responses API, the Messages API, and streams."""

__all__: list[str] = []
