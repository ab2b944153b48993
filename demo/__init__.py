"""Training code of the embedded demo model: generators, tokenizer, network, training, scoring.

Nothing here is imported by the `minisgl` package; what ships is in `minisgl/demo`.
"""
