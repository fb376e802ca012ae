"""Mean pooling on XLA."""

from ejkernel_xla.mean_pooling.kernel import backward, forward

__all__ = ["backward", "forward"]
