"""Grouped matrix products on XLA."""

from ejkernel_xla.grouped_matmul.kernel import backward, forward

__all__ = ["backward", "forward"]
