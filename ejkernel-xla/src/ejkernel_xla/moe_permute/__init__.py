"""Sorting tokens by experts on XLA."""

from ejkernel_xla.moe_permute.kernel import backward, forward

__all__ = ["backward", "forward"]
