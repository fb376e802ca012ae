"""Products of int8 or float8 matrices on XLA."""

from ejkernel_xla.scaled_matmul.kernel import backward, forward

__all__ = ["backward", "forward"]
