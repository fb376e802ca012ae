"""Weighted sums of what experts return, on XLA."""

from ejkernel_xla.moe_unpermute.kernel import backward, forward

__all__ = ["backward", "forward"]
