"""The requests that wait for a tokenizer process or for the process that compiles grammars."""

__all__: list[str] = []
