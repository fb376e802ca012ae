"""Softmax attention on XLA: blocks of the score matrix, never the whole of it."""

from ejkernel_xla.flash_attention.backward import backward
from ejkernel_xla.flash_attention.forward import forward

__all__ = ["backward", "forward"]
