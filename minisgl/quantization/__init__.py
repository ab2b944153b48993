"""Quantised weights and KV caches, such as FP8 and MXFP4. Nothing yet.

The seam for weights is `LinearMethod` (layers/linear.py): a method owns the parameters, the
placement and the product of a linear layer, one file each. The seam for the KV cache is the state
spec of a layer. Entry points (server/worker_main.py, LLM) register this package; the core does not
import it.
"""

__all__: list[str] = []
