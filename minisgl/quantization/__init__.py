"""Quantised weights: FP8 and MXFP4 of published checkpoints, and FP8 from unquantised weights.

Each module that is named after a producer reads its settings from quantization_config. format.py
describes the storage as data, linear.py and experts.py store the weights in memory, and
selection.py leaves out the ignored modules. mxfp4.py is complete by itself. Entry points
(server/worker_main.py, LLM, the compiler) register the formats with `with_quantizations`; the core
does not import this package.

The products are in minisgl.kernel.fp8_products. The scales of a KV cache belong to
minisgl.kvcache and not to this package.
"""

from dataclasses import replace

from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.quantization.compressed_tensors import compressed_tensors
from minisgl.quantization.fbgemm import fbgemm
from minisgl.quantization.fine_grained import fine_grained
from minisgl.quantization.format import ONLINE
from minisgl.quantization.modelopt import modelopt
from minisgl.quantization.mxfp4 import mxfp4
from minisgl.quantization.selection import fp8_quantization

__all__ = ["with_quantizations"]


def with_quantizations(extensions: Extensions = DEFAULT_EXTENSIONS) -> Extensions:
    """Return `extensions` with all formats. Formats that it already has win."""
    formats = {
        "fp8": fine_grained,
        "compressed-tensors": compressed_tensors,
        "fbgemm_fp8": fbgemm,
        "modelopt": modelopt,
        "mxfp4": mxfp4,
        **extensions.quantizations,
    }
    online = {"fp8": fp8_quantization(lambda name: ONLINE), **extensions.online_quantizations}
    return replace(extensions, quantizations=formats, online_quantizations=online)
