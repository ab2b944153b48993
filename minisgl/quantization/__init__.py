"""Quantised weights: FP8 and MXFP4 of published checkpoints, and FP8 from unquantised weights.

settings.py reads quantization_config, as each producer of checkpoints writes it. format.py
describes the storage as data, linear.py and experts.py store the weights in memory, and
selection.py leaves out the ignored modules. mxfp4.py is complete by itself. Entry points
(launch/worker_main.py, LLM, the compiler) register the formats with `with_quantizations`; the core
does not import this package.

The products are in minisgl.kernel.fp8_products. The scales of a KV cache belong to
minisgl.kvcache and not to this package.
"""

from dataclasses import replace

from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.mxfp4 import mxfp4
from minisgl.quantization.selection import fp8_quantization
from minisgl.quantization.settings import compressed_tensors, fbgemm, fine_grained, modelopt

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
    fp8 = fp8_quantization((["Linear"], Fp8Format("online")))
    online = {"fp8": fp8, **extensions.online_quantizations}
    return replace(extensions, quantizations=formats, online_quantizations=online)
