"""Layer normalisation on XLA."""

from ejkernel_xla.layer_norm.kernel import backward, forward

__all__ = ["backward", "forward"]
