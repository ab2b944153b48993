"""Quantised weights and KV caches, such as FP8 and MXFP4. No code yet.

The seam for weights is `LinearMethod` (layers/linear.py). A method owns the parameters, the
placement and the product of a linear layer, and each method is one file. The seam for the KV cache
is the state spec of a layer. Entry points (server/worker_main.py, LLM) register this package; the
core does not import it.
"""

__all__: list[str] = []
