"""Training code of the embedded demo model: generators, tokenizer, network, training, scoring.

The `minisgl` package imports nothing from this folder. The files that ship are in `minisgl/demo`.
"""
