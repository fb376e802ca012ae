"""Root-mean-square normalisation on XLA."""

from ejkernel_xla.rms_norm.kernel import backward, forward

__all__ = ["backward", "forward"]
