"""Softmax attention on TPU: the entry points of both phases."""

from ejkernel_pallas.tpu.flash_attention.backward import backward
from ejkernel_pallas.tpu.flash_attention.forward import forward

__all__ = ["backward", "forward"]
