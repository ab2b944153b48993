"""The tokenizer with its chat templates, the detokenizer, and their worker processes.

This file exports no name: import from the modules.
"""

__all__: list[str] = []
