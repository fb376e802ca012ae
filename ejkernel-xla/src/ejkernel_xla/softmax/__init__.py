"""Softmax on XLA."""

from ejkernel_xla.softmax.kernel import backward, forward

__all__ = ["backward", "forward"]
