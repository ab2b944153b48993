"""Tool calls: the call formats of model families, their parsers, and the detection of a format.

The detokenizer feeds the text of each answer to a parser of `formats`. A tokenizer process finds
the format of the model (`detect`). launch/worker_main.py passes both in; the core does not import
this package.
"""

__all__: list[str] = []
