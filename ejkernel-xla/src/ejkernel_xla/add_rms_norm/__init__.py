"""Residual addition and root-mean-square normalisation on XLA."""

from ejkernel_xla.add_rms_norm.kernel import backward, forward

__all__ = ["backward", "forward"]
