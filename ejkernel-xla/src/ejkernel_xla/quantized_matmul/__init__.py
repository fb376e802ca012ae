"""Products with packed weights on XLA."""

from ejkernel_xla.quantized_matmul.kernel import backward, forward

__all__ = ["backward", "forward"]
