"""Quantised weights of published checkpoints, and FP8 and int4 from unquantised weights.

settings.py, awq.py and gptq.py read quantization_config, as each producer of checkpoints writes it.
FP8: format.py describes the storage as data, linear.py and experts.py store the weights in memory.
4 bits: packed.py and packed_methods.py do the same; awq.py, gptq.py, integers.py and nvfp4.py have
the formats. mxfp4.py is complete by itself. selection.py leaves out the ignored modules. Entry
points (launch/worker_main.py, LLM, the compiler) register the formats with `with_quantizations`;
the core does not import this package.

The products are in minisgl.kernel (fp8_products.py, packed_weights.py). The scales of a KV cache
belong to minisgl.kvcache and not to this package.
"""

from dataclasses import replace

from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.quantization.awq import awq
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.gptq import gptq
from minisgl.quantization.integers import online_int4
from minisgl.quantization.mxfp4 import mxfp4
from minisgl.quantization.selection import ALL, quantization
from minisgl.quantization.settings import compressed_tensors, fbgemm, fine_grained, modelopt

__all__ = ["with_quantizations"]


def with_quantizations(extensions: Extensions = DEFAULT_EXTENSIONS) -> Extensions:
    """Return `extensions` with all formats. Formats that it already has win."""
    formats = {
        "fp8": fine_grained,
        "compressed-tensors": compressed_tensors,
        "fbgemm_fp8": fbgemm,
        "modelopt": modelopt,
        "awq": awq,
        "gptq": gptq,
        "mxfp4": mxfp4,
        **extensions.quantizations,
    }
    online = {
        "fp8": quantization((ALL, Fp8Format("online"))),
        "int4": quantization((ALL, online_int4())),
        **extensions.online_quantizations,
    }
    return replace(extensions, quantizations=formats, online_quantizations=online)
