"""Attention over a paged cache on XLA."""

from ejkernel_xla.paged_attention.backward import backward
from ejkernel_xla.paged_attention.forward import forward

__all__ = ["backward", "forward"]
