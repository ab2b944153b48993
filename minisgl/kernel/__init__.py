"""Kernels, each beside a plain torch reference with the same signature.

The functions of dispatch.py run the reference on CPU tensors and a Triton kernel on all others.
A few, such as shift_hidden, have no Triton kernel: the reference runs on all devices. The
references are in decode.py, delta.py, drafts.py, elementwise.py, fp8.py, fp8_weights.py,
gather.py, hidden.py, logits.py, mxfp4_weights.py, packed_weights.py, random.py, rotary.py,
sampling.py, ssd.py, states.py and step.py; the Triton kernels are in the package triton.

This file exports no name: import from the modules.
"""

__all__: list[str] = []
